"""Class probabilities of every example by predictors that were trained on other, trusted examples.

Kernel ridge regression on the trusted examples of all folds but one predicts the fold that was left out; each source
example is predicted by one of the same predictors. So trusted and source examples are predicted alike, and what differs
is due to their labels. A temperature and a constant per class, fitted on the trusted examples, make the scores
probabilities.

NumPy in double precision; all functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from soseleto.suspects.calibration import softmax

FOLDS = 5
MOST_TRAINED_ON = 2000  # trusted examples of one predictor
RIDGE = 0.0004  # times the number of examples
_CHUNK = 2000
_STEPS, _SMALLEST = 50, 1e-6  # of Newton's method
Array = np.ndarray


def held_out(
    source: Sequence[Array], trusted: Sequence[Array], labels: Array, classes: int, draw: np.random.Generator
) -> tuple[Array, Array]:
    """Scores (n, classes) of the source and (m, classes) of the trusted examples.

    source, trusted: one or more blocks of features (n, d) and (m, d); the kernel is the mean of the blocks' kernels
    """
    folds = draw.permutation(len(labels)) % FOLDS
    of_source = draw.permutation(len(source[0])) % FOLDS
    scales = [_scale(block, draw) for block in trusted]
    known, found = np.zeros((len(labels), classes)), np.zeros((len(of_source), classes))
    for fold in range(FOLDS):
        others = np.flatnonzero(folds != fold)
        others = np.sort(draw.permutation(others)[:MOST_TRAINED_ON])
        basis = [block[others] for block in trusted]
        gram = _kernel(basis, basis, scales) + RIDGE * len(others) * np.eye(len(others))
        middle = np.bincount(labels[others], minlength=classes) / len(others)
        dual = np.linalg.solve(gram, np.eye(classes)[labels[others]] - middle)
        for kept, blocks, at in ((known, trusted, folds == fold), (found, source, of_source == fold)):
            for rows in np.array_split(np.flatnonzero(at), 1 + int(at.sum()) // _CHUNK):
                kept[rows] = middle + _kernel([block[rows] for block in blocks], basis, scales) @ dual
    return found, known


def _scale(block: Array, draw: np.random.Generator) -> float:
    """The median squared distance of two examples."""
    some = block[draw.permutation(len(block))[:200]]
    apart = _distances(some, some)[np.triu_indices(len(some), 1)]
    return float(np.median(apart)) or 1.0


def _kernel(first: Sequence[Array], second: Sequence[Array], scales: Sequence[float]) -> Array:
    parts = [np.exp(-_distances(a, b) / scale) for a, b, scale in zip(first, second, scales, strict=True)]
    return np.asarray(sum(parts) / len(parts))


def _distances(first: Array, second: Array) -> Array:
    squares = (first**2).sum(1)[:, None] + (second**2).sum(1)[None] - 2.0 * first @ second.T
    return np.maximum(squares, 0.0)


def temperature(scores: Array, labels: Array, weights: Array) -> tuple[float, Array]:
    """The factor and the constants (classes,) whose softmax has the highest likelihood of the weighted labels.

    Found by Newton's method; a penalty of one square each keeps the constants of rare classes finite.
    """
    classes = scores.shape[1]
    missing = np.eye(classes)[labels]
    penalty = np.append(0.0, np.ones(classes))
    value = np.append(10.0, np.zeros(classes))  # the factor, then the constants
    best = _likelihood(value, scores, labels, weights)
    for _ in range(_STEPS):
        p = softmax(value[0] * scores + value[1:])
        mean = (p * scores).sum(1)
        residual = weights[:, None] * (missing - p)
        gradient = np.append((residual * scores).sum(), residual.sum(0)) - penalty * value
        curvature = np.diag(penalty + 1e-9)
        curvature[0, 0] += (weights * ((p * scores**2).sum(1) - mean**2)).sum()
        curvature[0, 1:] = curvature[1:, 0] = (weights[:, None] * p * (scores - mean[:, None])).sum(0)
        curvature[1:, 1:] += np.diag(weights @ p) - (p * weights[:, None]).T @ p
        step = np.linalg.solve(curvature, gradient)
        while (after := _likelihood(value + step, scores, labels, weights)) < best and np.abs(step).max() > _SMALLEST:
            step = step / 2
        value, best = value + step, after
        if np.abs(step).max() < _SMALLEST:
            break
    return float(value[0]), value[1:]


def _likelihood(value: Array, scores: Array, labels: Array, weights: Array) -> float:
    z = value[0] * scores + value[1:]
    largest = z.max(axis=1)
    of_label = z[np.arange(len(labels)), labels] - largest - np.log(np.exp(z - largest[:, None]).sum(axis=1))
    return float((weights * of_label).sum() - (value[1:] ** 2).sum() / 2)
