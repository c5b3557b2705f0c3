"""Error rates from a random sample that was checked by hand: no assumption about the mistakes is needed.

Suspects and other examples are sampled separately, without replacement.

Each figure (precision, recall, share of wrong labels) has an interval that contains the truth with a probability of at
least 95 %, whenever one stops. A number W of wrong labels in a stratum is rejected by its prior-posterior ratio
(Waudby-Smith and Ramdas 2020): at the true W the ratio is a supermartingale that starts at 1, so it ever reaches 1/α
with probability at most α (Ville). So is a product over suspects and others: logarithms add.

NumPy in double precision; all functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from soseleto.suspects.rates import Estimate

CHECKS = 60  # of the suspects, and as many of the others
BOUND = math.log(1 / 0.05)  # of the evidence against what an interval contains
LONGEST = 1000  # checks of a stratum
Array = np.ndarray


# The sample


@dataclass(frozen=True, eq=False)
class Stratum:
    """The suspects, or the others.

    size: the number of its examples; order: the rows to check, in random order
    expected: the mean probability of a wrong label, which makes intervals narrower where it is right
    """

    suspects: bool
    size: int
    order: Array
    expected: float


def draw(probability: Array | None, is_suspect: Array, *, seed: int) -> list[Stratum]:
    """The strata of an audit."""
    order = np.random.default_rng(seed).permutation(len(is_suspect))
    guess = np.where(is_suspect, 0.5, 0.02) if probability is None else np.nan_to_num(probability, nan=0.5)
    strata = []
    for suspects in (True, False):
        rows = order[(is_suspect == suspects)[order]]
        if len(rows):
            strata.append(Stratum(suspects, len(rows), rows[:LONGEST], float(guess[rows].mean())))
    return strata


def default_rows(probability: Array | None, is_suspect: Array) -> list[int]:
    """The rows that an audit with default options checks, and as many more: those worth a thumbnail."""
    strata = draw(probability, is_suspect, seed=0)
    return [int(row) for stratum in strata for row in stratum.order[: 2 * CHECKS]]


def schedule(strata: Sequence[Stratum], checks: int) -> Array:
    """What to check: the first ``checks`` of each stratum, in turn."""
    parts = [stratum.order[:checks] for stratum in strata]
    turns = np.concatenate([np.arange(len(part)) for part in parts])
    return np.asarray(np.concatenate(parts)[np.argsort(turns, kind="stable")])


# The figures


@dataclass(frozen=True)
class Checked:
    """The state of a stratum: its size, and the answers so far.

    answers: whether the label was wrong, in the order of the sample, up to the first that has not been checked
    wrong, right: the numbers known in the whole stratum, which includes those checked outside the sample
    """

    suspects: bool
    size: int
    expected: float
    answers: tuple[bool, ...]
    wrong: int
    right: int

    @property
    def guess(self) -> float:
        """The expected number of wrong labels."""
        rate = sum(self.answers) / len(self.answers) if self.answers else self.expected
        return min(max(rate * self.size, self.wrong), self.size - self.right)


def figures(strata: Sequence[Checked]) -> dict[str, Estimate]:
    """Precision and recall, if there are suspects, and the share of wrong labels, with their intervals."""
    suspects, others = ([stratum for stratum in strata if stratum.suspects == of] for of in (True, False))
    if not suspects:
        return {"wrong_share": _share(others)}
    return {"precision": _share(suspects), "recall": _recall(suspects, others), "wrong_share": _share(strata)}


def _share(strata: Sequence[Checked]) -> Estimate:
    """The share of wrong labels in the strata together."""
    size = sum(stratum.size for stratum in strata)
    low, high = total(strata).below(BOUND)
    return _estimate(_guess(strata) / size, low / size, high / size)


def _guess(strata: Sequence[Checked]) -> float:
    return sum(stratum.guess for stratum in strata)


def _recall(suspects: Sequence[Checked], others: Sequence[Checked]) -> Estimate:
    """The share of the wrong labels that are suspects."""
    flagged, missed = total(suspects), total(others)
    left = BOUND - flagged.against  # for the others, if the suspects have so many wrong labels
    hits = flagged.first + np.arange(len(left))
    ends = []
    for step in (1, -1):
        lost = missed.furthest(left, step)
        possible = (lost >= 0) & (hits + lost > 0)
        ends.append(hits[possible] / (hits + lost)[possible])
    guess = _guess(suspects) + _guess(others)
    return _estimate(_guess(suspects) / guess if guess else 1.0, ends[0].min(initial=1.0), ends[1].max(initial=0.0))


def _estimate(value: float, low: float, high: float) -> Estimate:
    low, high = (float(low), float(high)) if low <= high else (0.0, 1.0)  # no wrong label is possible: nothing to find
    return Estimate(min(max(value, low), high), low, high)


# Evidence about the number of wrong labels


@dataclass(frozen=True, eq=False)
class Evidence:
    """Against W = first, first + 1, ... wrong labels; any other W is impossible. ``against`` is convex."""

    first: int
    against: Array

    def below(self, bound: float) -> tuple[int, int]:
        """The smallest and the largest W with evidence below ``bound``; of impossible answers, all W."""
        inside = np.flatnonzero(self.against < bound)
        inside = inside if len(inside) else np.arange(len(self.against))
        return self.first + int(inside[0]), self.first + int(inside[-1])

    def furthest(self, bounds: Array, step: int) -> Array:
        """The largest W (step 1) or the smallest (-1) with evidence below each bound, −1 where there is none."""
        best = int(self.against.argmin())
        count = np.searchsorted(np.maximum.accumulate(self.against[best::step]), bounds, side="left")
        return np.where(count > 0, self.first + best + step * (count - 1), -1)


def total(strata: Sequence[Checked]) -> Evidence:
    """Evidence about the sum of the strata's W: the least sum of evidence over all ways to split it.

    For convex functions this merges their increments in rising order.
    """
    parts = [evidence(stratum) for stratum in strata]
    first = sum(part.first for part in parts)
    start = sum(float(part.against[0]) for part in parts)
    steps = np.sort(np.concatenate([np.zeros(0), *(np.diff(part.against) for part in parts)]))
    return Evidence(first, start + np.append(0.0, np.cumsum(steps)))


def evidence(stratum: Checked) -> Evidence:
    """log of the prior-posterior ratio of a beta-binomial prior with mean near ``expected``, for every W.

    By Bayes it is the probability of the answers under the prior, over that given W. The coverage holds for every
    prior; a good guess makes the set narrower.
    """
    from scipy.stats import betabinom, hypergeom

    size, checked, wrong = stratum.size, len(stratum.answers), sum(stratum.answers)
    a, b = 1 + round(4 * stratum.expected), 1 + round(4 * (1 - stratum.expected))
    n = np.arange(stratum.wrong, size - stratum.right + 1)
    return Evidence(stratum.wrong, betabinom.logpmf(wrong, checked, a, b) - hypergeom.logpmf(wrong, size, n, checked))
