"""How many labels are wrong, and which suspects to hand out: from how right labels look.

Trusted examples have right labels and were judged like the source's, so the share of them below a threshold is how
often a right label falls there. Of n source examples below it about FPR·n·(1 − share of wrong labels) are false alarms,
whatever the mistakes are: only right labels must be alike on both sides. Where trusted examples were picked from the
source and their labels from before the check are known, the wrong ones show how mistakes look, and how many there are.

NumPy and SciPy in double precision; all functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from soseleto.suspects.cross_fit import Array, Judgement

AUDITED, EARLIER_LABELS, FROM_TRUSTED = "audited", "from earlier labels", "from trusted examples"
WIDEST = 0.5  # an interval wider than this says nothing: the number is unknown
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
    """

    order: Array
    false: Array
    low: Array
    high: Array
    suspects: Array
    precision: Estimate
    wrong_share: Estimate


def judge(found: Judgement, precision: float = 0.9) -> Judged:
    """The suspects: as many as ``precision`` allows, at most as many as labels are expected to be wrong.

    Where it allows none, those of the list of the highest precision. One false alarm more than was seen is reckoned
    with: beliefs claim fewer, and where mistakes follow the features they are wrong by far.
    """
    from scipy.stats import beta

    n, m = len(found.right), len(found.of_trusted)
    order = np.argsort(found.right, kind="stable")
    counts = np.arange(1, n + 1)
    weight = _like_the_source(found)
    alarms = m * np.array([weight[found.of_trusted <= at].sum() for at in found.right[order]])
    low = beta.ppf(LEVEL, np.maximum(alarms, 1e-9), m - alarms + 1)
    high = beta.ppf(1 - LEVEL, alarms + 1, np.maximum(m - alarms, 1e-9))
    rates = (alarms + 1) / (m + 1), low, high
    share = _wrong_share(found, weight)
    if found.of_wrong is None:
        right = [n * (1 - wrong) / counts for wrong in (share.value, share.high, share.low)]
        false, low, high = (np.clip(rate * of, 0.0, 1.0) for rate, of in zip(rates, right, strict=True))
    else:
        false, low, high = _false_by_mistakes(rates, found.of_wrong, found.right[order], share)
    allowed = np.flatnonzero(1 - false >= precision)
    count = min(int(allowed[-1] if len(allowed) else false.argmin()) + 1, round(share.value * n))
    suspects = np.zeros(n, dtype=bool)
    suspects[order[:count]] = True
    at = max(count - 1, 0)
    stated = Estimate(1 - false[at], 1 - max(high[at], false[at]), 1 - min(low[at], false[at]))
    return Judged(order, false, low, high, suspects, stated, share)


def _false_by_mistakes(rates: tuple[Array, ...], of_wrong: Array, thresholds: Array, share: Estimate) -> list[Array]:
    """The share of false alarms with its interval, where it is known how wrong labels look too."""
    from scipy.stats import beta

    k = len(of_wrong)
    hits = np.searchsorted(np.sort(of_wrong), thresholds, side="right")
    found = (hits + 0.5) / (k + 1), beta.ppf(1 - LEVEL, hits + 1, np.maximum(k - hits, 1e-9))
    ends = zip(rates, (found[0], found[1], beta.ppf(LEVEL, np.maximum(hits, 1e-9), k - hits + 1)), strict=True)
    of_share = (share.value, share.high, share.low)
    return [
        (1 - wrong) * alarms / np.maximum((1 - wrong) * alarms + wrong * hit, 1e-12)
        for (alarms, hit), wrong in zip(ends, of_share, strict=True)
    ]


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


def _counted_share(of: int, wrong: int) -> Estimate:
    from scipy.stats import beta

    low, high = beta.ppf([LEVEL, 1 - LEVEL], wrong + 0.5, of - wrong + 0.5)
    return Estimate(wrong / of, float(low), float(high))


def _like_the_source(found: Judgement) -> Array:
    """(m,) weights of the trusted examples, summing to one, by which every class is as frequent as in the source."""
    if found.probabilities is None:
        return np.full(len(found.trusted_labels), 1 / len(found.trusted_labels))
    classes = found.probabilities.shape[1]
    of_source = np.bincount(found.labels, minlength=classes) / len(found.labels)
    of_trusted = np.bincount(found.trusted_labels, minlength=classes)
    weight = (of_source / np.maximum(of_trusted, 1))[found.trusted_labels]
    return np.asarray(weight / weight.sum())


def _wrong_share(found: Judgement, weight: Array) -> Estimate:
    """The mean doubt; up to all that the classifiers do not confirm, since mistakes can look like the truth to them.

    How often they err on right labels is known from the trusted examples only, which gives the standard error.
    """
    if found.checked is not None:
        return _counted_share(*found.checked)
    if found.belief is None:
        return _share_by_score(found.right, found.of_trusted, weight)
    assert found.probabilities is not None
    assert found.trusted_probabilities is not None
    n, m = len(found.labels), len(found.trusted_labels)
    error = float(weight @ (found.trusted_probabilities.argmax(axis=1) != found.trusted_labels))
    spread = ERRORS * float(np.sqrt((error * (1 - error) + 1 / m) / m))
    value = 1 - float(found.belief.mean())
    unconfirmed = 1 - float(found.probabilities[np.arange(n), found.labels].mean())
    return Estimate(value, max(value - spread, 0.0), min(max(unconfirmed, value) + spread, 1.0))
