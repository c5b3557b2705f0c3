"""Alignments in units of their own size, so that one weight step serves every problem.

    unit = 1 / √(mean of q² over all alignments so far)

In the paper's terms λ_α = weight_step·nˢ/(λ_p·rms(q)).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from soseleto.task.piece import Alignment, Piece, State, Step
from soseleto.task.task import Task


@dataclass(frozen=True)
class scale_by_rms(Piece):
    """Divide by the root mean square of all alignments so far."""

    slot: ClassVar[str] = "alignment"

    def init(self, task: Task) -> State:
        tiny = torch.finfo(torch.float32).tiny
        return {
            "moves": torch.zeros((), dtype=torch.float64, device=task.device),
            "square": torch.full((), tiny, dtype=torch.float64, device=task.device),  # Σ over moves of mean(q²)
        }

    def update(self, value: Alignment, state: Any, step: Step) -> Alignment:
        q = value.q if isinstance(value.unit, float) and value.unit == 1.0 else value.scaled
        state["moves"].add_(1)
        state["square"].add_(step.task.sharing.sum(torch.dot(q, q)), alpha=1.0 / step.source.total)
        return replace(value, q=q, unit=(state["moves"] / state["square"]).sqrt_())
