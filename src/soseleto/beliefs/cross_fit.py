"""Cross-fitted beliefs: the probability that a source label is right, judged by classifiers that have not seen it.

1. A classifier that is trained on the trusted examples alone judges the source: Q[i, k] = p(class k | xᵢ).
2. The confusion T[k, y] = Σᵢ Q[i, k]·[yᵢ = y], smoothed, rows summing to one: how often class k is labelled y.
3. The belief in a label is its posterior, Bᵢ = Q[i, yᵢ]·T[yᵢ, yᵢ] / Σ_k Q[i, k]·T[k, yᵢ].
4. In every round classifiers are trained on the labels of all folds but one, weighted by B, and the trusted examples;
   each judges the fold that it has not seen, which gives a new Q, T and B.

Trusted examples are cut into folds as well and judged like the source's, each by classifiers that were trained without
it. Their labels are right, so they show how right labels look (rates.py).

NumPy and scikit-learn; nothing here knows where features come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from soseleto.errors import UsageError, need
from soseleto.models.learned import probabilities_of

FOLDS, ROUNDS = 5, 2
TRUSTED_WEIGHT = 3.0  # of a trusted example, where one of the source has at most 1
Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Beliefs:
    """What cross-fitting says of n source and m trusted examples.

    right: (n,) the joined score, which ranks: the lower, the more probably the label is wrong
    of_trusted: (m,) the same of trusted examples, judged by classifiers that have not seen them
    signals: the scores that are joined, by name, (n,) each
    belief: (n,) the probability that the label is right
    probabilities: (n, classes) and, of trusted examples, (m, classes)
    rivals: held-out probabilities (m, classes) of trusted examples by training on all labels alike, and on none
    model: the classifier trained on all labels, weighted by belief, and the trusted ones
    """

    right: Array
    of_trusted: Array
    signals: Mapping[str, Array]
    belief: Array
    probabilities: Array
    trusted_probabilities: Array
    labels: Array
    trusted_labels: Array
    rivals: Mapping[str, Array]
    model: Any


def cross_fit(
    features: Array,
    labels: Array,
    trusted_features: Array,
    trusted_labels: Array,
    *,
    classes: int,
    learner: Any = None,
    seed: int = 0,
    groups: tuple[Array, Array] | None = None,
) -> Beliefs:
    """Beliefs in the labels of a source, by ``learner``, any scikit-learn classifier that takes sample weights.

    groups: (n,) and (m,) numbers; source and trusted examples with one number, such as copies, are in one fold
    """
    learner = logistic_regression() if learner is None else learner
    draw = np.random.default_rng(seed)
    if groups is None:
        folds, of_trusted = fold_of(labels, draw), fold_of(trusted_labels, draw)
    else:
        folds, of_trusted = fold_of(labels, draw, groups[0]), fold_of(trusted_labels, draw, groups[1])
        numbers, first = np.unique(groups[1], return_index=True)
        shared = np.isin(groups[0], numbers)
        folds[shared] = of_trusted[first[np.searchsorted(numbers, groups[0][shared])]]
    known = np.isin(labels, trusted_labels)  # a label of any other class cannot be judged by trusted examples
    n, m = len(labels), len(trusted_labels)

    def judged(weights: Array | None) -> tuple[Array, Array]:
        """Q of source and trusted examples, each by a classifier that was trained on the other folds."""
        found, of_known = np.zeros((n, classes)), np.zeros((m, classes))
        for fold in range(FOLDS):
            rows = np.flatnonzero(folds != fold) if weights is not None else np.zeros(0, dtype=int)
            others = np.flatnonzero(of_trusted != fold)
            model = fitted(
                learner,
                np.concatenate([features[rows], trusted_features[others]]),
                np.concatenate([labels[rows], trusted_labels[others]]),
                np.concatenate(
                    [np.zeros(0) if weights is None else weights[rows], np.full(len(others), TRUSTED_WEIGHT)]
                ),
            )
            for kept, of, at in ((found, features, folds == fold), (of_known, trusted_features, of_trusted == fold)):
                if at.any():
                    kept[at] = probabilities_of(model, of[at], classes)
        return found, of_known

    alone, known_alone = judged(None)
    first, known_first = believed(alone, known_alone, labels, trusted_labels, known)
    belief, of_known, found, probabilities = first, known_first, alone, known_alone
    for _ in range(ROUNDS):
        found, probabilities = judged(belief)
        belief, of_known = believed(found, probabilities, labels, trusted_labels, np.ones(n, dtype=bool))
    parts = ((first, known_first), (belief, of_known))
    everything = np.concatenate([features, trusted_features])
    model = fitted(
        learner,
        everything,
        np.concatenate([labels, trusted_labels]),
        np.concatenate([belief, np.full(m, TRUSTED_WEIGHT)]),
    )
    return Beliefs(
        right=np.mean([rank_in(of, of) for of, _ in parts], axis=0),
        of_trusted=np.mean([rank_in(of, its) for of, its in parts], axis=0),
        signals={"trusted": first, "beliefs": belief},
        belief=belief,
        probabilities=found,
        trusted_probabilities=probabilities,
        labels=labels,
        trusted_labels=trusted_labels,
        rivals={"mixed": judged(np.ones(n))[1], "target_only": known_alone},
        model=model,
    )


def believed(q: Array, of_trusted: Array, labels: Array, trusted_labels: Array, known: Array) -> tuple[Array, Array]:
    """The beliefs in the labels of source and trusted examples; of labels not known, the mean of the others."""
    classes = q.shape[1]
    confusion = np.full((classes, classes), 1.0 / classes)
    np.add.at(confusion.T, labels[known], q[known])
    confusion /= confusion.sum(axis=1, keepdims=True)

    def posterior(p: Array, given: Array) -> Array:
        joint = p * confusion[:, given].T
        return joint[np.arange(len(given)), given] / np.maximum(joint.sum(axis=1), 1e-300)

    belief = posterior(q, labels)
    belief[~known] = belief[known].mean() if known.any() else 0.5
    return belief, posterior(of_trusted, trusted_labels)


def rank_in(source: Array, values: Array) -> Array:
    """The share of the source that lies below each value; equal ones count half."""
    ordered = np.sort(source)
    below, upto = (np.searchsorted(ordered, values, side) for side in ("left", "right"))
    return (below + upto) / (2 * len(source))


def fold_of(labels: Array, draw: np.random.Generator, groups: Array | None = None) -> Array:
    """The fold of each example: every class spread as evenly as possible, at random; a group goes with its first."""
    if groups is not None:
        _, first, group = np.unique(groups, return_index=True, return_inverse=True)
        return fold_of(labels[first], draw)[group]
    shuffled = draw.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    folds = np.empty(len(labels), dtype=int)
    folds[order] = np.arange(len(labels)) % FOLDS
    return folds


# Classifiers


def logistic_regression() -> Any:
    need("sklearn", to="soseleto scan")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=200))


def fitted(learner: Any, features: Array, labels: Array, weights: Array) -> Any:
    """A clone of the learner, trained; a pipeline hands the weights to its last step."""
    from sklearn.base import clone
    from sklearn.pipeline import Pipeline
    from sklearn.utils.validation import has_fit_parameter

    model = clone(learner)
    last, prefix = (model.steps[-1][1], f"{model.steps[-1][0]}__") if isinstance(model, Pipeline) else (model, "")
    if not has_fit_parameter(last, "sample_weight"):
        raise UsageError(
            f"the learner {type(last).__name__} takes no sample weights, and a doubted label must count less: give one "
            "whose fit has sample_weight, such as LogisticRegression() or HistGradientBoostingClassifier()."
        )
    return model.fit(features, labels, **{f"{prefix}sample_weight": weights})
