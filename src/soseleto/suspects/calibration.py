"""Calibrated probabilities from signals: logistic regression on a few examples of known kind, and a change of prior.

NumPy in double precision; all functions are pure.
"""

from __future__ import annotations

import numpy as np

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
