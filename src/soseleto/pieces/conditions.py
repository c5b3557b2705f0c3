"""The paper's conditions in numbers, measured at one step of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soseleto.engines import trainable
from soseleto.engines.contract import inner
from soseleto.engines.shards import whole
from soseleto.engines.unchanged import unchanged
from soseleto.pieces.piece import Alignment, Step


@dataclass(frozen=True)
class Moved:
    """How the weights of a batch moved: alpha is what they are now."""

    alpha: Tensor
    weight_step: Tensor | float
    aligned: Alignment

    @property
    def multiplier(self) -> Tensor | float:
        """The weights moved by multiplier·q, before the clip."""
        return self.weight_step * self.aligned.gate * self.aligned.unit


def copies(model: nn.Module) -> dict[str, Tensor]:
    """θ_m, before the optimizer moves it."""
    return {name: p.detach().clone() for name, p in trainable(model).items()}


def conditions(step: Step, before: dict[str, Tensor], moved: Moved) -> dict[str, Tensor]:
    """The sufficient condition of the paper, and the change of the target loss, after a step from θ_m = ``before``.

    condition: λ_α ≥ √nˢ/(λ_p‖Qᵀ∂L_t/∂θ‖) on the batch, as the ratio of the two sides; it is met at 1 or more.
    predicted_change, actual_change: of L_t on this target batch, to first order, ⟨∂L_t, θ_{m+1} − θ_m⟩, and measured.
    held: 1 where the weights were held.
    """
    task, passes = step.task, step.passes
    assert passes is not None
    now = trainable(task.model)
    first_order = sum(
        (
            whole(inner({name: g}, {name: now[name].detach() - before[name]}))
            for name, g in passes.target_gradient.items()
        ),
        start=torch.zeros((), dtype=passes.target_losses.dtype, device=task.device),
    )
    with unchanged(task.model):
        after = task.sharing.mean_loss(task.model, task.losses.target, step.target)
    size = task.sharing.sum(moved.aligned.q.square().sum()).sqrt()  # ‖Qᵀ∂L_t/∂θ‖
    return {
        "held": torch.as_tensor(1.0 - moved.aligned.gate, dtype=torch.float32, device=task.device),
        "condition": moved.multiplier * size / math.sqrt(step.source.total),
        "predicted_change": first_order,
        "actual_change": after - task.sharing.mean(passes.target_losses, step.target),
    }
