"""Accuracies on held-out examples, of labels that are numbers explained variances; differences; which model is kept."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soseleto.run_folder.folder import ACCURACY, EXPLAINED, measure_of
from soseleto.suspects.cross_fit import design_effect

SOSELETO, SCAN = "soseleto", "scan"
ON_FEATURES = "scan_"  # what the rivals of a first answer begin with: they are shown and not kept
TITLES = {
    SOSELETO: "SOSELETO",
    "ordinary": "ordinary training",
    "mixed": "mixed training",
    "target_only": "target only",
    SCAN: "the first answer",
    f"{ON_FEATURES}mixed": "all labels, same features",
    f"{ON_FEATURES}target_only": "target only, same features",
}
TINY = 1e-12
EVIDENCE = 1.0  # standard errors by which a baseline must be better to be kept


@dataclass(frozen=True)
class Judged:
    """What a model trained by ``method`` says about examples that it was not trained on, and their labels."""

    method: str
    outputs: Tensor  # (M, classes), or of numbers (M,) or (M, 1)
    labels: Tensor
    places: Tensor  # (M,) of the examples in their set
    groups: Tensor | None = None  # (M,) as of Examples: those of one group are not independent

    @property
    def measure(self) -> str:
        return EXPLAINED if self.labels.is_floating_point() else ACCURACY

    @property
    def right(self) -> Tensor:
        """(M,) bool; of numbers 1 − (error/standard deviation of the labels)², whose mean is the explained variance."""
        if not self.labels.is_floating_point():
            return self.outputs.argmax(1) == self.labels
        errors = (self.outputs.reshape(self.labels.shape) - self.labels).double().square()
        return 1.0 - errors / self.labels.double().var(correction=0).clamp_min(TINY)


@dataclass(frozen=True)
class Difference:
    """Accuracy of one method minus that of another on the same examples, in points, with its 95 % interval."""

    value: float
    low: float
    high: float
    error: float  # one standard error

    @classmethod
    def of(cls, first: Tensor, second: Tensor, groups: Tensor | None = None) -> Difference:
        """The interval of Bonett and Price (2012), for n pairs of which n₁ and n₂ are right in one method only:

            p = (n₁ + 1)/(n + 2),  r = (n₂ + 1)/(n + 2),  p − r ± 1.96·√((p + r − (p − r)²)/(n + 2))

        with all counts divided by the design effect of groups. Of numbers that of the mean of all differences.

        >>> Difference.of(torch.tensor([True] * 8), torch.tensor([True] * 7 + [False])).value
        12.5
        """
        apart = first.double() - second.double()
        effect = _effect(apart, groups)
        if first.dtype != torch.bool:
            value, error = 100 * float(apart.mean()), 100 * _error(apart, effect)
            return cls(value, value - 1.96 * error, value + 1.96 * error, error)
        n, only_first, only_second = (
            count / effect for count in (len(first), int((apart > 0).sum()), int((apart < 0).sum()))
        )
        p, r = (only_first + 1) / (n + 2), (only_second + 1) / (n + 2)
        error = math.sqrt((p + r - (p - r) ** 2) / (n + 2))
        value, half = (only_first - only_second) / n, 1.96 * error
        low, high = min(value, p - r - half), max(value, p - r + half)
        return cls(100 * value, 100 * max(-1.0, low), 100 * min(1.0, high), 100 * error)


def rows(judged: Sequence[Judged]) -> list[dict[str, Any]]:
    """Of every method its measure in percent with its 95 % interval, of a baseline also its lead over SOSELETO."""
    minus_soseleto = differences(judged)
    table = []
    for method, whole in _by_method(judged).items():
        values = whole.right.double()
        effect, mean = _effect(values, whole.groups), float(values.mean())
        if whole.measure == ACCURACY:
            low, high = wilson(int(values.sum()) / effect, len(values) / effect)
        else:
            low, high = (mean + side * 1.96 * _error(values, effect) for side in (-1, 1))
        row = {"method": method, "title": TITLES[method], "examples": len(values)}
        row |= {whole.measure: 100 * mean, "low": 100 * low, "high": 100 * high}
        if difference := minus_soseleto.get(method):
            row["minus_soseleto"] = {"value": difference.value, "low": difference.low, "high": difference.high}
        table.append(row)
    return table


def differences(judged: Sequence[Judged]) -> dict[str, Difference]:
    """Every baseline's accuracy minus SOSELETO's, by its name; empty without SOSELETO."""
    of = _by_method(judged)
    ours = of.pop(SOSELETO, None)
    if ours is None:
        return {}
    return {method: Difference.of(theirs.right, ours.right, ours.groups) for method, theirs in of.items()}


def _by_method(judged: Sequence[Judged]) -> dict[str, Judged]:
    """All examples that a method was judged on, in the set's order."""
    wholes = {}
    for method in dict.fromkeys(part.method for part in judged):
        parts = [part for part in judged if part.method == method]
        order = torch.cat([part.places for part in parts]).argsort()
        columns = zip(*((part.outputs, part.labels, part.places) for part in parts), strict=True)
        outputs, labels, places = (torch.cat(column)[order] for column in columns)
        groups = [part.groups for part in parts if part.groups is not None]
        whole = torch.cat(groups)[order] if len(groups) == len(parts) else None
        wholes[method] = Judged(method, outputs, labels, places, whole)
    return wholes


def _error(values: Tensor, effect: float) -> float:
    """The standard error of a mean."""
    return float(values.std(correction=0)) * math.sqrt(effect / len(values))


def _effect(values: Tensor, groups: Tensor | None) -> float:
    return design_effect(values.numpy(), None if groups is None else groups.numpy())


def winner(judged: Sequence[Judged]) -> str:
    """The baseline with the largest difference, if that exceeds EVIDENCE standard errors; else SOSELETO.

    The first answer is kept unless SOSELETO exceeds it by so much: a fine-tuning can lose what the features had.
    Where the source does harm, little speaks for SOSELETO beforehand, and the target alone needs no standard error.
    Other training on the features of a first answer is shown and not kept.
    """
    leads = {name: lead for name, lead in differences(judged).items() if not name.startswith(ON_FEATURES)}
    needed = {method: EVIDENCE * lead.error for method, lead in leads.items()}
    if SCAN in needed:
        needed[SCAN] *= -1
    of = _by_method(judged)
    if {"mixed", "target_only"} <= of.keys():
        harm = Difference.of(of["target_only"].right, of["mixed"].right, of["mixed"].groups)
        if harm.low > 0.0:  # the target alone is better than with the source mixed in, beyond the 95 % interval
            needed["target_only"] = 0.0
    better = {method: lead.value for method, lead in leads.items() if lead.value > needed[method]}
    return max(better, key=lambda method: better[method]) if better else SOSELETO


def wilson(right: float, count: float, z: float = 1.96) -> tuple[float, float]:
    """Wilson's 95 % interval of a share.

    >>> [round(end, 3) for end in wilson(90, 100)]
    [0.826, 0.945]
    """
    share, spread = right / count, z * z / count
    middle = (share + spread / 2) / (1 + spread)
    half = z / (1 + spread) * math.sqrt(share * (1 - share) / count + spread / (4 * count))
    return max(0.0, middle - half), min(1.0, middle + half)


def table(comparison: Mapping[str, Any]) -> list[str]:
    shown = comparison.get("rows") or []
    if not shown:
        return []
    where = f"target examples, each held out of its own training ({comparison['folds']} folds)"
    if comparison["judged_on"] == "test":
        where = "test examples"
    width, measure = max(len(row["title"]) for row in shown), measure_of(comparison)
    return [
        f"{measure.replace('_', ' ')} on {shown[0]['examples']:,} {where}, with its 95 % interval:",
        *(
            f"  {row['title']:<{width}}  {row[measure]:5.1f} %  ({row['low']:.1f} to {row['high']:.1f})"
            for row in shown
        ),
    ]
