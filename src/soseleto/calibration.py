"""A probability from signals, learned on a few examples of known kind: logistic regression and a change of prior.

NumPy in double precision; everything here is a function of its arguments.
"""

from __future__ import annotations

import numpy as np

from soseleto.data import generator

Array = np.ndarray


def standardized(signals: Array, reference: int) -> Array:
    """Columns centred and scaled robustly by their first ``reference`` rows, far values drawn in: (N, d)."""
    first = signals[:reference]
    middle = np.median(first, axis=0)
    low, high = np.quantile(first, [0.16, 0.84], axis=0)  # ± one standard deviation, were it normal
    spread = np.where(high > low, (high - low) / 2, first.std(axis=0))
    return np.clip((signals - middle) / np.where(spread > 0, spread, 1.0), -4.0, 4.0)


def logistic(features: Array, positive: Array, ridge: float = 1.0) -> Array:
    """Coefficients (d + 1,), the intercept last and free, of the log-odds that maximise likelihood − ridge·‖β‖²/2."""
    x = with_one(features)
    y = positive.astype(float)
    penalty = np.full(x.shape[1], ridge)
    penalty[-1] = 1e-6
    beta = np.zeros(x.shape[1])
    for _ in range(50):
        p = sigmoid(x @ beta)
        slope = x.T @ (y - p) - penalty * beta
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + np.diag(penalty), slope)
        beta = beta + step
        if np.abs(step).max() < 1e-8:
            break
    return beta


def with_one(features: Array) -> Array:
    return np.concatenate([features, np.ones((len(features), 1))], axis=1)


def folds(kinds: Array, number: int, seed: int) -> Array:
    """A fold for every example, each kind dealt out evenly: (m,)."""
    import torch

    order = torch.randperm(len(kinds), generator=generator(seed, "probes/folds")).numpy()
    fold = np.empty(len(kinds), dtype=int)
    for kind in np.unique(kinds):
        members = order[kinds[order] == kind]
        fold[members] = np.arange(len(members)) % number
    return fold


def prior_of(log_ratio: Array, start: float = 0.5) -> float:
    """The share of positives by which a mixture is best explained (Saerens et al. 2002).

    log_ratio: log f₊(x)/f₋(x) of every example. Each round makes the share the mean posterior under the share before.
    """
    share = start
    ratio = np.exp(np.clip(log_ratio, -30, 30))
    for _ in range(500):
        odds = share / (1 - share) * ratio
        new = float(np.clip((odds / (1 + odds)).mean(), 1e-4, 1 - 1e-4))
        if abs(new - share) < 1e-7:
            break
        share = new
    return share


def sigmoid(x: Array) -> Array:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


def mixture(features: Array, positive: Array, unknown: Array) -> Array:
    """The probability (N,) that each of the ``unknown`` is positive, learned on examples of known kind.

    The known ones give the ratio of the two densities, whatever their own share of positives; the unknown ones are a
    mixture of the two, whose share of positives is found by ``prior_of``.
    """
    beta = logistic(features, positive)
    log_ratio = with_one(unknown) @ beta - np.log(positive.mean() / (1 - positive.mean()))
    share = prior_of(log_ratio)
    return sigmoid(log_ratio + np.log(share / (1 - share)))
