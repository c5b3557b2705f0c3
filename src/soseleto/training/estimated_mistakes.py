"""The mistakes of a source, estimated before the training from its labels and the trusted ones."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.data import ExampleSet, generator, seed_for, structure
from soseleto.data.examples import in_pieces
from soseleto.data.feeding import Prepare
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.suspects import mistakes
from soseleto.suspects.signals import features_of, last_inputs
from soseleto.training.setup import seeded


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
