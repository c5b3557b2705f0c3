"""What is known about the labels before the training: how many are wrong, and probes planted among the source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.data import ExampleSet, generator, seed_for, structure
from soseleto.data.batches import Batch
from soseleto.data.examples import in_pieces
from soseleto.data.feeding import Prepare
from soseleto.engines.shards import sharded_modules
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.pieces.last_layer import no_last_layer
from soseleto.suspects import mistakes, probes
from soseleto.suspects.signals import features_of, last_inputs
from soseleto.task.losses import NoisyLosses
from soseleto.training.data import Data
from soseleto.training.options import Probes
from soseleto.training.out_of_memory import is_out_of_memory
from soseleto.training.setup import seeded


@dataclass(frozen=True)
class Labels:
    """The labels of a classification, judged by the network before training.

    before: the configuration of an unfinished run that is to be continued. Its estimates are taken over, since one
        that differs a little on another machine must not make it another run.
    """

    model: nn.Module
    prepare: Prepare
    source: ExampleSet
    target: ExampleSet
    seed: int
    before: Mapping[str, Any]

    @cached_property
    def mistakes(self) -> mistakes.Mistakes | None:
        """The estimated mistakes of the source; None where nothing can be estimated."""
        sides = self.source, self.target
        if sharded_modules(self.model):
            return None
        classes = max(len(side.classes or ()) or int(side.sample_labels().max()) + 1 for side in sides)
        if classes < 2 or not mistakes.can_estimate(len(self.target), classes):
            return None
        try:
            return estimate_mistakes(self.model, self.prepare, *sides, classes, seed=self.seed)
        except Exception as error:
            if is_out_of_memory(error):  # the training does not fit either, and says what would
                return None
            raise

    @property
    def wrong_share(self) -> float | None:
        """Lower end of the estimated share of wrong source labels."""
        if "wrong_share" in self.before:
            return float(self.before["wrong_share"])
        return None if self.mistakes is None else self.mistakes.share[0]

    @property
    def ends_in_linear(self) -> bool:
        """Whether the model has last-layer alignments, found by one pass in evaluation mode."""
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        inputs, labels = structure.to_device(self.source.take(torch.tensor([0])), device)
        example = Batch(torch.zeros(1, dtype=torch.int64, device=device), self.prepare(inputs), labels)
        with evaluation_mode(self.model):
            return no_last_layer(NoisyLosses(), self.model, example) is None


def with_probes(data: Data, options: Probes, labels: Labels | None, before: Mapping[str, Any], *, seed: int) -> Data:
    """The data with probes planted; ``labels``: of a classification; ``before``: as in ``Labels``."""
    if options.share == 0:
        return data
    planted = before.get("planted")
    if isinstance(planted, Mapping) and (again := probes.plant_again(data.source, data.target, planted)) is not None:
        return data.with_probes(again)
    labels_before = data.labels_before if options.labels_before is None else options.labels_before
    estimated = labels.mistakes if labels_before is None and labels is not None else None
    return data.with_probes(
        probes.plant(
            data.source,
            data.target,
            options.share,
            seed=seed,
            labels_before=labels_before,
            mistakes=estimated,
        )
    )


def estimate_mistakes(
    model: nn.Module, prepare: Prepare, source: ExampleSet, target: ExampleSet, classes: int, *, seed: int
) -> mistakes.Mistakes:
    """From some of the source: features are the inputs, and those of the network before training."""
    some = torch.randperm(len(source), generator=generator(seed, "probes/some"))[: mistakes.MOST_SOURCE]
    source = source.subset(some)
    trusted = torch.isin(source.labels.cpu(), target.labels.cpu())  # of another class nothing can be estimated
    if trusted.any() and not trusted.all():
        source = source.subset(trusted)
    return mistakes.estimate(
        _blocks(model, prepare, source, seed),
        source.labels.cpu().numpy(),
        _blocks(model, prepare, target, seed),
        target.labels.cpu().numpy(),
        classes,
        np.random.default_rng(seed_for(seed, "probes/estimate")),
    )


def _blocks(model: nn.Module, prepare: Prepare, examples: ExampleSet, seed: int) -> list[np.ndarray]:
    """Features of the examples: their inputs, where these are numbers, and those of the network before training."""
    inputs, features = [], []
    device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def outputs(prepared: structure.Inputs) -> Tensor:
        return structure.scores_of(structure.call(model, prepared))

    with seeded(seed, device), evaluation_mode(model), torch.no_grad(), last_inputs(model) as seen:
        for piece, _ in examples.read(in_pieces(len(examples), prepare.evaluation_batch)):
            prepared = prepare(structure.to_device(piece, device))
            if isinstance(prepared, Tensor) and prepared.is_floating_point():
                inputs.append(prepared)
            features.append(features_of(prepared, outputs, seen)[0])
    blocks = [torch.cat(features)]
    if inputs and len({piece.shape[1:] for piece in inputs}) == 1:
        blocks.append(torch.cat(inputs))
    return [_array(block) for block in blocks]


def _array(block: Tensor) -> np.ndarray:
    return block.flatten(1).double().nan_to_num(0.0, 0.0, 0.0).cpu().numpy()
