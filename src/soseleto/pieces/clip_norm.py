"""Clip the norm of the gradient that the optimizer sees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.task.piece import Piece, Step


@dataclass(frozen=True)
class clip_norm(Piece):
    """Scale the whole gradient down to a norm of at most ``max_norm``."""

    max_norm: float

    slot: ClassVar[str] = "gradients"

    def __post_init__(self) -> None:
        if not self.max_norm > 0:
            raise UsageError(f"max_norm of clip_norm must be above 0, got {self.max_norm}: leave the piece out.")

    def update(self, value: dict[str, Tensor], state: Any, step: Step) -> dict[str, Tensor]:
        names = [name for name, _ in step.task.model.named_parameters() if name in value]
        norm = torch.nn.utils.get_total_norm([value[name] for name in names])
        factor = torch.clamp(self.max_norm / (norm + 1e-6), max=1.0)
        return {name: value[name] * factor.to(value[name].device) for name in names}
