"""SOSELETO against its rivals on the same data, all evaluated on the same held-out examples.

With a test set every method is evaluated on that. Without one the target is cut into folds, and each example is
evaluated by a model that was trained without it. Ordinary training does not use the target, so that one training serves
all folds. The model that is kept is SOSELETO's, unless a rival is better by more than one standard error of the paired
difference. The target alone need only be better where the source does harm: where it beats mixed training too, beyond
the 95 % interval of their difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soseleto.data import Examples, generator
from soseleto.errors import counted

METHOD = "soseleto"
RIVALS = ("ordinary", "mixed", "target_only")
RIVALS_IN_TRANSFER = ("target_only",)  # ordinary training has no head for the target's classes
BOOSTING, FINAL = "gradient_boosting", "final"  # of tables
TITLES = {
    METHOD: "SOSELETO",
    FINAL: "SOSELETO, then boosting",
    BOOSTING: "gradient boosting",
    "ordinary": "ordinary training",
    "mixed": "mixed training",
    "target_only": "target only",
}
KEEP = ("best", METHOD)
EVIDENCE = 1.0  # standard errors by which a rival must be better to be kept


@dataclass(frozen=True)
class Part:
    """One training of a comparison: its target, and the examples it is evaluated on."""

    name: str  # its folder
    method: str
    target: Examples
    judged: Examples
    places: Tensor  # of the judged examples in the target, or in the test set

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
    places: Tensor  # (M,) of the examples in the set

    @property
    def right(self) -> Tensor:
        """(M,) bool."""
        return self.outputs.argmax(1) == self.labels


@dataclass(frozen=True)
class Difference:
    """Accuracy of one method minus that of another on the same examples, in points, with its 95 % interval."""

    value: float
    low: float
    high: float
    error: float  # one standard error

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor) -> Difference:
        """The interval of Bonett and Price (2012), for n pairs of which n₁ and n₂ are right in one method only:

            p = (n₁ + 1)/(n + 2),  r = (n₂ + 1)/(n + 2),  p − r ± 1.96·√((p + r − (p − r)²)/(n + 2))

        >>> Difference.of(torch.tensor([True] * 8), torch.tensor([True] * 7 + [False])).value
        12.5
        """
        n, first, second = len(ours), int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
        p, r = (first + 1) / (n + 2), (second + 1) / (n + 2)
        error = math.sqrt((p + r - (p - r) ** 2) / (n + 2))
        value, half = (first - second) / n, 1.96 * error
        low, high = min(value, p - r - half), max(value, p - r + half)
        return cls(100 * value, 100 * max(-1.0, low), 100 * min(1.0, high), 100 * error)


def plan(target: Examples, test: Examples | None, *, folds: int, rivals: Sequence[str], seed: int) -> list[Part]:
    """The trainings beside the main one. With a test set, folds serve the calibration only."""
    pieces = [] if folds == 0 else fold_places(target.labels.cpu(), folds, seed)
    parts = _in_folds(METHOD, target, pieces)
    for rival in rivals:
        if test is not None or (rival == "ordinary" and folds):
            parts.append(whole(rival, target, target if test is None else test))
        else:
            parts += _in_folds(rival, target, pieces)
    return parts


def whole(method: str, target: Examples, judged: Examples) -> Part:
    """The training of a rival on the whole target."""
    return Part(method, method, target, judged, torch.arange(len(judged)))


def _in_folds(method: str, target: Examples, pieces: Sequence[Tensor]) -> list[Part]:
    return [Part(f"fold-{i}/{method}", method, *split(target, piece), piece) for i, piece in enumerate(pieces, start=1)]


def describe_plan(
    parts: Sequence[Part], test: Examples | None, folds: int, *, epochs_of_others: int | None = None
) -> str:
    rivals = [TITLES[method] for method in dict.fromkeys(part.method for part in parts) if method != METHOD]
    judged = f"{folds} held-out folds of the target" if test is None else counted(len(test), "test example")
    beside = f" beside {', '.join(rivals[:-1])}{' and ' * (len(rivals) > 1)}{rivals[-1]}" if rivals else ""
    if beside and epochs_of_others is not None:
        beside += f", {'each ' if len(rivals) > 1 else ''}for {counted(epochs_of_others, 'epoch')}"
    folded = any(part.name.startswith("fold-") for part in parts)
    options = [*(["--folds 0"] if folded else []), *(["--no-baselines"] if rivals else [])]
    leave = f"{' and '.join(options)} {'leave' if len(options) > 1 else 'leaves'}"
    them = "it" if len(parts) == 1 else "them"
    return f"accuracy is measured on {judged}{beside}: {counted(len(parts), 'more training')} ({leave} {them} out)"


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
        right, count = sum(int(one.right.sum()) for one in mine), sum(len(one.labels) for one in mine)
        low, high = wilson(right, count)
        found.append(
            {"method": method, "accuracy": 100 * right / count, "low": 100 * low, "high": 100 * high, "examples": count}
        )
    return found


def differences(judged: Sequence[Judged]) -> dict[str, Difference]:
    """Every rival's accuracy minus SOSELETO's, by its name; empty without SOSELETO."""
    right = {method: _by_place(judged, method) for method in dict.fromkeys(one.method for one in judged)}
    ours = right.pop(METHOD, None)
    return {} if ours is None else {rival: Difference.of(theirs, ours) for rival, theirs in right.items()}


def _by_place(judged: Sequence[Judged], method: str) -> Tensor:
    """Whether the method is right about each example, in the set's order."""
    mine = [one for one in judged if one.method == method]
    return torch.cat([one.right for one in mine])[torch.cat([one.places for one in mine]).argsort()]


def source_harms(judged: Sequence[Judged]) -> bool:
    """Whether the target alone is better than with the source mixed in, beyond the 95 % interval."""
    if not {"mixed", "target_only"} <= {one.method for one in judged}:
        return False
    return Difference.of(_by_place(judged, "target_only"), _by_place(judged, "mixed")).low > 0.0


def winner(found: Mapping[str, Difference], *, source_harms: bool = False) -> str:
    """The rival with the largest difference, if that exceeds EVIDENCE standard errors; else SOSELETO.

    Where the source does harm, little speaks for SOSELETO beforehand, and the target alone needs no standard error.
    Gradient boosting is shown beside the networks and is not kept: ``--final boosting`` keeps a boosted model.
    """
    networks = {rival: one for rival, one in found.items() if rival not in (BOOSTING, FINAL)}
    needed = {rival: EVIDENCE * one.error for rival, one in networks.items()}
    if source_harms:
        needed["target_only"] = 0.0
    better = {rival: one.value for rival, one in networks.items() if one.value > needed[rival]}
    return max(better, key=lambda rival: better[rival]) if better else METHOD


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
