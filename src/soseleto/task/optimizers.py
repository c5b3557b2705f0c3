"""The optimizers that defaults use: torch's, fused on a GPU. Bind settings with ``functools.partial(sgd, lr=0.1)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


def sgd(
    parameters: Iterable[nn.Parameter],
    *,
    lr: float,
    weight_decay: float = 0.0,
    momentum: float = 0.9,
    nesterov: bool = False,
) -> Optimizer:
    """SGD with momentum. Weight decay acts on the model's parameters, never on the source weights."""
    parameters = list(parameters)
    fused = _on_gpu(parameters)
    settings: dict[str, Any] = {"weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
    optimizer = torch.optim.SGD(parameters, lr=lr, fused=fused or None, **settings)
    if fused and momentum:
        # Fused steps need the momentum of every parameter or of none; a method with phases adds a head late.
        for p in parameters:
            optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def adamw(parameters: Iterable[nn.Parameter], *, lr: float, weight_decay: float = 0.0) -> Optimizer:
    """AdamW. Weight decay acts on matrices and filters, not on biases, norms or the source weights."""
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1]},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    fused = _on_gpu(parameters)
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=lr, weight_decay=weight_decay, fused=fused or None, capturable=fused)


def describe(make: Any) -> dict[str, Any]:
    """Name and settings of a function that makes an optimizer, as ``config.json`` holds them."""
    settings = dict(make.keywords) if isinstance(make, partial) else {}
    function = make.func if isinstance(make, partial) else make
    name = getattr(function, "__qualname__", None) or repr(function)
    others = {key: value for key, value in settings.items() if key not in ("lr", "weight_decay")}
    shown = ", ".join([name, *(f"{key}={value}" for key, value in others.items())])
    return {"optimizer": shown, "lr": settings.get("lr"), "weight_decay": settings.get("weight_decay")}


def _on_gpu(parameters: Sequence[nn.Parameter]) -> bool:
    return all(p.is_cuda and p.is_floating_point() for p in parameters)
