"""Alignments as if every example's error had size one.

    q / (1 − exp(−ℓ))

For cross-entropy 1 − exp(−ℓ) is one minus the probability of the label. A gradient is an error times a direction: this
compares directions, so that examples that are already fitted still show whether they help.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from soseleto.task.piece import Alignment, Piece, Step

_SMALLEST_ERROR = 1e-4


@dataclass(frozen=True)
class per_error(Piece):
    """Divide every alignment by the size of the example's own error."""

    slot: ClassVar[str] = "alignment"
    needs_losses: ClassVar[bool] = True

    def update(self, value: Alignment, state: Any, step: Step) -> Alignment:
        losses = step.source_losses.to(value.q.dtype)
        return replace(value, q=value.q / (_SMALLEST_ERROR - torch.expm1(-losses)))
