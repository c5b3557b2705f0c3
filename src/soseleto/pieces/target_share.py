"""The target's own gradient in θ's step.

    (1 − share)·Qα_b + share·∂L_t/∂θ

0 is the paper, whose target reaches θ through the weights alone; more makes use of clean labels that are too many to
be memorised.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.task.piece import Piece, Step


@dataclass(frozen=True)
class target_share(Piece):
    """Mix the target gradient into the gradient of θ."""

    share: float

    slot: ClassVar[str] = "gradients"
    needs_target: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise UsageError(f"share of target_share must lie in (0, 1), got {self.share}: leave the piece out for 0.")

    def update(self, value: dict[str, Tensor], state: Any, step: Step) -> dict[str, Tensor]:
        assert step.passes is not None
        of_target = step.passes.target_gradient
        both = [name for name in value if name in of_target and name in step.task.shared]
        mixed = torch._foreach_lerp([value[n] for n in both], [of_target[n] for n in both], self.share) if both else ()
        return value | dict(zip(both, mixed, strict=True))
