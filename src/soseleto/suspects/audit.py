"""Error rates from a random sample that was checked by hand: no assumption about the mistakes is needed.

Suspects and other examples are sampled separately, without replacement; the others in two strata where the calibrated
probability separates them, with more checks where labels are more doubtful (Neyman). Examples that were decided before
the audit began are a stratum of their own whose wrong labels are counted.

Each figure (precision, recall, share of wrong labels) has an interval that contains the truth with a probability of at
least 95 %, whenever one stops. Without a wanted width, the number of checks is fixed beforehand: of the 5 % of error, 4
are spent on the exact interval after all checks and 1 on intervals that hold at any time. With a wanted width all 5 are
spent on the latter. See finite_population.py.

NumPy in double precision; all functions are pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from soseleto.suspects.estimate import Estimate
from soseleto.suspects.finite_population import (
    Array,
    Evidence,
    against_any,
    against_fewer,
    against_more,
    fisher_bound,
    total,
)

CHECKS = 60  # of the suspects, and as many of the others
ALPHA, ALPHA_AFTER_ALL = 0.05, 0.04
LONGEST = 1000  # checks of a stratum
SMALLEST, FEWEST = 20, 10  # examples and checks of a stratum
WORTH_IT = 0.75  # two strata if they make the standard error this much smaller: combining them costs a part of it
FLOOR = 0.02  # no stratum is taken to have fewer wrong labels, however low its probabilities


# The sample


@dataclass(frozen=True, eq=False)
class Stratum:
    """A part of the suspects, or of the others, of which none was decided when the audit began.

    size: the number of its examples; order: the rows to check, in random order; planned: how many, fixed beforehand
    expected: the mean probability of a wrong label, which makes intervals narrower where it is right
    """

    suspects: bool
    size: int
    order: Array
    planned: int
    expected: float


def draw(probability: Array | None, is_suspect: Array, decided: Array, *, checks: int, seed: int) -> list[Stratum]:
    """The strata of an audit of ``checks`` suspects and as many others; rows in ``decided`` are not sampled.

    The order of a stratum is its part of one permutation of all rows, so that it hardly depends on ``decided``.
    """
    place = np.random.default_rng(seed).permutation(len(is_suspect))
    guess = np.where(is_suspect, 0.5, FLOOR) if probability is None else np.nan_to_num(probability, nan=0.5)
    made: list[Stratum] = []
    for suspects in (True, False):
        rows = np.flatnonzero((is_suspect == suspects) & ~decided)
        parts = [rows] if suspects or probability is None else split(rows, guess)
        expected = [float(guess[part].mean()) for part in parts if len(part)]
        planned = allocate([len(part) for part in parts], expected, checks)
        for part, number, mean in zip(parts, planned, expected, strict=False):
            order = part[np.argsort(place[part])][:LONGEST]
            made.append(Stratum(suspects, len(part), order, number, mean))
    return made


def default_rows(probability: Array | None, is_suspect: Array) -> list[int]:
    """The rows that an audit with default options checks, and as many more: those worth a thumbnail."""
    strata = draw(probability, is_suspect, np.zeros(len(is_suspect), dtype=bool), checks=CHECKS, seed=0)
    return [int(row) for one in strata for row in one.order[: 2 * one.planned]]


def split(rows: Array, probability: Array) -> list[Array]:
    """The rows in two strata by probability, or in one where two would gain little."""
    rows = rows[np.argsort(-probability[rows], kind="stable")]
    n = len(rows)
    if n < 4 * SMALLEST:
        return [rows] if n else []
    sums = np.cumsum(probability[rows])
    at = np.unique(np.linspace(SMALLEST, n - SMALLEST, 200).astype(int))
    spread = at * _deviation(sums[at - 1] / at) + (n - at) * _deviation((sums[-1] - sums[at - 1]) / (n - at))
    best = int(spread.argmin())
    if spread[best] > WORTH_IT * n * _deviation(sums[-1] / n):
        return [rows]
    return [rows[: at[best]], rows[at[best] :]]


def allocate(sizes: Sequence[int], expected: Sequence[float], checks: int) -> list[int]:
    """Checks per stratum in proportion to size times standard deviation, at least FEWEST, at most all."""
    if len(sizes) < 2:
        return [min(checks, size) for size in sizes]
    wanted = [size * float(_deviation(mean)) for size, mean in zip(sizes, expected, strict=True)]
    fewest = min(FEWEST, checks // 2)
    first = min(max(round(checks * wanted[0] / sum(wanted)), fewest), checks - fewest)
    second = min(checks - min(first, sizes[0]), sizes[1])
    return [min(checks - second, sizes[0]), second]


def _deviation(mean: Array | float) -> Array:
    shrunk = FLOOR + (1 - 2 * FLOOR) * np.asarray(mean)
    return np.sqrt(shrunk * (1 - shrunk))


def schedule(strata: Sequence[Stratum], targets: Sequence[int]) -> Array:
    """The rows to check: the first ``targets`` of each stratum, interleaved in proportion to the planned numbers."""
    rows = np.concatenate([one.order[:number] for one, number in zip(strata, targets, strict=True)])
    when = [
        (np.arange(min(number, len(one.order))) + 0.5) / max(one.planned, 1)
        for one, number in zip(strata, targets, strict=True)
    ]
    return np.asarray(rows[np.argsort(np.concatenate(when), kind="stable")])


# The figures


@dataclass(frozen=True)
class Checked:
    """The state of a stratum: its size, and the answers so far.

    answers: whether the label was wrong, in the order of the sample, up to the first that has not been checked
    wrong, right: the numbers known in the whole stratum, which includes those checked outside the sample
    """

    suspects: bool
    size: int
    planned: int
    expected: float
    answers: tuple[bool, ...]
    wrong: int
    right: int

    def evidence(self, of: Callable[..., Evidence], *more: float, first: int | None = None) -> Evidence:
        answers = self.answers[:first]
        return of(self.size, len(answers), sum(answers), *more).within(self.wrong, self.size - self.right)

    @property
    def guess(self) -> float:
        """The expected number of wrong labels."""
        rate = sum(self.answers) / len(self.answers) if self.answers else self.expected
        return min(max(rate * self.size, self.wrong), self.size - self.right)


@dataclass(frozen=True)
class Decided:
    """The examples decided before the audit began: how many, wrong ones, and those whose decision was undone since."""

    examples: int = 0
    wrong: int = 0
    undone: int = 0


@dataclass(frozen=True)
class Figures:
    """What an audit shows; None without suspects. ``complete``: all checks planned beforehand were made."""

    precision: Estimate | None
    recall: Estimate | None
    wrong_share: Estimate
    complete: bool


@dataclass(frozen=True)
class Group:
    """The strata of the suspects or of the others, with what was decided before."""

    strata: tuple[Checked, ...]
    decided: Decided

    @property
    def size(self) -> int:
        return sum(one.size for one in self.strata) + self.decided.examples

    @property
    def guess(self) -> float:
        return sum(one.guess for one in self.strata) + self.decided.wrong + self.decided.undone / 2


def figures(
    strata: Sequence[Checked], decided: tuple[Decided, Decided] = (Decided(), Decided()), *, fixed: bool
) -> Figures:
    """Precision, recall and share of wrong labels with their intervals.

    decided: among the suspects and among the others; fixed: whether the number of checks was fixed beforehand
    """
    groups = [Group(tuple(s for s in strata if s.suspects == kind), decided[not kind]) for kind in (True, False)]
    suspects, others = groups
    size = suspects.size + others.size
    guess = suspects.guess + others.guess
    looks = [_any_time(ALPHA - ALPHA_AFTER_ALL if fixed else ALPHA)]
    done = fixed and _is_complete(strata)
    precise = [*looks, AFTER_ALL] if fixed and _is_complete(suspects.strata) else looks
    looks = [*looks, AFTER_ALL] if done else looks
    share = _narrowest([look.share(groups) for look in looks], guess / size)
    if not suspects.size:
        return Figures(None, None, share, done)
    return Figures(
        _narrowest([look.share([suspects]) for look in precise], suspects.guess / suspects.size),
        _narrowest([look.recall(suspects, others) for look in looks], suspects.guess / guess if guess else 1.0),
        share,
        done,
    )


def _is_complete(strata: Sequence[Checked]) -> bool:
    return all(len(one.answers) >= one.planned for one in strata)


def _narrowest(intervals: Sequence[tuple[float, float]], value: float) -> Estimate:
    """The intersection of intervals that hold together; the last one if they contradict each other."""
    low, high = max(one[0] for one in intervals), min(one[1] for one in intervals)
    if low > high:
        low, high = intervals[-1]
    return Estimate(min(max(value, low), high), low, high)


@dataclass(frozen=True)
class Look:
    """Evidence against fewer and against more wrong labels in a stratum, and the bound for strata together."""

    fewer: Callable[[Checked], Evidence]
    more: Callable[[Checked], Evidence]
    bound: Callable[[Sequence[Checked]], float]

    def share(self, groups: Sequence[Group]) -> tuple[float, float]:
        """Interval of the share of wrong labels in the groups together."""
        strata, size = [one for group in groups for one in group.strata], sum(group.size for group in groups)
        wrong = sum(group.decided.wrong for group in groups)
        undone = sum(group.decided.undone for group in groups)
        if not strata:
            return wrong / size, (wrong + undone) / size
        bound, least, most = self.bound(strata), sum(s.wrong for s in strata), sum(s.size - s.right for s in strata)
        few, many = (total([against(one) for one in strata]).below(bound) for against in (self.fewer, self.more))
        low, high = few[0] if few else least, many[1] if many else most
        return (low + wrong) / size, (high + wrong + undone) / size

    def recall(self, suspects: Group, others: Group) -> tuple[float, float]:
        """Interval of the share of the wrong labels that are suspects."""
        bound = self.bound([*suspects.strata, *others.strata])
        ends = []
        for of_suspects, of_others, extreme in ((self.fewer, self.more, min), (self.more, self.fewer, max)):
            found, missed = _total(suspects, of_suspects), _total(others, of_others)
            left = bound - found.against
            most = missed.largest(left) if extreme is min else missed.smallest(left)
            hits = found.first + np.arange(len(left)) + suspects.decided.wrong
            hits = hits + suspects.decided.undone * (extreme is max)
            lost = most + others.decided.wrong + others.decided.undone * (extreme is min)
            possible = (most >= 0) & (hits + lost > 0)
            rates = hits[possible] / (hits + lost)[possible]
            ends.append(float(extreme(rates)) if len(rates) else float(extreme is max))
        return ends[0], ends[1]


def _total(group: Group, against: Callable[[Checked], Evidence]) -> Evidence:
    if not group.strata:
        return Evidence(0, np.zeros(1))
    return total([against(one) for one in group.strata])


def _any_time(alpha: float) -> Look:
    def against(stratum: Checked) -> Evidence:
        return stratum.evidence(against_any, stratum.expected)

    return Look(against, against, lambda strata: math.log(1 / alpha))


AFTER_ALL = Look(
    lambda one: one.evidence(against_fewer, first=one.planned),
    lambda one: one.evidence(against_more, first=one.planned),
    lambda strata: fisher_bound(max(sum(one.planned < one.size for one in strata), 1), ALPHA_AFTER_ALL / 2),
)
