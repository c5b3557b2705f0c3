"""Rounds on unlabelled target examples: the classifier labels them, and is trained on its surest guesses.

A round labels all examples, keeps the surest share of every class, and trains by the method with them as the source
and the labelled target as the target, so that a wrong guess loses its weight. The share grows to the whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Examples, seed_for
from soseleto.data.batches import ExampleRandom
from soseleto.pieces import target_share
from soseleto.task.task import Method
from soseleto.training.fit import fit
from soseleto.training.options import Inputs
from soseleto.training.result import Result

_TOGETHER = 4096  # examples that are augmented at a time


class Guesses(NamedTuple):
    """Labels of the unlabelled examples, with the weights and scores of those that the last round learned from."""

    labels: Tensor
    weights: Tensor
    scores: Tensor


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """rounds: how often the examples are labelled; first_share: of them, that the first round learns from
    epochs, batch_size: of every round
    views: number of augmented views whose mean probability decides an example's class; 1 uses the input itself
    method: how a round is trained
    """

    rounds: int = 4
    first_share: float = 0.5
    epochs: int = 2
    batch_size: int = 256
    views: int = 1
    method: Method = field(default_factory=lambda: Soseleto(gradients=target_share(0.2)))

    def share(self, number: int) -> float:
        """The share of the examples that round ``number`` (from 1) learns from."""
        progress = (number - 1) / (self.rounds - 1) if self.rounds > 1 else 1.0
        return self.first_share + (1.0 - self.first_share) * progress


def fit_unlabelled(
    result: Result, target: Examples, inputs: Tensor, rounds: Rounds, arguments: Mapping[str, Any]
) -> Guesses:
    """Train the classifier of a transfer result further, in place.

    arguments: those that the result's ``fit`` had; augmentation, optimizer and schedule of the rounds are the same
    """
    classifier = nn.Sequential(result.model.trunk, result.model.target_head)
    _, augment = arguments["inputs"].augment  # the target's, since the unlabelled examples are like the target
    kept = ("target_batch_size", "optimizer", "device")
    common = {name: arguments[name] for name in kept} | {
        "epochs": rounds.epochs,
        "method": rounds.method,
        "inputs": Inputs(augment=augment, standardize=result.prepare.standardize or False),
    }
    for number in range(1, rounds.rounds + 1):
        p = class_probabilities(result, inputs, augment, rounds.views, seed=arguments["seed"], number=number)
        sure, labels = p.max(1)
        source = Examples(inputs, labels, classes=target.classes).subset(surest(labels, sure, rounds.share(number)))
        seed = seed_for(arguments["seed"], "unlabelled/round", number)
        batch_size = min(rounds.batch_size, len(source))
        of_round = fit(classifier, source, target, mode="noisy", batch_size=batch_size, seed=seed, **common)
    return Guesses(labels, of_round.weights, of_round.scores)


def class_probabilities(
    result: Result, inputs: Tensor, augment: Augment, views: int, *, seed: int, number: int
) -> Tensor:
    """(N, classes): the classifier's mean over ``views`` augmented views, or for the inputs themselves."""
    if views == 1 or augment == Augment():
        return result.outputs(inputs).softmax(1)
    total = torch.zeros(())
    for view in range(views):
        key, places = seed_for(seed, f"unlabelled/views/{number}", view), torch.arange(len(inputs))
        pieces = [
            result.outputs(augment(inputs[at].to(result.device), ExampleRandom.of(key, at.to(result.device))))
            for at in places.split(_TOGETHER)
        ]
        total = total + torch.cat(pieces).softmax(1) / views
    return total


def surest(labels: Tensor, sure: Tensor, share: float) -> Tensor:
    """The places of the surest ``share`` of every class, in the data's order."""
    order = torch.argsort(sure, descending=True, stable=True)
    by_class = [order[labels[order] == c] for c in labels.unique()]
    kept = [places[: math.ceil(share * len(places))] for places in by_class]
    return torch.cat(kept).sort().values
