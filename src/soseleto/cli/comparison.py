"""SOSELETO against its rivals on the same data, all evaluated on the same held-out examples.

With a test set every method is evaluated on that. Without one the target is cut into folds, and each example is
evaluated by a model that was trained without it. Ordinary training does not use the target, so that one training serves
all folds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soseleto.data import Examples, generator

METHOD = "soseleto"
RIVALS = ("ordinary", "target_only")
RIVALS_IN_TRANSFER = ("target_only",)  # ordinary training has no head for the target's classes
TITLES = {METHOD: "SOSELETO", "ordinary": "ordinary training", "target_only": "target only"}


@dataclass(frozen=True)
class Part:
    """One training of a comparison: its target, and the examples it is evaluated on."""

    name: str  # its folder
    method: str
    target: Examples
    judged: Examples

    @property
    def title(self) -> str:
        """To print; empty for the main training."""
        if not self.name:
            return ""
        fold, _, _ = self.name.rpartition("/")
        return f"{TITLES[self.method]}{f', {fold}' if fold else ''}".replace("fold-", "fold ")


@dataclass(frozen=True)
class Judged:
    """The outputs of one part for the examples it is evaluated on, and their labels."""

    method: str
    outputs: Tensor  # (M, classes)
    labels: Tensor

    @property
    def right(self) -> int:
        return int((self.outputs.argmax(1) == self.labels).sum())


def plan(target: Examples, test: Examples | None, *, folds: int, rivals: Sequence[str], seed: int) -> list[Part]:
    """The trainings beside the main one. With a test set, folds serve the calibration only."""
    pieces = [] if folds == 0 else fold_places(target.labels.cpu(), folds, seed)
    parts = [Part(f"fold-{i}/{METHOD}", METHOD, *split(target, piece)) for i, piece in enumerate(pieces, start=1)]
    for rival in rivals:
        if test is not None:
            parts.append(Part(rival, rival, target, test))
        elif rival == "ordinary" and folds:
            parts.append(Part(rival, rival, target, target))
        else:
            parts += [Part(f"fold-{i}/{rival}", rival, *split(target, piece)) for i, piece in enumerate(pieces, 1)]
    return parts


def describe_plan(parts: Sequence[Part], test: Examples | None, folds: int) -> str:
    rivals = [TITLES[method] for method in dict.fromkeys(part.method for part in parts) if method != METHOD]
    judged = f"{folds} held-out folds of the target" if test is None else f"{len(test):,} test examples"
    beside = f" beside {' and '.join(rivals)}" if rivals else ""
    return (
        f"accuracy is measured on {judged}{beside}: {len(parts)} more trainings "
        "(--folds 0 and --no-baselines leave them out)"
    )


def fold_places(labels: Tensor, folds: int, seed: int) -> list[Tensor]:
    """The places of each fold: every class spread over the folds as evenly as possible, at random."""
    shuffled = torch.randperm(len(labels), generator=generator(seed, "folds"))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    return [by_class[fold::folds].sort().values for fold in range(folds)]


def split(target: Examples, piece: Tensor) -> tuple[Examples, Examples]:
    """The target without the piece, and the piece."""
    left = torch.ones(len(target), dtype=torch.bool)
    left[piece] = False
    return target.subset(left), target.subset(piece)


def pooled(judged: Sequence[Judged]) -> tuple[Tensor, Tensor]:
    """All outputs and all labels, concatenated."""
    return torch.cat([one.outputs for one in judged]), torch.cat([one.labels for one in judged])


def rows(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Accuracy in percent of every method with its 95 % interval, over all examples it was evaluated on."""
    found = []
    for method in dict.fromkeys(one.method for one in judged):
        mine = [one for one in judged if one.method == method]
        right, count = sum(one.right for one in mine), sum(len(one.labels) for one in mine)
        low, high = wilson(right, count)
        found.append(
            {"method": method, "accuracy": 100 * right / count, "low": 100 * low, "high": 100 * high, "examples": count}
        )
    return found


def wilson(right: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    >>> [round(end, 3) for end in wilson(90, 100)]
    [0.826, 0.945]
    """
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def describe(comparison: Mapping[str, Any]) -> list[str]:
    """The comparison as lines to print."""
    found = comparison.get("rows") or []
    if not found:
        return []
    on_test = comparison["judged_on"] == "test"
    where = (
        "test examples"
        if on_test
        else f"target examples, each held out of its own training ({comparison['folds']} folds)"
    )
    lines = [f"accuracy on {found[0]['examples']:,} {where}, with its 95 % interval:"]
    width = max(len(TITLES[row["method"]]) for row in found)
    lines += [
        f"  {TITLES[row['method']]:<{width}}  {row['accuracy']:5.1f} %  ({row['low']:.1f} to {row['high']:.1f})"
        for row in found
    ]
    return lines
