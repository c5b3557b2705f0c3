"""What ``fit`` and the command line use where no method is given, by the kind of task.

For classes with wrong labels, labels are doubted and the target has a share in the network's step. What moves the
weights depends on how many labels are wrong, which is estimated from the data before the training:

- *few*: the last layer's alignments, in coordinates in which they tell wrong labels best, as far as they exceed their
  own noise. A right but hard example must not lose its weight.
- *many*: the alignments of all layers as they are, with a larger step and a larger share of the target. Weights must
  fall fast, before the network has learned the wrong labels. In a network with convolutions that was worse than mixed
  training: there the last layer's alignments move them, as they are. One that is too small to learn the labels by heart
  needs no haste: its weights start at 0.7, and move as where few are wrong. A pretrained one has few epochs: a weight
  can go all the way in one visit; the alignments of its last two blocks serve as well as those of all, and cost less.

A model that does not end in a linear layer has the alignments of all layers in both cases. What other choices came to
is in ``docs/explanation/alignments.md``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from soseleto.algorithm import Soseleto
from soseleto.data import ExampleSet, structure
from soseleto.data.batches import Batch
from soseleto.data.feeding import Prepare
from soseleto.engines.shards import sharded_modules
from soseleto.models.pretrained_images import last_blocks
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.pieces import (
    Piece,
    at_temperature,
    beyond_noise,
    chain,
    hold_when_vanished,
    label_doubt,
    last_layer,
    normalized,
    running_mean,
    scale_by_rms,
    target_share,
    unit_length,
    whitened,
    without_own_error,
)
from soseleto.pieces.last_layer import no_last_layer
from soseleto.suspects.mistakes import can_estimate
from soseleto.task.losses import NoisyLosses
from soseleto.training.defaults import (
    EPOCHS,
    MANY_SHARE,
    MANY_WEIGHT_STEP,
    PRETRAINED_WEIGHT_STEP,
    TARGET_SHARE,
    TRANSFER_SHARE,
    WEIGHT_STEP,
    convolutional_weight_step,
    few_weight_step,
)
from soseleto.training.estimated_mistakes import estimate_mistakes
from soseleto.training.optimizers import is_from_library
from soseleto.training.out_of_memory import is_out_of_memory
from soseleto.training.settings import settings_of

MANY = 0.125  # the share of wrong labels from which they are many, by the lower end of its interval
MANY_PRETRAINED = 0.04  # the same of a pretrained network, which sees half of people's mistakes beforehand
STANDARD_ERRORS = 2.0  # of an example's mean alignment, before its weight moves
BY_HEART = 10  # parameters an example, from which a network can learn labels by heart; compared with 3 and with 48
LAST_BLOCKS = 2  # of a pretrained network, by whose alignments weights move
DOUBTFUL = 0.7  # the first weight where many labels are wrong and the network is too small for that
LAST_LAYER = last_layer(whitened(shrink=1.0), unit_length(), at_temperature(4.0), without_own_error())
SIZED: tuple[Piece, ...] = (scale_by_rms(), hold_when_vanished())


@dataclass(frozen=True, kw_only=True)
class Usual:
    """The usual method, with what was asked for; None is for it to choose.

    target_share: of the target's gradient in the network's step.
    doubt: whether labels are doubted.
    all_layers: whether weights move by the alignments of all layers, which ``engine`` computes.
    """

    weight_step: float | None = None
    target_share: float | None = None
    doubt: bool | None = None
    all_layers: bool | None = None
    engine: str = "auto"

    def method(self, mode: str) -> Soseleto:
        """For transfer mode, and for losses that are no cross-entropy of classes.

        Example:
            >>> Usual(weight_step=0.2).method("transfer").gradients
            target_share(share=0.5)
        """
        share = TRANSFER_SHARE if mode == "transfer" else 0.0
        return self._made(SIZED, WEIGHT_STEP, share, doubt=False, all_layers=True)

    def method_for_classes(
        self,
        *,
        many_wrong: bool,
        ends_in_linear: bool = True,
        convolutional: bool = False,
        by_heart: bool = True,
        pretrained: bool = False,
        last_blocks: tuple[str, ...] = (),
        epochs: int = EPOCHS,
    ) -> Soseleto:
        """For classes with wrong labels, many or few, and a model that ends in a linear layer or not.

        by_heart: whether the model has parameters enough to learn the labels by heart.
        pretrained: it is trained for few epochs, in which its weights must move.
        last_blocks: what names of parameters in its last blocks begin with; empty if it has no list of blocks.

        Example:
            >>> Usual().method_for_classes(many_wrong=True).weight_step
            0.3
        """
        all_layers = (many_wrong and not convolutional) or not ends_in_linear or self.engine != "auto"
        patient = not many_wrong or (convolutional and not by_heart and not pretrained)
        if patient:
            pieces, step = (*SIZED, beyond_noise(STANDARD_ERRORS)), few_weight_step(epochs)
        elif pretrained:
            pieces, step = SIZED, PRETRAINED_WEIGHT_STEP
        else:
            pieces, step = SIZED, convolutional_weight_step(epochs) if convolutional else MANY_WEIGHT_STEP
        share = MANY_SHARE if many_wrong else TARGET_SHARE
        by_blocks = pretrained and not patient and self.all_layers is None and self.engine == "auto"
        layers = last_blocks if by_blocks and not convolutional else ()
        made = self._made(pieces, step, share, doubt=True, all_layers=all_layers, layers=layers)
        if many_wrong and patient:
            made = replace(made, initial_weight=DOUBTFUL)
        return replace(made, scores=LAST_LAYER) if ends_in_linear and not made.alignment.reads_layer else made

    def _made(
        self,
        pieces: tuple[Piece, ...],
        weight_step: float,
        share: float,
        *,
        doubt: bool,
        all_layers: bool,
        layers: tuple[str, ...] = (),
    ) -> Soseleto:
        """With these settings, unless others were asked for; layers: those that alignments are taken over, or all."""
        share = share if self.target_share is None else self.target_share
        doubt = doubt if self.doubt is None else self.doubt
        all_layers = all_layers if self.all_layers is None else self.all_layers
        return Soseleto(
            weight_step=weight_step if self.weight_step is None else self.weight_step,
            direction=running_mean(layers=layers or None),
            alignment=chain(*pieces) if all_layers else chain(LAST_LAYER, *pieces),
            source_loss=label_doubt() if doubt else normalized(),
            gradients=target_share(share) if share else chain(),
            engine=self.engine,
        )

    def method_for_data(
        self,
        model: nn.Module,
        prepare: Prepare,
        source: ExampleSet,
        target: ExampleSet,
        *,
        seed: int,
        epochs: int = EPOCHS,
        before: Any = None,
    ) -> Soseleto:
        """For these classes and this model.

        before: the settings of an unfinished run that is to be continued, see ``settings_of``. An estimate that differs
            a little on another machine must not make it another run.
        """
        try:
            kind = {"ends_in_linear": ends_in_linear(model, prepare, source), "convolutional": convolutional(model)}
            kind["by_heart"] = by_heart(model, source)
            kind["pretrained"] = is_from_library(model)
            blocks = last_blocks(model, LAST_BLOCKS) if kind["pretrained"] else ()
            few, many = (
                self.method_for_classes(many_wrong=many, epochs=epochs, last_blocks=blocks, **kind)
                for many in (False, True)
            )
            for method in (few, many):
                if before is not None and before == json.loads(json.dumps(settings_of(method))):
                    return method
            wrong = wrong_at_least(model, prepare, source, target, seed=seed)
            return many if wrong >= (MANY_PRETRAINED if kind["pretrained"] else MANY) else few
        except Exception as error:
            if is_out_of_memory(error):  # the training does not fit either, and says what would
                return self.method_for_classes(many_wrong=False, epochs=epochs)
            raise


def ends_in_linear(model: nn.Module, prepare: Prepare, source: ExampleSet) -> bool:
    """Whether a classifier has last-layer alignments, found by one pass in evaluation mode."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    inputs, labels = structure.to_device(source.take(torch.tensor([0])), device)
    one = Batch(torch.zeros(1, dtype=torch.int64, device=device), prepare(inputs), labels)
    with evaluation_mode(model):
        return no_last_layer(NoisyLosses(), model, one) is None


def convolutional(model: nn.Module) -> bool:
    return any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in model.modules())


def by_heart(model: nn.Module, source: ExampleSet) -> bool:
    """Whether a model has parameters enough to learn the source's labels by heart."""
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return parameters > BY_HEART * len(source)


def wrong_at_least(model: nn.Module, prepare: Prepare, source: ExampleSet, target: ExampleSet, *, seed: int) -> float:
    """The lower end of the estimated share of wrong labels in the source; 0 where nothing can be estimated."""
    if sharded_modules(model):
        return 0.0
    classes = max(len(side.classes or ()) or int(side.sample_labels().max()) + 1 for side in (source, target))
    if classes < 2 or not can_estimate(len(target), classes):
        return 0.0
    return estimate_mistakes(model, prepare, source, target, classes, seed=seed).share[0]
