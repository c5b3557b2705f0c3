"""What ``fit`` and the command line use where no method is given, by the kind of task.

For classes with wrong labels: labels are doubted, the target has a share in the network's step, and weights move by the
last layer's alignments, in coordinates in which they tell wrong labels best, as far as they exceed their own noise. A
model that does not end in a linear layer gets the alignments of all its layers instead, by an engine. What other
choices came to is in ``docs/explanation/alignments.md``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from soseleto.algorithm import Soseleto
from soseleto.data.batch import Batch
from soseleto.extensions import (
    at_temperature,
    beyond_noise,
    chain,
    hold_when_vanished,
    label_doubt,
    last_layer,
    normalized,
    scale_by_rms,
    target_share,
    unit_length,
    whitened,
    without_own_error,
)
from soseleto.models.evaluation import evaluation_mode
from soseleto.task.last_layer import no_last_layer
from soseleto.task.losses import NoisyLosses, cross_entropy
from soseleto.task.piece import Piece
from soseleto.training.checks import TaskLosses
from soseleto.training.defaults import TARGET_SHARE, TRANSFER_SHARE, WEIGHT_STEP

STANDARD_ERRORS = 2.0  # of an example's mean alignment, before its weight moves
LAST_LAYER = last_layer(whitened(shrink=1.0), unit_length(), at_temperature(4.0), without_own_error())


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The usual method, with what was asked for; None is for it to choose.

    target_share: of the target's gradient in the network's step.
    doubt: whether labels are doubted.
    all_layers: whether alignments are those of all layers, by ``engine``.
    """

    weight_step: float = WEIGHT_STEP
    target_share: float | None = None
    doubt: bool | None = None
    all_layers: bool | None = None
    engine: str = "auto"

    def method(self, mode: str, *, classes: bool = True, ends_in_linear: bool = True) -> Soseleto:
        """For a task with class indices and cross-entropy or another, and a model that ends in a linear layer or not.

        Example:
            >>> Usual(weight_step=0.2).method("noisy").source_loss
            label_doubt(normalize=True)
        """
        noisy = mode == "noisy" and classes
        of_mode = TARGET_SHARE if noisy else TRANSFER_SHARE if mode == "transfer" else 0.0
        share = of_mode if self.target_share is None else self.target_share
        doubt = noisy if self.doubt is None else self.doubt
        last = noisy and ends_in_linear and self.engine == "auto" if self.all_layers is None else not self.all_layers
        pieces: tuple[Piece, ...] = (scale_by_rms(), hold_when_vanished())
        if noisy:
            pieces += (beyond_noise(STANDARD_ERRORS),)
        return Soseleto(
            weight_step=self.weight_step,
            alignment=chain(LAST_LAYER, *pieces) if last else chain(*pieces),
            source_loss=label_doubt() if doubt else normalized(),
            gradients=target_share(share) if share else chain(),
            engine=self.engine,
        )

    def method_for(
        self, mode: str, model: nn.Module, losses: TaskLosses, one: Batch, *, is_classifier: bool
    ) -> Soseleto:
        """For a model and its losses, tried on a batch of one example."""
        if mode != "noisy":
            return self.method(mode)
        assert isinstance(losses, NoisyLosses)
        classes = is_classifier and losses.loss is cross_entropy
        return self.method(mode, classes=classes, ends_in_linear=classes and ends_in_linear(model, one))


def ends_in_linear(model: nn.Module, one: Batch) -> bool:
    """Whether a classifier has last-layer alignments, found by one pass in evaluation mode."""
    with evaluation_mode(model):
        return no_last_layer(NoisyLosses(), model, one) is None
