"""The mistakes that the data suggest: how many labels are wrong, which class is taken for which, and on which examples.

Of a source example with label ỹ only a prediction p(i | x) of its class is known, made by predictors that learned from
trusted examples alone (``held_out``). The mistakes are those that make the given labels most probable:

    p(ỹ | x) = Σ_i p(i | x)·T[ỹ, i],   T[i, i] = 1 − r,   T[j, i] = r·taken[j, i]·p(j | x)^γ / (their sum over j ≠ i)

The rate r depends on the class i and on how sure the prediction is; taken[j, i] is how often class i is taken for j
when it is taken for another; with γ = 0 mistakes depend on the class alone, with larger γ they prefer classes that look
likely, as on hard examples. r and taken are found by expectation maximisation.

Predictions that are not quite calibrated look like mistakes too. How much they do is measured on the trusted examples,
whose labels are right: the lower end of the share's interval is without that part, the upper end with it. A γ above 0
is considered where it explains the source better than it explains trusted labels. Where this is so, or where mistakes
are more frequent on hard examples, they may agree with a wrong prediction, and then they cannot be seen: the upper end
is raised by the expected share of wrong predictions.

NumPy in double precision; all functions are pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from soseleto.suspects.calibration import softmax

REPEATS = 20  # of the share, with random weights of all examples (the Bayesian bootstrap)
SHARPER = (1.0, 2.0)  # values of γ beside 0
MOST_SOURCE = 2000  # source examples that are enough: mistakes are estimated on so many, drawn at random
FEWEST_PER_CLASS, MOST_CLASSES = 10, 100  # trusted examples of a class on average; beyond these nothing is estimated
_EDGES = (0.1, 0.2, 0.35, 0.6)  # quantiles of the highest probability, from hard examples to easy ones
_HARD = 3  # the levels of the hardest third
_CLEARLY = 0.05  # by which the rate on hard examples is higher than predictions explain
_STEPS, _STEPS_AGAIN = 60, 20
_PRIOR = 20.0  # examples by which the rate of a class is pulled to that of its level, and that of a level to the mean
_SPREAD = 1.0  # example of every class that is taken for all others alike
_TINY = 1e-12
FOLDS = 5
MOST_TRAINED_ON = 2000  # trusted examples of one predictor
RIDGE = 0.0004  # times the number of examples
_CHUNK = 2000
_NEWTON_STEPS, _SMALLEST_STEP = 50, 1e-6
Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Mistakes:
    """Estimated mistakes, applied to m trusted examples.

    share: the 95 % interval of the share of wrong labels in the source
    rates: (m,) the probability that such an example has a wrong label in the source
    labels: (m, classes) the probabilities of that wrong label
    """

    share: tuple[float, float]
    rates: Array
    labels: Array


def can_estimate(trusted: int, classes: int) -> bool:
    """Whether there are enough trusted examples for the number of classes."""
    return classes <= MOST_CLASSES and trusted >= FEWEST_PER_CLASS * classes


def estimate(
    source: Sequence[Array],
    source_labels: Array,
    trusted: Sequence[Array],
    trusted_labels: Array,
    classes: int,
    draw: np.random.Generator,
) -> Mistakes:
    """Estimate the mistakes of the source; features come in one or more blocks (examples, d)."""
    found, known = held_out(source, trusted, trusted_labels, classes, draw)
    labels = source_labels
    p, of_trusted = _calibrated(found, known, trusted_labels, np.ones(len(trusted_labels)))
    edges = np.quantile(p.max(axis=1), _EDGES)
    given = _Labelled(p, labels, np.digitize(p.max(axis=1), edges))
    right = _Labelled(of_trusted, trusted_labels, np.digitize(of_trusted.max(axis=1), edges))
    plain, apparent = Model.start(classes, 0.0).fit(given, _STEPS), Model.start(classes, 0.0).fit(right, _STEPS)
    models = [plain, *_sharper(plain, apparent, given, right)]
    again = []
    for _ in range(REPEATS):
        p, _ = _calibrated(found, known, trusted_labels, draw.exponential(size=len(trusted_labels)))
        weights = draw.exponential(size=len(labels))
        again.append(plain.fit(replace(given, p=p), _STEPS_AGAIN, weights / weights.mean()).share)
    low, high = np.quantile(again, [0.025, 0.975])
    # Weights make the estimate larger, as fewer examples do: the lower end is the basic bootstrap's.
    low = (2 * plain.share - high - apparent.share) / (1 - apparent.share)
    joint = np.mean([model.joint(right) for model in models], axis=0)
    rates = joint.sum(axis=1)
    high = float(max(high, *(model.share for model in models)))
    if len(models) > 1 or plain.on_hard_ones > apparent.on_hard_ones + _CLEARLY:
        high = min(high + 1.0 - given.p.max(axis=1).mean(), 1.0)
    return Mistakes((float(np.clip(low, 0.0, plain.share)), float(high)), rates, joint / rates[:, None])


@dataclass(frozen=True, eq=False)
class _Labelled:
    """Predictions (n, classes), labels (n,), and how sure the predictions are (n,): 0 for the hardest examples."""

    p: Array
    labels: Array
    levels: Array


def _sharper(plain: Model, apparent: Model, given: _Labelled, right: _Labelled) -> list[Model]:
    """The models with γ above 0 whose likelihood per example gains more on the source than on trusted examples."""
    classes, kept = given.p.shape[1], []
    for gamma in SHARPER:
        start = Model.start(classes, gamma)
        on_source, on_trusted = start.fit(given, _STEPS), start.fit(right, _STEPS)
        gain = (on_source.likelihood - plain.likelihood) / len(given.labels)
        if gain > max((on_trusted.likelihood - apparent.likelihood) / len(right.labels), 0.0):
            kept.append(on_source)
    return kept


def _calibrated(found: Array, known: Array, labels: Array, weights: Array) -> tuple[Array, Array]:
    factor, constants = temperature(known, labels, weights)
    return softmax(factor * found + constants), softmax(factor * known + constants)


@dataclass(frozen=True, eq=False)
class Model:
    """rates: (levels, classes), r above; taken: (classes, classes), columns sum to 1; gamma: the exponent."""

    rates: Array
    taken: Array
    gamma: float
    likelihood: float = -np.inf
    share: float = np.nan  # of wrong labels, given the labels

    @classmethod
    def start(cls, classes: int, gamma: float) -> Model:
        return cls(np.full((len(_EDGES) + 1, classes), 0.1), _others(classes) / (classes - 1), gamma)

    def fit(self, data: _Labelled, steps: int, weights: Array | None = None) -> Model:
        """After ``steps`` of expectation maximisation."""
        p, labels, levels = data.p, data.labels, data.levels
        n, classes = p.shape
        weight = np.ones((n, 1)) if weights is None else weights[:, None]
        given, level = np.eye(classes)[labels], np.eye(len(_EDGES) + 1)[levels]
        rates, taken, preferred = self.rates, self.taken, p**self.gamma
        of_label = preferred[np.arange(n), labels][:, None]
        for _ in range(steps):
            rate = rates[levels]
            scale = of_label / np.maximum(preferred @ taken, _TINY) if self.gamma else 1.0
            wrong = p * rate * taken[labels] * scale  # p(class i, wrong, ỹ | x), by class
            right = p * (1.0 - rate) * given
            total = np.maximum((wrong + right).sum(axis=1, keepdims=True), _TINY)
            wrong, right = weight * wrong / total, weight * right / total
            share = wrong.sum() / weight.sum()
            rates = _rates(level.T @ wrong, level.T @ right, share)
            counts = given.T @ wrong + _SPREAD * _others(classes) / (classes - 1)
            taken = counts / counts.sum(axis=0)
        return Model(rates, taken, self.gamma, float((weight * np.log(total)).sum()), float(share))

    @property
    def on_hard_ones(self) -> float:
        """By how much the rate is higher on the hardest third of the examples than on the easiest."""
        return float(self.rates[:_HARD].mean() - self.rates[-1].mean())

    def joint(self, data: _Labelled) -> Array:
        """The probabilities (m, classes) that an example of the class ``data.labels`` is labelled as another one."""
        truth = data.labels
        chances = self.taken[:, truth].T * data.p**self.gamma + _TINY * _others(data.p.shape[1])[truth]
        return self.rates[data.levels, truth][:, None] * chances / chances.sum(axis=1, keepdims=True)


def _rates(wrong: Array, right: Array, share: float) -> Array:
    """Rates (levels, classes) from expected counts."""
    of_level = wrong.sum(axis=1, keepdims=True) + _PRIOR * share
    of_level = of_level / ((wrong + right).sum(axis=1, keepdims=True) + _PRIOR)
    return np.clip((wrong + _PRIOR * of_level) / (wrong + right + _PRIOR), _TINY, 1.0 - _TINY)


def _others(classes: int) -> Array:
    return 1.0 - np.eye(classes)


# Predictions of every example by predictors that were trained on other, trusted examples


def held_out(
    source: Sequence[Array], trusted: Sequence[Array], labels: Array, classes: int, draw: np.random.Generator
) -> tuple[Array, Array]:
    """Scores (n, classes) of the source and (m, classes) of the trusted examples.

    Kernel ridge regression on the trusted examples of all folds but one predicts the fold that was left out; each
    source example is predicted by one of the same predictors. So both are predicted alike, and what differs is due to
    their labels.

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
    for _ in range(_NEWTON_STEPS):
        p = softmax(value[0] * scores + value[1:])
        mean = (p * scores).sum(1)
        residual = weights[:, None] * (missing - p)
        gradient = np.append((residual * scores).sum(), residual.sum(0)) - penalty * value
        curvature = np.diag(penalty + 1e-9)
        curvature[0, 0] += (weights * ((p * scores**2).sum(1) - mean**2)).sum()
        curvature[0, 1:] = curvature[1:, 0] = (weights[:, None] * p * (scores - mean[:, None])).sum(0)
        curvature[1:, 1:] += np.diag(weights @ p) - (p * weights[:, None]).T @ p
        step = np.linalg.solve(curvature, gradient)
        while (after := _likelihood(value + step, scores, labels, weights)) < best and np.abs(
            step
        ).max() > _SMALLEST_STEP:
            step = step / 2
        value, best = value + step, after
        if np.abs(step).max() < _SMALLEST_STEP:
            break
    return float(value[0]), value[1:]


def _likelihood(value: Array, scores: Array, labels: Array, weights: Array) -> float:
    z = value[0] * scores + value[1:]
    largest = z.max(axis=1)
    of_label = z[np.arange(len(labels)), labels] - largest - np.log(np.exp(z - largest[:, None]).sum(axis=1))
    return float((weights * of_label).sum() - (value[1:] ** 2).sum() / 2)
