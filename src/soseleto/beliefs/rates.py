"""How many labels are wrong, and which suspects to hand out: from how right labels look.

Trusted examples have right labels and were judged like the source's, so the share of them below a threshold is how
often a right label falls there. Of n source examples below it about FPR·n·(1 − share of wrong labels) are false alarms,
whatever the mistakes are: only right labels must be alike on both sides.

NumPy and SciPy in double precision; all functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soseleto.beliefs.cross_fit import Array, Beliefs
from soseleto.suspects.calibration import Estimate

LEVEL = 0.025  # of each end of an interval
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


def judge(found: Beliefs, precision: float = 0.9) -> Judged:
    """The suspects: as many as ``precision`` allows, at most as many as labels are expected to be wrong.

    Where it allows none, those of the list of the highest precision. One false alarm more than was seen is reckoned
    with: beliefs claim fewer, and where mistakes follow the features they are wrong by far.
    """
    from scipy.stats import beta

    n, m = len(found.right), found.trusted_count
    order = np.argsort(found.right, kind="stable")
    counts = np.arange(1, n + 1)
    weight = _like_the_source(found)
    alarms = m * np.array([weight[found.of_trusted <= at].sum() for at in found.right[order]])
    low = beta.ppf(LEVEL, np.maximum(alarms, 1e-9), m - alarms + 1)
    high = beta.ppf(1 - LEVEL, alarms + 1, np.maximum(m - alarms, 1e-9))
    share = _wrong_share(found, weight)
    right = n * (1 - share.value) / counts
    false, low, high = (np.clip(rate * right, 0.0, 1.0) for rate in ((alarms + 1) / (m + 1), low, high))
    allowed = np.flatnonzero(1 - false >= precision)
    count = min(int(allowed[-1] if len(allowed) else false.argmin()) + 1, round(share.value * n))
    suspects = np.zeros(n, dtype=bool)
    suspects[order[:count]] = True
    at = max(count - 1, 0)
    stated = Estimate(1 - false[at], 1 - max(high[at], false[at]), 1 - min(low[at], false[at]))
    return Judged(order, false, low, high, suspects, stated, share)


def _like_the_source(found: Beliefs) -> Array:
    """(m,) weights of the trusted examples, summing to one, by which every class is as frequent as in the source."""
    classes = found.probabilities.shape[1]
    of_source = np.bincount(found.labels, minlength=classes) / len(found.labels)
    of_trusted = np.bincount(found.trusted_labels, minlength=classes)
    weight = (of_source / np.maximum(of_trusted, 1))[found.trusted_labels]
    return np.asarray(weight / weight.sum())


def _wrong_share(found: Beliefs, weight: Array) -> Estimate:
    """The mean doubt; up to all that the classifiers do not confirm, since mistakes can look like the truth to them.

    How often they err on right labels is known from the trusted examples only, which gives the standard error.
    """
    n, m = len(found.labels), found.trusted_count
    error = float(weight @ (found.trusted_probabilities.argmax(axis=1) != found.trusted_labels))
    spread = ERRORS * float(np.sqrt((error * (1 - error) + 1 / m) / m))
    value = 1 - float(found.belief.mean())
    unconfirmed = 1 - float(found.probabilities[np.arange(n), found.labels].mean())
    return Estimate(value, max(value - spread, 0.0), min(max(unconfirmed, value) + spread, 1.0))
