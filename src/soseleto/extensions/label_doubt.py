"""Labels that are doubted: a weight as the belief in a label, and what the network itself makes of it.

    d = −log(α·p + (1 − α)/K)          p = exp(−ℓ), what the network gives the label; any of K labels is as likely else
    ∂d = w ∂ℓ,  w = α·p/(α·p + (1 − α)/K)

w is the belief in the label once the network has been heard. Where the network disagrees, a little doubt is enough for
the example to count no more; at α = 1 there is none, and w = 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soseleto.data.batch import Batch
from soseleto.errors import UsageError
from soseleto.task.losses import NoisyLosses, TransferLosses, cross_entropy
from soseleto.weights import Weights

_LEAST = 0.01  # that a label is believed, so that every example can come back
_COUNTS = 1e-4  # the least that an example counts


@dataclass(frozen=True)
class DoubtedLosses:
    """The losses of a problem, where the labels of the source are believed by as much as its weights say."""

    plain: NoisyLosses | TransferLosses
    weights: Weights
    classes: int

    def source(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._doubted(self.plain.source(model, batch), batch)

    def target(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.plain.target(model, batch)

    def can_join(self, source: Batch, target: Batch) -> bool:
        return self.plain.can_join(source, target)

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        losses = self.plain.joint(model, source, target)
        return torch.cat([self._doubted(losses[: len(source)], source), losses[len(source) :]])

    def counts(self, doubted: Tensor, batch: Batch) -> Tensor:
        """w of every example, from what ``source`` gave."""
        return -torch.expm1(self._log_other(self._belief(batch, doubted.dtype)) + doubted).clamp_max(-_COUNTS)

    def _doubted(self, losses: Tensor, batch: Batch) -> Tensor:
        belief = self._belief(batch, losses.dtype)
        return -torch.logaddexp(belief.log() - losses, self._log_other(belief))

    def _belief(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return self.weights.values[batch.index].to(dtype).clamp_min(_LEAST)

    def _log_other(self, belief: Tensor) -> Tensor:
        """log((1 − α)/K)."""
        return (1.0 - belief).clamp_min(torch.finfo(belief.dtype).tiny).log() - math.log(self.classes)


def doubt(losses: object, weights: Weights, classes: int | None) -> DoubtedLosses:
    """Those losses with doubt, or an error where labels are not classes told by cross-entropy."""
    loss = losses.source_loss if isinstance(losses, TransferLosses) else getattr(losses, "loss", None)
    if classes is None or loss is not cross_entropy or not isinstance(losses, NoisyLosses | TransferLosses):
        raise UsageError(
            "doubt_labels needs class indices as source labels and cross-entropy as their loss: leave it out."
        )
    return DoubtedLosses(losses, weights, classes)
