"""Whether source and target may share one pass: the source's losses and gradients must be those it has alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from soseleto.engines.autograd import gradient
from soseleto.engines.contract import (
    Step,
    trainable,
    uncompiled,
)
from soseleto.engines.proof import (
    Inexact,
    all_finite,
    coefficients,
    compare,
)
from soseleto.engines.unchanged import unchanged

SAME_LOSSES = 1e-2  # of two passes through the same layers, also in half precision


@dataclass(frozen=True)
class Alone:
    """Losses, and the gradient of their sum with random coefficients; the graph is freed."""

    losses: Tensor
    gradient: dict[str, Tensor]

    @classmethod
    def of(cls, losses: Tensor, model: nn.Module) -> Alone:
        c = coefficients(losses, examples=0, seed=len(losses))[0].to(losses.dtype)
        return cls(losses.detach(), gradient(losses, trainable(model), c))


def joins(step: Step, joint: Alone, tolerance: float) -> bool:
    """Whether the source's losses and gradients of a joint pass are those of the source alone.

    A model that draws at random draws other numbers for other sizes: there they must be those of a joint pass with
    other inputs on the target's side.
    """
    if not (all_finite(joint.gradient) and bool(joint.losses.isfinite().all())):  # guards report them
        return True
    with unchanged(step.model), torch.enable_grad(), uncompiled(step.model):
        before = torch.get_rng_state(), _gpu_state(joint.losses)
        losses = step.losses.source(step.model, step.source)
        now = torch.get_rng_state(), _gpu_state(losses)
    if not all(map(torch.equal, now, before)):
        other = _with_inputs_of(step.source, step.target)
        if other is None or not step.losses.can_join(step.source, other):
            return False
        with unchanged(step.model), torch.enable_grad(), uncompiled(step.model):
            losses = step.losses.joint(step.model, step.source, other)[: len(step.source)]
    alone = Alone.of(losses, step.model)
    apart = (alone.losses - joint.losses).abs().max()
    try:
        compare(joint.gradient, alone.gradient, tolerance)
    except Inexact:
        return False
    return bool(apart <= min(tolerance, SAME_LOSSES) * alone.losses.abs().max())


def _with_inputs_of(source: Any, target: Any) -> Any:
    """The target batch with inputs of source examples; None if the structure of a batch is not known."""
    if not hasattr(source, "inputs") or not hasattr(target, "inputs"):
        return None
    places = torch.arange(len(target)) % len(source)

    def rows(x: Any) -> Any:
        return x[places.to(x.device)] if isinstance(x, Tensor) and len(x.shape) and len(x) == len(source) else x

    return replace(target, inputs=tree_map(rows, source.inputs))


def _gpu_state(like: Tensor) -> Tensor:
    return torch.cuda.get_rng_state(like.device) if like.is_cuda else torch.empty(0)
