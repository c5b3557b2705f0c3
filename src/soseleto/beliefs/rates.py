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

CLAIMED = 20.0  # trusted examples that the beliefs' own claim of false alarms is worth
LEVEL = 0.025  # of each end of an interval
MOST_ALARMS = 0.5  # the false alarm rate up to which a threshold says how many labels are wrong


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
    """The suspects: as many as ``precision`` allows, at most as many as labels are expected to be wrong."""
    from scipy.stats import beta

    n, m = len(found.right), len(found.of_trusted)
    order = np.argsort(found.right, kind="stable")
    counts = np.arange(1, n + 1)
    weight = _like_the_source(found)
    alarms = np.array([weight[found.of_trusted <= at].sum() for at in found.right[order]]) * m
    claimed = np.cumsum(found.belief[order]) / found.belief.sum()
    hits, misses = alarms + CLAIMED * claimed, m - alarms + CLAIMED * (1 - claimed)
    rate = hits / (hits + misses)
    low, high = (beta.ppf(level, hits + 0.5, misses + 0.5) for level in (LEVEL, 1 - LEVEL))
    share = _wrong_share(found, counts / n, high)
    right = 1 - share.low
    false, low, high = (np.clip(of * right * n / counts, 0.0, 1.0) for of in (rate, low, high))
    allowed = np.flatnonzero(1 - false >= precision)
    expected = round(share.value * n)
    count = min(int(allowed[-1]) + 1, expected) if len(allowed) else expected
    suspects = np.zeros(n, dtype=bool)
    suspects[order[:count]] = True
    at = max(count - 1, 0)
    stated = Estimate(1 - false[at], 1 - high[at], 1 - low[at])
    return Judged(order, false, low, high, suspects, stated, share)


def _like_the_source(found: Beliefs) -> Array:
    """(m,) weights of the trusted examples, summing to one, by which every class is as frequent as in the source."""
    classes = found.probabilities.shape[1]
    of_source = np.bincount(found.labels, minlength=classes) / len(found.labels)
    of_trusted = np.bincount(found.trusted_labels, minlength=classes)
    weight = (of_source / np.maximum(of_trusted, 1))[found.trusted_labels]
    return np.asarray(weight / weight.sum())


def _wrong_share(found: Beliefs, flagged: Array, rate: Array) -> Estimate:
    """From what lies below a threshold beyond all false alarms, to what the classifiers cannot rule out."""
    at = rate < MOST_ALARMS
    sure = float(np.max((flagged[at] - rate[at]) / (1 - rate[at]), initial=0.0))
    n = len(found.labels)
    doubted = 1 - found.probabilities[np.arange(n), found.labels]
    spread = 2 * float(doubted.std()) / np.sqrt(n)
    value = 1 - float(found.belief.mean())
    return Estimate(float(np.clip(value, sure, 1.0)), min(sure, value), max(float(doubted.mean()) + spread, value))
