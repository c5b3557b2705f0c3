"""Target examples without labels: ``fit_unlabelled``.

    round r:  classify the unlabelled examples with the classifier learned so far
              keep, of every class, the share of its examples that the classifier is surest of
              treat them as a noisy source and the labelled target as target: SOSELETO in noisy mode, one shared head

The share grows from round to round and is 1 in the last, so that in the end every example has a label and a weight.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Examples, generator, seed_for
from soseleto.errors import UsageError
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.pieces import target_share
from soseleto.task.optimizers import sgd
from soseleto.task.task import Method
from soseleto.training.fit import fit
from soseleto.training.options import Inputs
from soseleto.training.result import Result

_PIECE = 4096  # examples that are augmented at a time


@dataclass(frozen=True, kw_only=True)
class Unlabelled:
    """Unlabelled target examples and how they are used.

    inputs: like those of the target
    rounds, first_share: how often they are classified, and the share of them that the first round learns from
    epochs, batch_size: of every round; lr: of its SGD, if ``fit_unlabelled`` was given no optimizer
    views: number of augmented views whose mean probability decides an example's class; 1 uses the input itself
    restart: every round starts from the model that the source training left, not from the previous round's
    method: how a round is trained, in noisy mode
    """

    inputs: Tensor
    rounds: int = 4
    first_share: float = 0.5
    epochs: int = 2
    batch_size: int = 256
    lr: float = 0.01
    views: int = 1
    restart: bool = False
    method: Method = field(default_factory=lambda: Soseleto(gradients=target_share(0.2)))

    def __post_init__(self) -> None:
        for name in ("rounds", "epochs", "batch_size", "views"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} of Unlabelled must be at least 1, got {getattr(self, name)}.")
        if not 0.0 < self.first_share <= 1.0:
            raise UsageError(f"first_share of Unlabelled must lie in (0, 1], got {self.first_share}.")

    def share(self, number: int) -> float:
        """The share of the examples that round ``number`` (from 1) learns from."""
        progress = (number - 1) / (self.rounds - 1) if self.rounds > 1 else 1.0
        return self.first_share + (1.0 - self.first_share) * progress


@dataclass(frozen=True)
class Guesses:
    """The class that each unlabelled example was given, and the weights and scores learned for them in the end."""

    labels: Tensor
    weights: Tensor
    scores: Tensor


def fit_unlabelled(
    model: nn.Module, source: Examples, target: Examples, unlabelled: Unlabelled, mode: str = "noisy", **arguments: Any
) -> tuple[Result, Guesses]:
    """``fit`` with these arguments, and then rounds in which the classifier labels the unlabelled examples."""
    first = fit(model, source, target, mode, **arguments)  # type: ignore[arg-type]
    classifier = _classifier(first.model)
    after_source = copy.deepcopy(classifier.state_dict())
    history, seed = list(first.history), arguments.get("seed", 0)
    augment = _of_target(arguments.get("inputs", Inputs()).augment)
    for number in range(1, unlabelled.rounds + 1):
        sure, labels = class_probabilities(
            first, unlabelled.inputs, augment, unlabelled.views, seed=seed, number=number
        ).max(1)
        kept = surest(labels, sure, unlabelled.share(number))
        guessed = Examples(unlabelled.inputs, labels, classes=target.classes).subset(kept)
        if unlabelled.restart:
            classifier.load_state_dict(after_source)
        same = {name: arguments[name] for name in ("target_batch_size", "compute", "device") if name in arguments}
        result = fit(
            classifier,
            guessed,
            target,
            epochs=unlabelled.epochs,
            batch_size=min(unlabelled.batch_size, len(guessed)),
            optimizer=arguments.get("optimizer") or partial(sgd, lr=unlabelled.lr),
            loss=first.loss,
            method=unlabelled.method,
            inputs=Inputs(augment=augment, standardize=first.prepare.standardize or False),  # type: ignore[attr-defined]
            seed=seed_for(seed, "unlabelled/round", number),
            **same,
        )
        history += [{**record, "round": number} for record in result.history]
    return replace(first, history=history), Guesses(labels, result.weights, result.scores)


def _of_target(augment: Any) -> Augment | None:
    """The target's augmentation, since the unlabelled examples are like the target."""
    of_target: Augment | None = augment[1] if isinstance(augment, tuple | list) else augment
    return of_target


def class_probabilities(
    result: Result, inputs: Tensor, augment: Augment | None, views: int, *, seed: int, number: int
) -> Tensor:
    """(N, classes): the classifier's mean over ``views`` augmented views, or for the inputs themselves."""
    if views == 1 or augment is None or augment.nothing:
        return result.outputs(inputs).softmax(1)
    total = torch.zeros(())
    for view in range(views):
        random = generator(seed, f"unlabelled/views/{number}", view, result.device)
        pieces = [result.outputs(augment(piece.to(result.device), random)) for piece in inputs.split(_PIECE)]
        total = total + torch.cat(pieces).softmax(1) / views
    return total


def surest(labels: Tensor, sure: Tensor, share: float) -> Tensor:
    """The places of the surest ``share`` of every class, in the data's order."""
    order = torch.argsort(sure, descending=True, stable=True)
    by_class = [order[labels[order] == c] for c in labels.unique()]
    kept = [places[: math.ceil(share * len(places))] for places in by_class]
    return torch.cat(kept).sort().values


def _classifier(model: nn.Module) -> nn.Module:
    """The target's classifier: the trunk with the target head, or the whole model in noisy mode."""
    return nn.Sequential(model.trunk, model.target_head) if isinstance(model, TrunkAndHeads) else model
