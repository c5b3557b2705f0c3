"""Optimizers and learning-rate schedules for ``fit(..., optimizer=..., schedule=...)``; defaults by kind of model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from soseleto.errors import UsageError
from soseleto.task.task import MakeSchedule
from soseleto.training.defaults import (
    ADAPTER_LR,
    EPOCHS,
    LR,
    PRETRAINED_BATCH,
    PRETRAINED_EPOCHS,
    PRETRAINED_IMAGE_EPOCHS,
    PRETRAINED_IMAGE_LR,
    PRETRAINED_LR,
    batch_size_for,
)

WARM_UP = 0.1  # the share of the steps in which ``warmup_cosine`` rises
LIBRARIES = ("transformers", "timm", "peft")


@dataclass(frozen=True)
class Momentum:
    """The settings of SGD with momentum; called with parameters, it makes the optimizer."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool = False

    @property
    def name(self) -> str:
        return f"SGD, momentum {self.momentum}{', Nesterov' if self.nesterov else ''}"

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        parameters = list(parameters)
        on_gpu = _can_fuse(parameters)
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


@dataclass(frozen=True)
class Adaptive:
    """The settings of AdamW; called with parameters, it makes the optimizer."""

    lr: float
    weight_decay: float
    betas: tuple[float, float]

    @property
    def name(self) -> str:
        return f"AdamW, betas {self.betas[0]} and {self.betas[1]}"

    def __call__(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        parameters = list(parameters)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in parameters if p.ndim > 1]},
            {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
        ]
        on_gpu = _can_fuse(parameters)
        settings: dict[str, Any] = {"lr": self.lr, "weight_decay": self.weight_decay, "betas": self.betas}
        given = [group for group in groups if group["params"]]
        return AdamW(given, **settings, fused=on_gpu or None, capturable=on_gpu)


def _can_fuse(parameters: Sequence[nn.Parameter]) -> bool:
    return all(p.is_cuda and p.is_floating_point() for p in parameters)


def sgd(lr: float, weight_decay: float = 0.0, momentum: float = 0.9, *, nesterov: bool = False) -> Momentum:
    """SGD with momentum, on request Nesterov's. Weight decay acts on the model's parameters, never on the source
    weights."""
    _require_rate(lr, weight_decay)
    return Momentum(lr, weight_decay, momentum, nesterov)


def adamw(lr: float, weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.999)) -> Adaptive:
    """AdamW. Weight decay acts on matrices and filters, not on biases, norms or the source weights."""
    _require_rate(lr, weight_decay)
    return Adaptive(lr, weight_decay, betas)


def _require_rate(lr: float, weight_decay: float) -> None:
    if not (lr > 0 and math.isfinite(lr)):
        raise UsageError(f"lr must be above 0, got {lr}: 0.03 is usual for SGD, 3e-5 for a pretrained model.")
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise UsageError(f"weight_decay must be 0 or more, got {weight_decay}: 0.0005 is usual.")


def linear(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate falls linearly from its first value to 0 over all steps."""
    return LambdaLR(optimizer, lambda step: max(0.0, 1.0 - step / steps))


def cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate falls to 0 along half a cosine."""
    return LambdaLR(optimizer, lambda step: 0.5 * (1.0 + math.cos(math.pi * min(step / steps, 1.0))))


def warmup_cosine(optimizer: Optimizer, steps: int) -> LRScheduler:
    """The learning rate rises linearly over the first tenth of the steps, then falls to 0 along half a cosine."""
    rising = math.ceil(WARM_UP * steps)

    def share(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.5 * (1.0 + math.cos(math.pi * min((step - rising) / max(1, steps - rising), 1.0)))

    return LambdaLR(optimizer, share)


def default_optimizer(model: nn.Module, lr: float | None, weight_decay: float = 0.0) -> Momentum | Adaptive:
    """AdamW for a model with parts from transformers, timm or peft, which were pretrained with it; SGD for others."""
    if is_from_library(model):
        return adamw(_pretrained_rate(model) if lr is None else lr, weight_decay)
    return sgd(LR if lr is None else lr, weight_decay)


def _pretrained_rate(model: nn.Module) -> float:
    """Small for texts, since larger ones learn wrong labels by heart; larger for images and for adapters."""
    if any(_library(part) == "peft" for part in model.modules()):
        return ADAPTER_LR
    return PRETRAINED_IMAGE_LR if _reads_images(model) else PRETRAINED_LR


def default_schedule(model: nn.Module) -> MakeSchedule:
    """``warmup_cosine`` beside AdamW, ``linear`` beside SGD."""
    return warmup_cosine if is_from_library(model) else linear


def default_epochs(model: nn.Module) -> int:
    """Fewer for a model with parts from transformers, timm or peft, which begins with pretrained weights."""
    if not is_from_library(model):
        return EPOCHS
    return PRETRAINED_IMAGE_EPOCHS if _reads_images(model) else PRETRAINED_EPOCHS


def default_batch_size(model: nn.Module, n: int) -> int:
    """By the size of the source; small for a pretrained model of texts, whose few epochs must have enough steps."""
    size = batch_size_for(n)
    return size if not is_from_library(model) or _reads_images(model) else min(size, PRETRAINED_BATCH)


def is_from_library(model: nn.Module) -> bool:
    """Whether a part of the model comes from a library of pretrained models."""
    return any(_library(part) in LIBRARIES for part in model.modules())


def _library(part: nn.Module) -> str:
    return type(part).__module__.partition(".")[0]


def _reads_images(model: nn.Module) -> bool:
    """Whether a part comes from timm, or from transformers with image channels in its configuration."""
    parts = list(model.modules())
    return any(_library(one) == "timm" or hasattr(getattr(one, "config", None), "num_channels") for one in parts)


# By name, for command lines and experiments; ``None`` keeps the learning rate constant.
SCHEDULES: Mapping[str, MakeSchedule | None] = MappingProxyType(
    {"linear": linear, "cosine": cosine, "warmup_cosine": warmup_cosine, "constant": None}
)
