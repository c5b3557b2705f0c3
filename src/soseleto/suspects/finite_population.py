"""Evidence about the number W of wrong labels in a finite population, from a random sample without replacement.

Each function returns an ``Evidence``: how much evidence there is against every W that is still possible, a convex
function of W. A set of W that has 95 % coverage is that of all W with evidence below a bound.

- One sample of a size fixed beforehand: −log of the exact (hypergeometric) one-sided p-value. Over H strata the sum of
  −log p is at most that of H exponential variables (Fisher), whose quantile is the bound.
- A sample that may be stopped at any time: log of the prior-posterior ratio (Waudby-Smith and Ramdas 2020). At the true
  W the ratio is a supermartingale that starts at 1, so it ever reaches 1/α with probability at most α (Ville). So is a
  product over independently sampled strata: logarithms add, and the bound stays log 1/α.

NumPy in double precision.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Evidence:
    """Against W = first, first + 1, ...; any other W is impossible. ``against`` is convex."""

    first: int
    against: Array

    def within(self, low: int, high: int) -> Evidence:
        """With W known to lie between ``low`` and ``high``."""
        start = max(low, self.first)
        return Evidence(start, self.against[start - self.first : high - self.first + 1])

    def below(self, bound: float) -> tuple[int, int] | None:
        """The smallest and the largest W with evidence below ``bound``; None where there is none."""
        inside = np.flatnonzero(self.against < bound)
        return (self.first + int(inside[0]), self.first + int(inside[-1])) if len(inside) else None

    def largest(self, bounds: Array) -> Array:
        """The largest W with evidence below each bound, −1 where there is none."""
        best = int(self.against.argmin())
        rising = np.maximum.accumulate(self.against[best:])
        count = np.searchsorted(rising, bounds, side="left")
        return np.where(count > 0, self.first + best + count - 1, -1)

    def smallest(self, bounds: Array) -> Array:
        """The smallest W with evidence below each bound, −1 where there is none."""
        best = int(self.against.argmin())
        rising = np.maximum.accumulate(self.against[best::-1])
        count = np.searchsorted(rising, bounds, side="left")
        return np.where(count > 0, self.first + best - count + 1, -1)


def total(parts: Sequence[Evidence]) -> Evidence:
    """Evidence about the sum of the parts' W: the least sum of evidence over all ways to split it.

    For convex functions this merges their increments in rising order.
    """
    first = sum(part.first for part in parts)
    start = sum(float(part.against[0]) for part in parts)
    steps = np.sort(np.concatenate([np.diff(part.against) for part in parts]))
    return Evidence(first, start + np.append(0.0, np.cumsum(steps)))


def against_fewer(size: int, checked: int, wrong: int) -> Evidence:
    """−log P(at least ``wrong`` of ``checked`` are wrong | W of ``size`` are), for every W.

    That is the distribution function of the place of the wrong-th smallest of ``checked`` places drawn from ``size``.
    """
    if wrong == 0:
        return Evidence(0, np.zeros(size - checked + 1))
    place = np.arange(wrong, size - (checked - wrong) + 1)
    log = _choose(place - 1, wrong - 1) + _choose(size - place, checked - wrong) - _choose(size, checked)
    return Evidence(wrong, -np.minimum(np.logaddexp.accumulate(log), 0.0))


def against_more(size: int, checked: int, wrong: int) -> Evidence:
    """−log P(at most ``wrong`` of ``checked`` are wrong | W of ``size`` are), for every W."""
    mirrored = against_fewer(size, checked, checked - wrong)
    return Evidence(wrong, mirrored.against[::-1])


def against_any(size: int, checked: int, wrong: int, expected: float) -> Evidence:
    """log of the prior-posterior ratio of a beta-binomial prior with mean near ``expected``, for every W.

    The coverage holds for every prior; a good guess makes the set narrower.
    """
    a, b = 1 + round(4 * expected), 1 + round(4 * (1 - expected))
    n = np.arange(wrong, size - (checked - wrong) + 1)
    prior = _beta_binomial(n, size, a, b)
    return Evidence(wrong, prior - _beta_binomial(n - wrong, size - checked, a + wrong, b + checked - wrong))


def fisher_bound(strata: int, alpha: float) -> float:
    """c such that the sum of ``strata`` standard exponential variables exceeds c with probability ``alpha``."""
    low, high = 0.0, 50.0 + 10.0 * strata
    for _ in range(80):
        middle = (low + high) / 2
        tail = math.exp(-middle) * sum(middle**j / math.factorial(j) for j in range(strata))
        low, high = (middle, high) if tail > alpha else (low, middle)
    return high


def _beta_binomial(n: Array, size: int, a: int, b: int) -> Array:
    """log P(n of ``size``) for whole a and b."""
    return _choose(n + a - 1, a - 1) + _choose(size - n + b - 1, b - 1) - _choose(size + a + b - 1, a + b - 1)


def _choose(n: Array | int, k: int) -> Array:
    """log of the binomial coefficient."""
    table = _log_factorials(1 << int(np.max(n) + 1).bit_length())
    return np.asarray(table[n] - table[k] - table[np.asarray(n) - k])


@lru_cache(maxsize=4)
def _log_factorials(n: int) -> Array:
    return np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, n)))])
