"""How many labels are wrong, and which suspects to hand out: from how right labels look.

Trusted examples have right labels and were judged like the source's, so the share of them below a threshold is how
often a right label falls there. Of n source examples below it about FPR·n·(1 − share of wrong labels) are false alarms,
whatever the mistakes are: only right labels must be alike on both sides. That holds exactly where the trusted examples
are a sample of the source whose earlier labels are known: the share of wrong labels is then counted on them.

NumPy and SciPy in double precision; all functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from soseleto.suspects.cross_fit import Array, Judgement

AUDITED, EARLIER_LABELS, FROM_TRUSTED = "audited", "from earlier labels", "from trusted examples"
WIDEST = 0.5  # an interval wider than this says nothing: the number is unknown
LEAST = 10  # suspects on a list whose precision is not reached
LEVEL = 0.025  # of each end of an interval
ERRORS = 2.0  # standard errors at each end of the interval of the share
CHOSEN = 0.5  # further ones where the quantile that says most is chosen
QUANTILES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class Estimate:
    """A number in [0, 1] with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether the interval is narrow enough to be shown; otherwise the number is unknown."""
        return self.high - self.low <= WIDEST

    def to_dict(self, basis: str) -> dict[str, Any]:
        """The entry of ``suspects.json``: an unknown number has no value."""
        return {"value": self.value if self.known else None, "low": self.low, "high": self.high, "basis": basis}

    def __str__(self) -> str:
        if not self.known:
            return "unknown"
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"


@dataclass(frozen=True, eq=False)
class Judged:
    """order: the source examples, the most probably wrong first; of the first k of them, k = 1, 2, ...

    false: (n,) the expected share of false alarms; low, high: (n,) the ends of its interval
    count: the number of suspects
    """

    order: Array
    false: Array
    low: Array
    high: Array
    count: int
    wrong_share: Estimate

    def precision(self, count: int) -> Estimate:
        """Of the first ``count``."""
        if not count:
            return Estimate(1.0, 0.0, 1.0)
        return Estimate(*(float(1.0 - share[count - 1]) for share in (self.false, self.high, self.low)))


def judge(found: Judgement, precision: float = 0.9) -> Judged:
    """The suspects: as many as ``precision`` allows, at most as many as labels are expected to be wrong.

    Where it allows none, the list of the highest precision among short ones: at most LEAST, or as many as are wrong by
    the lower end of the share. One false alarm more than was seen is reckoned with: beliefs claim fewer, and where
    mistakes follow the features they are wrong by far. Of trusted examples with an earlier label only those show how
    right labels look whose earlier label was right.
    """
    from scipy.stats import beta

    n, order = len(found.right), np.argsort(found.right, kind="stable")
    counts = np.arange(1, n + 1)
    weight, share = _like_the_source(found), _wrong_share(found)
    independent = 1.0 if found.trusted_count is None else found.trusted_count / len(weight)
    of = max(float((weight > 0).sum()) * independent, 1.0)
    by_score = np.argsort(found.of_trusted)
    below = np.searchsorted(found.of_trusted[by_score], found.right[order], side="right")
    alarms = of * np.append(0.0, np.cumsum(weight[by_score]))[below]
    low = beta.ppf(LEVEL, np.maximum(alarms, 1e-9), of - alarms + 1)
    high = beta.ppf(1 - LEVEL, alarms + 1, np.maximum(of - alarms, 1e-9))
    rest = n * (1 - share.value) / counts
    false, low, high = (np.clip(rate * rest, 0.0, 1.0) for rate in ((alarms + 1) / (of + 1), low, high))
    expected = round(share.value * n)
    allowed = np.flatnonzero(1 - false[:expected] >= precision)
    count = int(allowed[-1]) + 1 if len(allowed) else min(int(false.argmin()) + 1, max(LEAST, round(share.low * n)))
    return Judged(order, false, low, high, min(count, expected), share)


def _like_the_source(found: Judgement) -> Array:
    """(m,) weights of the trusted examples that count, summing to one: every class is as frequent as in the source."""
    truth, before = found.trusted_labels, found.before
    right = np.ones(len(truth)) if before is None else 1.0 * ((before < 0) | (before == truth))
    if found.probabilities is not None:
        classes = found.probabilities.shape[1]
        of_source = np.bincount(found.labels, minlength=classes) / len(found.labels)
        right = right * (of_source / np.maximum(np.bincount(truth, right, minlength=classes), 1))[truth]
    return np.asarray(right / max(right.sum(), 1e-12))


def _wrong_share(found: Judgement) -> Estimate:
    """The mean doubt; up to all that the classifiers do not confirm, since mistakes can look like the truth to them.

    How often they err on right labels is known from the trusted examples only, which gives the standard error. With
    earlier labels it is counted.
    """
    if found.before is not None and (found.before >= 0).any():
        return _counted(found.before >= 0, (found.before >= 0) & (found.before != found.trusted_labels))
    weight = _like_the_source(found)
    if found.belief is None:
        return _share_by_score(found.right, found.of_trusted, weight)
    assert found.probabilities is not None
    assert found.trusted_probabilities is not None
    n, m = len(found.labels), found.trusted_count or len(found.trusted_labels)
    error = float(weight @ (found.trusted_probabilities.argmax(axis=1) != found.trusted_labels))
    spread = ERRORS * float(np.sqrt((error * (1 - error) + 1 / m) / m))
    value = 1 - float(found.belief.mean())
    unconfirmed = 1 - float(found.probabilities[np.arange(n), found.labels].mean())
    return Estimate(value, max(value - spread, 0.0), min(max(unconfirmed, value) + spread, 1.0))


def _share_by_score(of_source: Array, of_right: Array, weight: Array) -> Estimate:
    """From how many labels score as the better ones of those that are known to be right, above any quantile of these.

    That share of the source, divided by the share of right labels there, is at least the share of right labels, and
    equal to it where no wrong label scores so well; the quantile is the one that says most beyond its standard error.
    """
    order = np.argsort(of_right)
    below = np.cumsum(weight[order])
    found: list[tuple[float, float, float]] = []
    for quantile in QUANTILES:
        at = min(int(np.searchsorted(below, quantile)), len(order) - 1)
        above = max(1 - float(below[at]), 1e-9)
        there = float((of_source > of_right[order[at]]).mean())
        ratio = there / above
        errors = there * (1 - there) / len(of_source), ratio**2 * above * max(1 - above, 0.01) / len(of_right)
        error = float(np.sqrt(sum(errors))) / above
        low, high = (1 - ratio + sign * (ERRORS + CHOSEN) * error for sign in (-1, 1))
        found.append((low, 1 - ratio, high))
    low, value, high = max(found)
    return Estimate(*np.clip([value, low, max(high, found[-1][2])], 0.0, 1.0).tolist())


def _counted(known: Array, wrong: Array) -> Estimate:
    """The share of wrong labels among those that are known, with its exact interval."""
    from scipy.stats import binomtest

    of, count = int(known.sum()), int(wrong.sum())
    interval = binomtest(count, of).proportion_ci(1 - 2 * LEVEL, method="exact")
    return Estimate((count + 0.5) / (of + 1), float(interval.low), float(interval.high))
