"""Controls of the strong recipe: what it is worth that every label has a weight of its own."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soseleto.data.batch import Batch
from soseleto.methods.strong.judgement import SMALLEST, one_hot
from soseleto.methods.strong.method import Strong, StrongState


@dataclass(frozen=True, kw_only=True)
class FrozenStrong(Strong):
    """Every label of a batch has the batch's mean weight; the teacher's other answers share what is left."""

    name = "strong_frozen"

    def believed(
        self, state: StrongState, judged: Tensor, beliefs: dict[str, Tensor], source: Batch, target: Batch
    ) -> tuple[Tensor, Tensor]:
        """As ``Strong`` does, but each label is believed as ``weights`` says; the weights that are learned stay."""
        s, w = super().believed(state, judged, beliefs, source, target)
        labels = one_hot(source.labels, s.shape[1])
        others = s * (1.0 - labels) + SMALLEST * (1.0 - labels)
        given = self.weights((s * labels).sum(1, keepdim=True))
        return given * labels + (1.0 - given) * others / others.sum(1, keepdim=True), w

    def weights(self, own: Tensor) -> Tensor:
        """What labels are believed by, (B, 1)."""
        return own.mean(0, keepdim=True).expand_as(own)


@dataclass(frozen=True, kw_only=True)
class ShuffledStrong(FrozenStrong):
    """Every label has the weight of another example of its batch, whose order is random."""

    name = "strong_shuffled"

    def weights(self, own: Tensor) -> Tensor:
        return own.roll(1, 0)
