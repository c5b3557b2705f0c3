"""Corrects learned probabilities by counting their errors on held-out probes, and gives intervals.

Resampling a regression does not show errors of its form. So its probabilities are compared with the probes, as in
prediction-powered inference (Angelopoulos et al. 2023): under the source's mixture of right and wrong labels, the mean
of wrong − p over the probes estimates the bias of p, whatever p is.

NumPy in double precision.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from soseleto.suspects.calibration import SMALLEST

Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Rectifier:
    """Rates counted in B draws of the probes' weights (the Bayesian bootstrap).

    The probes of each kind are extended by two half probes, one above and one below any threshold (Jeffreys' prior), so
    that a count of zero does not give a rate of exactly zero. The rates are those of this particular source, so they
    include finite-sample variation: each label is an independent draw, wrong with its probability.

    wrong, right: the probability of each wrong and each right probe
    wrong_weights, right_weights: (B, wrong + 2) and (B, right + 2)
    luck: (B, 2), standard normal, the finite-sample variation above and below a threshold
    shares: (B,) of wrong labels in the population that the source is drawn from
    """

    wrong: Array
    right: Array
    wrong_weights: Array
    right_weights: Array
    luck: Array
    shares: Array

    @classmethod
    def draw(
        cls,
        probability: Array,
        known: Array,
        is_wrong: Array,
        times: int,
        draw: np.random.Generator,
        checked: tuple[int, int] | None = None,
        share: tuple[float, float] | None = None,
    ) -> Rectifier:
        """Draw from the probabilities of the source and of the probes.

        checked: the number of checked examples and how many of them were wrong, if the share was counted
        share: its interval, if mistakes were estimated: any share in it is possible

        With neither, the share is where the source's mean probability lies between the means of right and of wrong
        probes.
        """
        wrong, right = known[is_wrong], known[~is_wrong]
        of_wrong, of_right = (_weights(len(kind), times, draw) for kind in (wrong, right))
        if checked is not None:
            of, count = checked
            shares = draw.beta(count + 0.5, of - count + 0.5, times)
        elif share is not None:
            shares = draw.uniform(*share, times)
        else:
            high, low = _mean(of_wrong, wrong), _mean(of_right, right)
            shares = (probability.mean() - low) / np.maximum(high - low, SMALLEST)
        luck = draw.normal(size=(times, 2))
        return cls(wrong, right, of_wrong, of_right, luck, np.clip(shares, SMALLEST, 1.0 - SMALLEST))

    def wrong_shares(self, probability: Array) -> Array:
        """Shares of wrong labels in the source, (B,)."""
        return np.clip(self.shares + self.luck[:, 0] * _spread(probability, probability), SMALLEST, 1.0 - SMALLEST)

    def rates(self, probability: Array, threshold: float) -> tuple[Array, Array]:
        """Precision and recall, (B,) each, of the source examples at or above the threshold (at least one)."""
        chosen = probability >= threshold
        expected, count = probability[chosen].sum() / len(probability), chosen.mean()
        typical = expected / count
        missed = self.wrong_weights @ np.append(
            np.where(self.wrong >= threshold, 1.0 - self.wrong, 0.0), [1 - typical, 0]
        )
        false = self.right_weights @ np.append(np.where(self.right >= threshold, self.right, 0.0), [typical, 0])
        above, below = (
            luck * _spread(part, probability)
            for luck, part in zip(self.luck.T, (probability[chosen], probability[~chosen]), strict=True)
        )
        hits = expected + self.shares * missed - (1.0 - self.shares) * false + above
        wrong = np.maximum(self.shares + above + below, SMALLEST)
        return np.clip(hits / count, 0.0, 1.0), np.clip(hits / wrong, 0.0, 1.0)


def _weights(n: int, times: int, draw: np.random.Generator) -> Array:
    drawn = np.concatenate([draw.gamma(1.0, size=(times, n)), draw.gamma(0.5, size=(times, 2))], axis=1)
    return drawn / drawn.sum(axis=1, keepdims=True)


def _mean(weights: Array, values: Array) -> Array:
    """The values' mean by each row of weights, without the two half probes."""
    own = weights[:, :-2]
    return own @ values / own.sum(axis=1)


def _spread(part: Array, source: Array) -> float:
    """The standard deviation of the number of wrong labels in a part of the source, as a share of the source."""
    return float(np.sqrt((part * (1.0 - part)).sum())) / len(source)
