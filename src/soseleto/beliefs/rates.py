"""How many labels are wrong, and which suspects to hand out: from how right labels look.

Trusted examples have right labels and were judged like the source's, so the share of them below a threshold is how
often a right label falls there. Of n source examples below it about FPR·n·(1 − share of wrong labels) are false alarms,
whatever the mistakes are: only right labels must be alike on both sides. That holds exactly where the trusted examples
are a sample of the source whose earlier labels are known: the share of wrong labels is then counted on them.

NumPy and SciPy in double precision; all functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soseleto.beliefs.cross_fit import Array, Beliefs
from soseleto.suspects.calibration import Estimate

LEVEL = 0.025  # of each end of an interval
LEAST = 10  # suspects on a list whose precision is not reached
ERRORS = 2.0  # standard errors at each end of the interval of the share


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


def judge(found: Beliefs, precision: float = 0.9, before: Array | None = None) -> Judged:
    """The suspects: as many as ``precision`` allows, at most as many as labels are expected to be wrong.

    Where it allows none, the list of the highest precision among short ones: at most LEAST, or as many as are wrong by
    the lower end of the share. One false alarm more than was seen is reckoned with: beliefs claim fewer, and where
    mistakes follow the features they are wrong by far.

    before: (m,) the labels of the trusted examples before they were checked, -1 where unknown. Then the share of wrong
        labels is counted, and only those that were right show how right labels of the source look.
    """
    from scipy.stats import beta

    n = len(found.right)
    right = np.full(len(found.of_trusted), True) if before is None else (before < 0) | (before == found.trusted_labels)
    counted = before is not None and bool((before >= 0).any())
    share = _counted(before >= 0, ~right) if before is not None and counted else _wrong_share(found)
    order = np.argsort(found.right, kind="stable")
    counts = np.arange(1, n + 1)
    weight, of = _like_the_source(found, right), max(int(right.sum()), 1)
    alarms = of * np.array([weight[found.of_trusted <= at].sum() for at in found.right[order]])
    low = beta.ppf(LEVEL, np.maximum(alarms, 1e-9), of - alarms + 1)
    high = beta.ppf(1 - LEVEL, alarms + 1, np.maximum(of - alarms, 1e-9))
    rest = n * (1 - share.value) / counts
    false, low, high = (np.clip(rate * rest, 0.0, 1.0) for rate in ((alarms + 1) / (of + 1), low, high))
    expected = round(share.value * n)
    allowed = np.flatnonzero(1 - false[:expected] >= precision)
    count = int(allowed[-1]) + 1 if len(allowed) else min(int(false.argmin()) + 1, max(LEAST, round(share.low * n)))
    count = min(count, expected)
    suspects = np.zeros(n, dtype=bool)
    suspects[order[:count]] = True
    at = max(count - 1, 0)
    stated = Estimate(1 - false[at], 1 - max(high[at], false[at]), 1 - min(low[at], false[at]))
    return Judged(order, false, low, high, suspects, stated, share)


def _like_the_source(found: Beliefs, right: Array) -> Array:
    """(m,) weights of the trusted examples that count, summing to one: every class is as frequent as in the source."""
    classes = found.probabilities.shape[1]
    of_source = np.bincount(found.labels, minlength=classes) / len(found.labels)
    of_trusted = np.bincount(found.trusted_labels[right], minlength=classes)
    weight = (of_source / np.maximum(of_trusted, 1))[found.trusted_labels] * right
    return np.asarray(weight / max(weight.sum(), 1e-12))


def _counted(known: Array, wrong: Array) -> Estimate:
    """The share of wrong labels among those that are known, with its exact interval."""
    from scipy.stats import beta

    of, count = int(known.sum()), int(wrong.sum())
    low, high = beta.ppf(LEVEL, max(count, 1e-9), of - count + 1), beta.ppf(1 - LEVEL, count + 1, max(of - count, 1e-9))
    return Estimate((count + 0.5) / (of + 1), float(low), float(high))


def _wrong_share(found: Beliefs) -> Estimate:
    """The mean doubt; up to all that the classifiers do not confirm, since mistakes can look like the truth to them.

    How often they err on right labels is known from the trusted examples only, which gives the standard error.
    """
    n, m = len(found.labels), len(found.trusted_labels)
    weight = _like_the_source(found, np.full(m, True))
    error = float(weight @ (found.trusted_probabilities.argmax(axis=1) != found.trusted_labels))
    spread = ERRORS * float(np.sqrt((error * (1 - error) + 1 / m) / m))
    value = 1 - float(found.belief.mean())
    unconfirmed = 1 - float(found.probabilities[np.arange(n), found.labels].mean())
    return Estimate(value, max(value - spread, 0.0), min(max(unconfirmed, value) + spread, 1.0))
