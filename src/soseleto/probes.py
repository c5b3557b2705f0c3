"""Probes: target examples planted among the source, half with their right label and half with a wrong one.

Nobody knows which source labels are wrong, but of the probes everybody knows; what tells wrong probes from right ones
while the model trains on both is then known to tell wrong source labels from right ones, and how well.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from soseleto.data import Examples, generator
from soseleto.errors import UsageError

Share = float | Literal["auto"]
FEWEST = 10
# "auto": this share of the target, but no more than so many probes, nor than a fifth of the source
AUTO_SHARE, AUTO_MOST = 0.3, 1000


@dataclass(frozen=True)
class Probes:
    """m probes, which stand behind the n source examples: their labels as planted, and their right ones."""

    n_source: int
    labels: Tensor
    truth: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def wrong(self) -> Tensor:
        return self.labels != self.truth

    def without(self, planted: Examples) -> Examples:
        """The source alone, of a source with these probes behind it; inputs and labels share its memory."""
        n = self.n_source
        return replace(
            planted,
            inputs=planted.inputs[:n],
            labels=planted.labels[:n],
            ids=None if planted.ids is None else planted.ids[:n],
            truth=None if planted.truth is None else planted.truth[:n],
            paths=None if planted.paths is None else planted.paths[:n],
        )


@dataclass(frozen=True)
class Planted:
    """The two sides after planting: the source with the probes behind it, the target without them."""

    source: Examples
    target: Examples
    probes: Probes


def plant(source: Examples, target: Examples, share: Share, *, seed: int) -> Planted:
    """Take ``share`` of the target, as many of each class as of any other, and put it behind the source.

    Every second probe gets a wrong label, each of the other classes equally likely.
    """
    classes = _classes(source, target)
    m = _number(share, len(source), len(target))
    chosen = _balanced(target.labels.cpu(), m, classes, seed)
    left = torch.ones(len(target), dtype=torch.bool)
    left[chosen] = False
    taken = target.subset(chosen)
    truth = taken.labels.cpu()
    shift = torch.randint(1, classes, (m,), generator=generator(seed, "probes/labels"))
    wrong = torch.arange(m) % 2 == 1
    labels = torch.where(wrong, (truth + shift) % classes, truth)
    probes = Probes(len(source), labels, truth)
    return Planted(_behind(source, taken, probes), target.subset(left), probes)


def _number(share: Share, n_source: int, n_target: int) -> int:
    """How many probes."""
    if share == "auto":
        m = min(round(AUTO_SHARE * n_target), AUTO_MOST, n_source // 5)
        needed = math.ceil(FEWEST / AUTO_SHARE)
        if m < FEWEST:
            raise UsageError(
                f"probes='auto' has {n_target} target and {n_source} source examples to work with, which is too few: "
                f"give at least {needed} and {5 * FEWEST}, or say probes=0."
            )
        return m
    if not isinstance(share, float) or not 0.0 < share < 1.0:
        raise UsageError(f"probes must be a share of the target between 0 and 1, or 'auto', got {share!r}.")
    m = round(share * n_target)
    if not FEWEST <= m <= n_target - 1:
        raise UsageError(
            f"probes={share} of {n_target} target examples are {m} probes: at least {FEWEST} are needed, and some "
            "target examples must stay; say probes='auto', or probes=0 for none."
        )
    return m


def _classes(source: Examples, target: Examples) -> int:
    """How many classes the two sides have in common."""
    for side in (source, target):
        if side.labels.is_floating_point() or side.labels.ndim != 1:
            raise UsageError("probes need class labels, one index an example: say probes=0.")
    classes = max(len(side.classes or ()) or int(side.labels.max()) + 1 for side in (source, target))
    if classes < 2:
        raise UsageError("probes need two classes or more, since half of them get a wrong label: say probes=0.")
    return classes


def _balanced(labels: Tensor, m: int, classes: int, seed: int) -> Tensor:
    """m places, the classes in turn, so that each has as many as there are or one more than another."""
    order = torch.randperm(len(labels), generator=generator(seed, "probes/draw"))
    shuffled = labels[order]
    turn = torch.zeros(len(labels), dtype=torch.int64)  # the how-manieth of its class each example is
    for c in range(classes):
        members = shuffled == c
        turn[members] = torch.arange(int(members.sum()))
    return order[torch.argsort(turn, stable=True)[:m]]


def _behind(source: Examples, taken: Examples, probes: Probes) -> Examples:
    """One data set of source examples and, after them, the probes."""
    device = source.device
    ids = None
    if source.ids is not None:
        ids = (*source.ids, *(f"probe {name}" for name in taken.ids or ()))
    paths = None if source.paths is None else (*source.paths, *(taken.paths or [""] * len(taken)))
    truth = None if source.truth is None else torch.cat([source.truth, probes.truth.to(source.truth.device)])
    return replace(
        source,
        inputs=torch.cat([source.inputs, taken.inputs.to(device)]),
        labels=torch.cat([source.labels, probes.labels.to(device)]),
        ids=ids,
        paths=paths,
        truth=truth,
    )
