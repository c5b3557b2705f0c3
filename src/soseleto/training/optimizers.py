"""Optimizers and learning-rate schedules for ``fit(..., optimizer=..., schedule=...)``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from soseleto.errors import UsageError
from soseleto.task.task import MakeSchedule


@dataclass(frozen=True)
class Momentum:
    """The settings of SGD with momentum; called with parameters, it makes the optimizer."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool = False

    def __str__(self) -> str:
        return f"SGD, momentum {self.momentum}{', Nesterov' if self.nesterov else ''}"

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        parameters = list(parameters)
        on_gpu = all(p.is_cuda and p.is_floating_point() for p in parameters)
        made = SGD(
            parameters,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            nesterov=self.nesterov,
            fused=on_gpu or None,
        )
        if on_gpu and self.momentum:
            # Fused steps need the momentum of every parameter or of none; a method with phases adds a head late.
            for p in parameters:
                made.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return made


def sgd(lr: float, weight_decay: float = 0.0, momentum: float = 0.9, *, nesterov: bool = False) -> Momentum:
    """SGD with momentum, on request Nesterov's. Weight decay acts on the model's parameters, never on the source
    weights."""
    if not (lr > 0 and math.isfinite(lr)):
        raise UsageError(f"lr must be above 0, got {lr}.")
    return Momentum(lr, weight_decay, momentum, nesterov)


def linear(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate falls linearly from its first value to 0 over all steps."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / steps))


def cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate falls to 0 along half a cosine."""
    return LambdaLR(optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0))))


# By name, for command lines and experiments; ``None`` keeps the learning rate constant.
SCHEDULES: Mapping[str, MakeSchedule | None] = MappingProxyType({"linear": linear, "cosine": cosine, "constant": None})
