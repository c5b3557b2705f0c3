"""Which trainings a comparison has beside the main one, what each is trained on, and what it is judged on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.comparison.accuracy import SOSELETO, TITLES
from soseleto.comparison.scan import too_many_classes
from soseleto.data import Examples, Pair, seed_for
from soseleto.data.lazy import ExampleSet
from soseleto.defaults import is_pretrained
from soseleto.errors import UsageError
from soseleto.models.trunk_and_heads import last_linear
from soseleto.suspects.cross_fit import fold_of
from soseleto.suspects.probes import AUTO_SHARE, FEWEST, Share
from soseleto.training.data import enough_trusted
from soseleto.training.options import Compute

BASELINES = ("ordinary", "mixed", "target_only")
BASELINES_IN_TRANSFER = ("target_only",)  # ordinary training has no head for the target's classes
FOLDS = 3
MOST_NUMBERS = 30_000_000  # in the inputs of a first answer without a network; more would take minutes
Features = Literal["columns", "pixels", "network"]


@dataclass(frozen=True)
class Part:
    """One training of a comparison: its target, and the examples that it is evaluated on."""

    name: str  # its folder; empty for the main training
    method: str
    source: Examples
    target: Examples
    judged: Examples
    places: Tensor  # of the judged examples in the target, or in the test set

    @property
    def title(self) -> str:
        fold = self.name.rpartition("/")[0].replace("fold-", ", fold ")
        return f"{TITLES[self.method]}{fold}" if self.name else ""


def whole(method: str, pair: Pair, judged: Examples) -> Part:
    return Part(method, method, pair.source, pair.target, judged, torch.arange(len(judged)))


def plan(pair: Pair, mode: str, *, folds: int, baselines: bool, seed: int) -> list[Part]:
    """The trainings beside the main one; with a test set, on which nothing is chosen, a whole one of each baseline."""
    names = () if not baselines else BASELINES if mode == "noisy" else BASELINES_IN_TRANSFER
    places = [] if folds == 0 else fold_places(pair.target, folds, seed)
    shared = folds > 0 and not bool(apart_from(pair.source, pair.target).all())
    parts = _in_folds(SOSELETO, pair, places)
    for name in names:
        if name == "ordinary" and folds and not shared:
            parts.append(whole(name, pair, pair.target))
        else:
            parts += _in_folds(name, pair, places)
        if pair.test is not None:
            parts.append(whole(name, pair, pair.test))
    return parts


def _in_folds(method: str, pair: Pair, places: Sequence[Tensor]) -> list[Part]:
    parts, target = [], pair.target
    for number, held_out in enumerate(places, start=1):
        left = torch.ones(len(target), dtype=torch.bool)
        left[held_out] = False
        judged = target.subset(held_out)
        kept = apart_from(pair.source, judged)
        source = pair.source if bool(kept.all()) else pair.source.subset(kept)
        parts.append(Part(f"fold-{number}/{method}", method, source, target.subset(left), judged, held_out))
    return parts


def apart_from(source: ExampleSet, held_out: Examples) -> Tensor:
    """(N,) the source examples that are in no group of the held-out ones."""
    if not isinstance(source, Examples) or source.groups is None or held_out.groups is None:
        return torch.ones(len(source), dtype=torch.bool)
    return ~torch.isin(source.groups, held_out.groups)


def fold_places(target: Examples, folds: int, seed: int) -> list[Tensor]:
    """The places of each fold."""
    groups = None if target.groups is None else target.groups.numpy()
    fold = fold_of(target.labels.cpu().numpy(), np.random.default_rng(seed_for(seed, "folds")), groups, folds)
    return [torch.from_numpy(np.flatnonzero(fold == number)) for number in range(folds)]


# What is done where nothing is said


def folds_of(folds: int | None, pair: Pair, *, needed: bool) -> int:
    """As given, checked; by default three, fewer for a tiny target, and none where they are not needed."""
    n, groups = len(pair.target), pair.target.groups
    most = min(n // 2, n if groups is None else len(groups.unique()))
    if folds is None:
        return min(FOLDS, most) if needed and most >= 2 else 0
    if folds == 1 or not 0 <= folds <= most:
        raise UsageError(f"folds must be 0, or from 2 to {most} with this target, got {folds}.")
    return folds


def features_by(make: Callable[[], nn.Module], pair: Pair, mode: str, compute: Compute) -> Features | None:
    """What makes the features of a first answer; None where there is none."""
    labels = pair.target.labels
    if mode != "noisy" or not compute.in_one_process or labels.ndim != 1:
        return None
    if not isinstance(pair.source, Examples) or not enough_trusted(pair.target):
        return None
    if too_many_classes(pair.source, pair.target):
        return None
    if is_pretrained(model := make()):
        return "network" if last_linear(model) is not None else None
    inputs = pair.source.inputs
    if not isinstance(inputs, Tensor) or inputs.numel() > MOST_NUMBERS or inputs.ndim not in (2, 4):
        return None
    return "columns" if inputs.ndim == 2 else "pixels"


def share_of_probes(mode: str, compute: Compute, pair: Pair, features: Features | None) -> Share | None:
    """Probes need one process, whole batches and enough examples of both sides.

    None where a first answer judges the labels; pixels judge worse than a network that is trained on them.
    """
    if mode != "noisy" or features in ("columns", "network") or pair.target.labels.is_floating_point():
        return None
    possible = compute.in_one_process and compute.micro_batch_size is None
    enough = len(pair.source) >= 5 * FEWEST and len(pair.target) * AUTO_SHARE >= FEWEST
    return "auto" if possible and enough else None
