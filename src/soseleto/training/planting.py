"""Plants probes in the data of a training, with mistakes estimated from the data where earlier labels are not known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data import ExampleSet, generator, seed_for, structure
from soseleto.data.example_set import in_pieces
from soseleto.models.evaluation import evaluation_mode
from soseleto.run_folder.folder import RunFolder
from soseleto.suspects import mistakes, probes
from soseleto.suspects.signals import features_of, last_inputs
from soseleto.training.data import Data
from soseleto.training.setup import Setup, seeded

PLANTED = "planted"  # entry of config.json


def planted_before(out: str | Path | None, *, resume: bool) -> Mapping[str, Any] | None:
    """The probes of an unfinished run in the folder ``out`` whose labels were drawn from estimated mistakes."""
    if out is None or not resume:
        return None
    folder = RunFolder(out)
    found = folder.config().get(PLANTED) if folder.is_run() and not folder.has_ended() else None
    return found if isinstance(found, Mapping) else None


def planted(setup: Setup, before: Mapping[str, Any] | None = None) -> Data:
    """The data of ``setup`` with probes; ``before``: as they were planted in a run that is resumed."""
    data, wanted, seed = setup.data, setup.settings.probes, setup.settings.seed
    if wanted.share == 0:
        return data
    if before is not None and (again := probes.plant_again(data.source, data.target, before)) is not None:
        return data.with_probes(again)
    classes = probes.class_count_of_both(data.source, data.target)
    found = None
    labels = data.labels_before if wanted.labels_before is None else wanted.labels_before
    if labels is None and setup.kind == "classification" and mistakes.can_estimate(len(data.target), classes):
        found = _estimate(setup, classes)
    return data.with_probes(
        probes.plant(
            data.source,
            data.target,
            wanted.share,
            seed=seed,
            labels_before=labels,
            mistakes=found,
        )
    )


def _estimate(setup: Setup, classes: int) -> mistakes.Mistakes:
    source, target, seed = setup.data.source, setup.data.target, setup.settings.seed
    some = torch.randperm(len(source), generator=generator(seed, "probes/some"))[: mistakes.MOST_SOURCE]
    source = source.subset(some)
    return mistakes.estimate(
        _blocks(setup, source),
        source.labels.cpu().numpy(),
        _blocks(setup, target),
        target.labels.cpu().numpy(),
        classes,
        np.random.default_rng(seed_for(seed, "probes/estimate")),
    )


def _blocks(setup: Setup, examples: ExampleSet) -> list[np.ndarray]:
    """Features of the examples: their inputs, where these are numbers, and those of the network before training."""
    inputs, features = [], []
    device, model = setup.device, setup.model

    def outputs(prepared: structure.Inputs) -> Tensor:
        return structure.scores_of(structure.call(model, prepared))

    with seeded(setup.settings.seed, device), evaluation_mode(model), torch.no_grad(), last_inputs(model) as seen:
        for piece, _ in examples.read(in_pieces(len(examples), setup.prepare.evaluation_batch)):
            prepared = setup.prepare(structure.to_device(piece, device))
            if isinstance(prepared, Tensor) and prepared.is_floating_point():
                inputs.append(prepared)
            features.append(features_of(prepared, outputs, seen)[0])
    blocks = [torch.cat(features)]
    if inputs and len({piece.shape[1:] for piece in inputs}) == 1:
        blocks.append(torch.cat(inputs))
    return [_array(block) for block in blocks]


def _array(block: Tensor) -> np.ndarray:
    return block.flatten(1).double().nan_to_num(0.0, 0.0, 0.0).cpu().numpy()
