"""Calibrated probabilities of wrong labels, learned on probes, and estimates with 95 % intervals.

Logistic regression on a few examples whose labels are known to be right or wrong, and a change of prior. Resampling a
regression does not show errors of its form, so its errors are counted on held-out probes as well, see ``Rectifier``.

NumPy in double precision; all functions are pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

AUDITED, EARLIER_LABELS, FROM_TRUSTED = "audited", "from earlier labels", "from trusted examples"
ESTIMATED_MISTAKES, RANDOM_MISTAKES = "assumes estimated mistakes", "assumes random mistakes"
WIDEST = 0.5  # an interval wider than this says nothing: the number is unknown

RIDGE, APART, PULL = 1.0, 2.0, 25.0  # penalties of the regression and of its tempering
FAR = 4.0  # signals are clipped at this many standard deviations
SMALLEST = 1e-4  # shares are clipped to [SMALLEST, 1 − SMALLEST]
_SMALLEST_STEP, _ROUNDING = 1e-8, 1e-9
Array = np.ndarray


def standardized(signals: Array, reference: int) -> Array:
    """Columns centred and scaled robustly by their first ``reference`` rows, and clipped at ±FAR: (N, d)."""
    first = signals[:reference]
    middle = np.median(first, axis=0)
    low, high = np.quantile(first, [0.16, 0.84], axis=0)  # ± one standard deviation of a normal distribution
    spread = np.where(high > low, (high - low) / 2, first.std(axis=0))
    return np.clip((signals - middle) / np.where(spread > 0, spread, 1.0), -FAR, FAR)


def log_ratio(
    features: Array, positive: Array, ridge: float = RIDGE, apart: float = APART, *, towards: float = 0.0
) -> Array:
    """Coefficients (d + 1,), constant last, of log f₊(x)/f₋(x), by logistic regression with a penalty.

    The penalty is ½·ridge·d(β̄ − β₀)² + ½·apart·Σ_j (β_j − β̄)², with β̄ the mean coefficient and β₀ ``towards``: a large
    ``apart`` says that all signals count alike until many examples say otherwise.
    The share of positives among the known examples is removed from the constant: only the densities are learned.
    """
    x = with_one(features)
    y = positive.astype(float)
    d = features.shape[1]
    penalty = np.zeros((d + 1, d + 1))
    penalty[:d, :d] = apart * np.eye(d) + (ridge - apart) / d
    penalty[d, d] = 1e-6
    beta = _most_likely(x, y, penalty, np.append(np.full(d, towards), 0.0))
    beta[-1] -= logit(y.mean())
    return beta


def _most_likely(x: Array, y: Array, penalty: Array, centre: Array) -> Array:
    """The maximum of the likelihood less the quadratic form ``penalty``/2, from ``centre`` on by Newton's method.

    A step that overshoots is halved; without that the iteration can alternate between two points for ever. A decrease
    within rounding is none: the last steps are whole ones, which converge to the same digits on every machine.
    """

    def likelihood(beta: Array) -> float:
        z, away = x @ beta, beta - centre
        return float((y * z - np.logaddexp(0.0, z)).sum() - away @ penalty @ away / 2)

    beta, value = centre, likelihood(centre)
    for _ in range(50):
        p = sigmoid(x @ beta)
        slope = x.T @ (y - p) - penalty @ (beta - centre)
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + penalty, slope)
        least = value - _ROUNDING * (1.0 + abs(value))
        while (after := likelihood(beta + step)) < least and np.abs(step).max() >= _SMALLEST_STEP:
            step = step / 2
        beta, value = beta + step, after
        if np.abs(step).max() < _SMALLEST_STEP:
            break
    return beta


def tempered(betas: Array, known: Array, positive: Array, unseen: Array) -> Array:
    """Temper log-ratios that are overconfident on out-of-sample examples; ``betas`` is (d + 1, B).

    unseen: (m, B), whether the b-th regression was made without an example. An example's mean log-ratio z over the
    regressions made without it is regressed on once more, log f₊/f₋ = a·z + c, with a pulled towards 1 by PULL. If a is
    1 or more, the log-ratios were not overconfident and are returned unchanged.
    """
    left_out = unseen.any(axis=1)
    z = ((with_one(known) @ betas) * unseen).sum(axis=1)[left_out] / unseen.sum(axis=1)[left_out]
    a, c = log_ratio(z[:, None], positive[left_out], PULL, towards=1.0)
    if a >= 1.0:
        return betas
    cooler = betas * a
    cooler[-1] += c
    return cooler


def share_of(ratio: Array) -> float:
    """The maximum-likelihood share π of positives in a mixture: the maximum of Σ log(1 + π(r − 1)), r = f₊/f₋.

    There the mean posterior equals the prior (Saerens et al. 2002). The sum is concave, so its slope is bisected.
    """
    excess = np.exp(np.clip(ratio, -30.0, 30.0)) - 1.0
    low, high = SMALLEST, 1.0 - SMALLEST
    for _ in range(30):
        middle = (low + high) / 2
        rising = (excess / (1.0 + middle * excess)).sum() > 0
        low, high = (middle, high) if rising else (low, middle)
    return (low + high) / 2


def posterior(ratio: Array, share: float | Array) -> Array:
    """The probability of being positive, from log f₊/f₋ and the share of positives."""
    return sigmoid(ratio + logit(share))


def with_one(features: Array) -> Array:
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def logit(share: float | Array) -> float | Array:
    kept = np.clip(share, SMALLEST, 1.0 - SMALLEST)
    return np.log(kept / (1.0 - kept))


def softmax(scores: Array) -> Array:
    """Probabilities (N, classes)."""
    shifted = np.exp(scores - scores.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


@dataclass(frozen=True, eq=False)
class Rectifier:
    """Corrects probabilities by counting their errors on held-out probes, in B draws of the probes' weights.

    As in prediction-powered inference (Angelopoulos et al. 2023): under the source's mixture of right and wrong labels,
    the mean of wrong − p over the probes estimates the bias of p, whatever p is. The weights are those of the Bayesian
    bootstrap. The probes of each kind are extended by two half probes, one above and one below any threshold (Jeffreys'
    prior), so that a count of zero does not give a rate of exactly zero. The rates are those of this particular source,
    so they include finite-sample variation: each label is an independent draw, wrong with its probability.

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


@dataclass(frozen=True)
class Estimate:
    """A number in [0, 1] with its 95 % interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, *resampled: np.ndarray) -> Estimate:
        """The smallest interval that contains the middle 95 % of each of the resampled sets."""
        ends = [float(end) for one in resampled for end in np.quantile(one, [0.025, 0.975])]
        return cls(value, min(*ends, value), max(*ends, value))

    @property
    def width(self) -> float:
        return self.high - self.low

    @property
    def known(self) -> bool:
        """Whether the interval is narrow enough to be shown; otherwise the number is unknown."""
        return self.width <= WIDEST

    def to_dict(self, basis: str) -> dict[str, Any]:
        """The entry of ``suspects.json``: an unknown number has no value."""
        return {"value": self.value if self.known else None, "low": self.low, "high": self.high, "basis": basis}

    def __str__(self) -> str:
        if not self.known:
            return "unknown"
        return f"{100 * self.value:.1f} % ({100 * self.low:.1f} to {100 * self.high:.1f})"
