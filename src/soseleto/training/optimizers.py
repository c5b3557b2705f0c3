"""Optimizers and learning-rate schedules as plain functions that fit can be given."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from soseleto.errors import UsageError
from soseleto.task.task import MakeOptimizer, MakeSchedule


def sgd(lr: float, weight_decay: float = 0.0, momentum: float = 0.9) -> MakeOptimizer:
    """SGD with momentum. Weight decay acts on the model's parameters, never on the source weights."""
    if not (lr > 0 and math.isfinite(lr)):
        raise UsageError(f"lr must be above 0, got {lr}.")

    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        parameters = list(parameters)
        on_gpu = all(p.is_cuda and p.is_floating_point() for p in parameters)
        made = SGD(parameters, lr=lr, momentum=momentum, weight_decay=weight_decay, fused=on_gpu or None)
        if on_gpu and momentum:  # fused steps want every momentum or none; in methods with phases a head may come late
            for p in parameters:
                made.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return made

    return make


def linear(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate falls linearly from its first value towards 0 over all steps."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / steps))


def cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate falls along half a cosine."""
    return LambdaLR(optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0))))


# By name, for command lines and experiments; ``None`` keeps the learning rate constant.
SCHEDULES: Mapping[str, MakeSchedule | None] = MappingProxyType({"linear": linear, "cosine": cosine, "constant": None})
