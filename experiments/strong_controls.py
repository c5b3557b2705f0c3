"""Controls of the strong recipe: what it is worth that every label has a weight of its own.

    s = v·label + (1 − v)·q,    v a mean weight, or the weight of another example

The teacher's answer q may be the label, so that a right label that is doubted is not lost.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soseleto.methods.strong import Strong
from soseleto.methods.teacher import SMALLEST


@dataclass(frozen=True, kw_only=True)
class FrozenStrong(Strong):
    """Every label of a batch has the batch's mean weight; the weights that are learned stay.

    others: the rest goes to the teacher's other classes, as in the recipe, which turns right labels into wrong ones
    """

    others: bool = False

    name = "strong_frozen"

    def doubted(self, r: Tensor, q: Tensor, labels: Tensor) -> Tensor:
        v = self.weights((r * labels).sum(1, keepdim=True))
        answer = (r + SMALLEST) * (1.0 - labels) if self.others else q
        return v * labels + (1.0 - v) * answer / answer.sum(1, keepdim=True)

    def weights(self, own: Tensor) -> Tensor:
        """v (B, 1)."""
        return own.mean(0, keepdim=True).expand_as(own)


@dataclass(frozen=True, kw_only=True)
class ShuffledStrong(FrozenStrong):
    """Every label has the weight of another example of its batch, whose order is random."""

    name = "strong_shuffled"

    def weights(self, own: Tensor) -> Tensor:
        return own.roll(1, 0)
