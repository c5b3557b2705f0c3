"""A loss that draws the trunk's features of source and target together: the next step that the paper proposes.

Any function from source features (B, d) and target features (T, d) to a number will do:
``Soseleto(gradients=domain_loss(Coral(strength=1.0)))``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from soseleto.data.structure import call, concatenate
from soseleto.errors import UsageError
from soseleto.task.piece import Piece, State, Step
from soseleto.task.task import Task

# (source features, target features) -> a number
FeatureLoss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Coral:
    """Correlation alignment (Sun and Saenko 2016): strength · ‖C_s − C_t‖²_F / (4 d²), of covariances C."""

    strength: float = 1.0

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        width = source.shape[1]
        return self.strength * (covariance(source) - covariance(target)).square().sum() / (4 * width * width)


def covariance(features: Tensor) -> Tensor:
    """(d, d) of features (B, d), with the divisor B − 1."""
    centred = features - features.mean(0)
    return centred.T @ centred / max(len(features) - 1, 1)


@dataclass(frozen=True)
class domain_loss(Piece):
    """Add the gradient of a feature loss to that of the trunk (transfer mode).

    It needs a forward of its own, on both batches at once, which Algorithm 1 keeps apart.
    """

    loss: FeatureLoss

    slot: ClassVar[str] = "gradients"
    shares_work: ClassVar[bool] = False

    def init(self, task: Task) -> State:
        if not hasattr(task.model, "trunk"):
            raise UsageError("domain_loss compares the features of a trunk: say mode='transfer', or leave it out.")
        return {}

    def update(self, value: dict[str, Tensor], state: Any, step: Step) -> dict[str, Tensor]:
        model: Any = step.task.model
        both = call(model.trunk, concatenate([step.source.inputs, step.target.inputs]))
        loss = self.loss(both[: len(step.source)], both[len(step.source) :])
        shared = {name: p for name, p in model.named_parameters() if p.requires_grad and name in step.task.shared}
        found = torch.autograd.grad(loss, list(shared.values()), allow_unused=True)
        return value | {name: value[name] + g for name, g in zip(shared, found, strict=True) if g is not None}
