"""A probability from signals, learned on a few examples of known kind: logistic regression and a change of prior.

NumPy in double precision; everything here is a function of its arguments.
"""

from __future__ import annotations

import numpy as np

RIDGE, PULL = 0.3, 25.0
FAR = 4.0  # standard deviations beyond which a signal says no more
SMALLEST = 1e-4  # a share is kept this far from 0 and 1
Array = np.ndarray


def standardized(signals: Array, reference: int) -> Array:
    """Columns centred and scaled robustly by their first ``reference`` rows, far values drawn in: (N, d)."""
    first = signals[:reference]
    middle = np.median(first, axis=0)
    low, high = np.quantile(first, [0.16, 0.84], axis=0)  # ± one standard deviation, were it normal
    spread = np.where(high > low, (high - low) / 2, first.std(axis=0))
    return np.clip((signals - middle) / np.where(spread > 0, spread, 1.0), -FAR, FAR)


def log_ratio(features: Array, positive: Array, ridge: float = RIDGE, *, towards: float = 0.0) -> Array:
    """Coefficients (d + 1,), constant last, of log f₊(x)/f₋(x), by logistic regression with penalty ridge·‖β − β₀‖²/2.

    The share of positives among the known examples is taken out of the constant: only the densities are learned.
    """
    x = with_one(features)
    y = positive.astype(float)
    penalty = np.full(x.shape[1], ridge)
    penalty[-1] = 1e-6
    centre = np.append(np.full(features.shape[1], towards), 0.0)
    beta = centre.copy()
    for _ in range(50):  # Newton's method, no step longer than it can trust
        p = sigmoid(x @ beta)
        slope = x.T @ (y - p) - penalty * (beta - centre)
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + np.diag(penalty), slope)
        beta = beta + step * min(1.0, 4.0 / np.abs(step).max())
        if np.abs(step).max() < 1e-8:
            break
    beta[-1] -= logit(y.mean())
    return beta


def tempered(betas: Array, known: Array, positive: Array, unseen: Array) -> Array:
    """Log-ratios made less sure where they proved too sure of examples they had not seen; ``betas`` is (d + 1, B).

    unseen: (m, B), whether the b-th regression was made without an example. The mean log-ratio z of those that had not
    seen it is regressed on once more, log f₊/f₋ = a·z + c, with a pulled towards 1 by PULL; where a is 1 or more, the
    log-ratios were not too sure, and stay.
    """
    there = unseen.any(axis=1)
    z = ((with_one(known) @ betas) * unseen).sum(axis=1)[there] / unseen.sum(axis=1)[there]
    a, c = log_ratio(z[:, None], positive[there], PULL, towards=1.0)
    if a >= 1.0:
        return betas
    cooler = betas * a
    cooler[-1] += c
    return cooler


def share_of(ratio: Array) -> float:
    """The share π of positives that makes a mixture most likely: the maximum of Σ log(1 + π(r − 1)), r = f₊/f₋.

    It is where the mean posterior equals the prior (Saerens et al. 2002). The sum is concave, so its slope is bisected.
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
