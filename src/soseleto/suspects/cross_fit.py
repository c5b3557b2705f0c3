"""Cross-fitted beliefs: the probability that a source label is right, judged by classifiers that have not seen it.

1. A classifier that is trained on the trusted examples alone judges the source: Q[i, k] = p(class k | xᵢ).
2. The confusion T[k, y] = Σᵢ Q[i, k]·[yᵢ = y], smoothed, rows summing to one: how often class k is labelled y.
3. The belief in a label is its posterior, Bᵢ = Q[i, yᵢ]·T[yᵢ, yᵢ] / Σ_k Q[i, k]·T[k, yᵢ].
4. Classifiers are trained on the trusted examples and on labels weighted by B, all outside one fold, and judge it.
   Before that, B is judged once more, each half of those labels by classifiers of the other half. So neither the
   answers nor the weights behind them have seen a label of the fold: otherwise trusted labels would look more certain
   than right labels of the source, and false alarms would be undercounted.
5. The answers of three trainings, on the trusted examples alone, on all labels alike and by belief, are multiplied:
   Q ∝ Πⱼ Qⱼ^aⱼ with the exponents aⱼ ≥ 0 that make held-out trusted labels most likely. So the joined answer is
   calibrated, and the trusted examples say how much each training is worth. Its T and B are the result.

T counts as confusion what Q leaves open even where all labels are right. This ranks well, but doubts too many labels of
a weak classifier; as a probability, B has the T that makes the labels most likely, by a few steps of EM.

Trusted examples are cut into folds as well and judged like the source's, each by classifiers that were trained without
it. Their labels are right, so they show how right labels look (rates.py).

NumPy and scikit-learn; nothing here knows where features come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from soseleto.errors import UsageError, need
from soseleto.models.trunk_and_heads import probabilities_of

FOLDS = 5
ROUNDS = 2  # in which labels are judged by classifiers that were trained on labels by belief
TRUSTED_WEIGHT = 3.0  # of a trusted example in cross-fitting, where one of the source has at most 1
PENALTY = 0.1  # C of the logistic regression, for features on one scale
SHARPNESS = 2.0  # power of the beliefs as weights of the final model: mistakes that are half believed do harm
STEPS = 5  # of expectation maximisation
FLOOR = 1e-3  # of a probability, before its logarithm
SHRINKAGE = 0.02  # of the exponents towards their plain mean: matters with few trusted examples only
Array = np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class Judgement:
    """How n source labels and m trusted ones look, both judged in the same way.

    right: (n,) the score that ranks: the lower, the more probably the label is wrong
    of_trusted: (m,) the same of trusted examples
    belief: (n,) the probability that the label is right; None where the score is no probability
    probabilities: (n, classes) and, of trusted examples, (m, classes); None where labels are numbers
    before: (m,) labels of the trusted examples from before they were checked, -1 where unknown
    trusted_count: of independent trusted examples, where some are copies, which count as one
    """

    right: Array
    of_trusted: Array
    labels: Array
    trusted_labels: Array
    probabilities: Array | None = None
    trusted_probabilities: Array | None = None
    belief: Array | None = None
    before: Array | None = None
    trusted_count: float | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Beliefs(Judgement):
    """What cross-fitting says: every example is judged by classifiers that have not seen it.

    signals: ``right`` by the single answers, by name, (n,) each
    rivals: held-out probabilities (m, classes) of trusted examples by training on all labels alike, and on none
    model: the classifier trained on all labels, weighted by belief, and the trusted ones
    """

    signals: Mapping[str, Array]
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
    before: Array | None = None,
) -> Beliefs:
    """Beliefs in the labels of a source, by ``learner``, any scikit-learn classifier that takes sample weights.

    groups: (n,) and (m,) numbers; source and trusted examples with one number, such as copies, are in one fold
    before: (m,) labels of the trusted examples from before they were checked, -1 where unknown
    """
    learner = logistic_regression() if learner is None else learner
    folds, of_trusted = folds_of_both(labels, trusted_labels, groups, seed)
    known = np.isin(labels, trusted_labels)  # a label of any other class cannot be judged by trusted examples
    n, m = len(labels), len(trusted_labels)

    def models_without(fold: int) -> list[Any]:
        """Classifiers trained without a fold: on trusted examples alone, on all labels alike, and by belief."""
        rows, others = np.flatnonzero(folds != fold), np.flatnonzero(of_trusted != fold)

        def trained(at: Array, weights: Array) -> Any:
            return fitted(
                learner,
                np.concatenate([features[at], trusted_features[others]]),
                np.concatenate([labels[at], trusted_labels[others]]),
                np.concatenate([weights, np.full(len(others), TRUSTED_WEIGHT)]),
            )

        alone = trained(rows[:0], np.zeros(0))
        doubted = probabilities_of(alone, features[rows], classes)
        belief = believed(doubted, doubted[:0], labels[rows], labels[:0], known[rows])[0]
        half = (folds[rows] - fold) % FOLDS > FOLDS // 2
        for judged in (half, ~half):
            model = trained(rows[~judged], belief[~judged])
            doubted[judged] = probabilities_of(model, features[rows[judged]], classes)
        belief = believed(doubted, doubted[:0], labels[rows], labels[:0])[0]
        return [alone, trained(rows, np.ones(len(rows))), trained(rows, belief)]

    answers = [(np.zeros((n, classes)), np.zeros((m, classes))) for _ in range(3)]
    for fold in range(FOLDS):
        for model, sides in zip(models_without(fold), answers, strict=True):
            for kept, of, at in zip(
                sides, (features, trusted_features), (folds == fold, of_trusted == fold), strict=True
            ):
                if at.any():
                    kept[at] = probabilities_of(model, of[at], classes)
    alone, mixed, by_belief = answers
    single = {
        "trusted": believed(*alone, labels, trusted_labels, known)[0],
        "mixed": believed(*mixed, labels, trusted_labels)[0],
        "beliefs": believed(*by_belief, labels, trusted_labels)[0],
    }
    target_only = alone[1].copy()
    unseen = np.setdiff1d(np.arange(classes), trusted_labels)
    for answer, of_all in zip(alone, mixed, strict=True):
        answer[:, unseen] = of_all[:, unseen]  # of these classes the trusted examples know nothing
    exponents = exponents_of([its for _, its in answers], trusted_labels)
    probabilities, of_known = (product(side, exponents) for side in zip(*answers, strict=True))
    right, of_trusted = believed(probabilities, of_known, labels, trusted_labels)
    belief, _ = believed(probabilities, of_known, labels, trusted_labels, steps=STEPS)
    model = fitted(
        learner,
        np.concatenate([features, trusted_features]),
        np.concatenate([labels, trusted_labels]),
        np.concatenate([belief**SHARPNESS, np.ones(m)]),
    )
    return Beliefs(
        right=right,
        of_trusted=of_trusted,
        signals=single,
        belief=belief,
        probabilities=probabilities,
        trusted_probabilities=of_known,
        labels=labels,
        trusted_labels=trusted_labels,
        before=before,
        trusted_count=m / design_effect(of_known.argmax(axis=1) == trusted_labels, groups and groups[1]),
        rivals={"mixed": mixed[1], "target_only": target_only},
        model=model,
    )


def exponents_of(answers: Sequence[Array], labels: Array) -> Array:
    """(J,) the exponents of a product of probabilities (m, classes) that make the labels most likely."""
    from scipy.optimize import minimize

    logs = np.log(np.maximum(answers, FLOOR))
    own = logs[:, np.arange(len(labels)), labels]
    start = np.full(len(answers), 1.0 / len(answers))

    def loss(exponents: Array) -> tuple[float, Array]:
        shift = exponents - start
        p = product(answers, exponents)
        value = -np.mean(np.log(np.maximum(p[np.arange(len(labels)), labels], 1e-12)))
        slope = (p * logs).sum(axis=2).mean(axis=1) - own.mean(axis=1)
        return float(value + SHRINKAGE / 2 * shift @ shift), slope + SHRINKAGE * shift

    return np.asarray(minimize(loss, start, jac=True, bounds=[(0.0, None)] * len(start)).x)


def product(answers: Sequence[Array], exponents: Array) -> Array:
    """(n, classes) the normalised product of powers of probabilities."""
    scores = np.tensordot(exponents, np.log(np.maximum(answers, FLOOR)), 1)
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def believed(
    q: Array, of_trusted: Array, labels: Array, trusted_labels: Array, known: Array | None = None, steps: int = 0
) -> tuple[Array, Array]:
    """The beliefs in the labels of source and trusted examples; of labels not known, the mean of the others.

    steps: of EM, after which the confusion makes the labels more likely
    """
    classes = q.shape[1]
    known = np.ones(len(labels), dtype=bool) if known is None else known
    chosen = np.eye(classes)[labels[known]]

    def confusion_by(answer: Array) -> Array:
        counts = answer.T @ chosen + 1.0 / classes
        return np.asarray(counts / counts.sum(axis=1, keepdims=True))

    def posterior(p: Array, given: Array) -> Array:
        joint = p * confusion[:, given].T
        return np.asarray(joint / np.maximum(joint.sum(axis=1, keepdims=True), 1e-300))

    confusion = confusion_by(q[known])
    for _ in range(steps):
        confusion = confusion_by(posterior(q[known], labels[known]))
    belief = posterior(q, labels)[np.arange(len(labels)), labels]
    belief[~known] = belief[known].mean() if known.any() else 0.5
    return belief, posterior(of_trusted, trusted_labels)[np.arange(len(trusted_labels)), trusted_labels]


def folds_of_both(
    labels: Array, trusted_labels: Array, groups: tuple[Array, Array] | None, seed: int
) -> tuple[Array, Array]:
    """The folds of source and trusted examples; those of one group are in one fold, on whichever side they are."""
    draw = np.random.default_rng(seed)
    if groups is None:
        return fold_of(labels, draw), fold_of(trusted_labels, draw)
    folds, of_trusted = fold_of(labels, draw, groups[0]), fold_of(trusted_labels, draw, groups[1])
    numbers, first = np.unique(groups[1], return_index=True)
    shared = np.isin(groups[0], numbers)
    folds[shared] = of_trusted[first[np.searchsorted(numbers, groups[0][shared])]]
    return folds, of_trusted


def fold_of(labels: Array, draw: np.random.Generator, groups: Array | None = None, folds: int = FOLDS) -> Array:
    """The fold of each example: every class spread as evenly as possible, at random; a group goes with its first."""
    if groups is not None:
        _, first, group = np.unique(groups, return_index=True, return_inverse=True)
        return fold_of(labels[first], draw, folds=folds)[group]
    shuffled = draw.permutation(len(labels))
    order = shuffled[np.argsort(labels[shuffled], kind="stable")]
    fold = np.empty(len(labels), dtype=int)
    fold[order] = np.arange(len(labels)) % folds
    return fold


def design_effect(values: Array, groups: Array | None) -> float:
    """By how much groups make the variance of a mean larger: Σ_g (Σ_{i∈g} dᵢ)² / Σᵢ dᵢ², with dᵢ = valueᵢ − mean.

    Copies have equal values: a group of four counts as one. Where all values are equal, all groups are taken for such.
    """
    if groups is None or len(np.unique(groups)) == len(groups):
        return 1.0
    apart = values - values.mean()
    at = np.unique(groups, return_inverse=True)[1]
    total = float(apart @ apart)
    if total == 0.0:
        return float((np.bincount(at) ** 2).sum() / len(at))
    return max(1.0, float((np.bincount(at, apart) ** 2).sum()) / total)


# Classifiers


def logistic_regression() -> Any:
    need("sklearn", to="soseleto scan")
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(C=PENALTY, tol=1e-3, max_iter=200))


def fitted(learner: Any, features: Array, labels: Array, weights: Array) -> Any:
    """A clone of the learner, trained; a pipeline hands the weights to its last step."""
    from sklearn import config_context
    from sklearn.base import clone, is_classifier
    from sklearn.dummy import DummyClassifier
    from sklearn.pipeline import Pipeline
    from sklearn.utils.validation import has_fit_parameter

    if len(np.unique(labels)) < 2 and is_classifier(learner):  # groups leave one class
        return DummyClassifier(strategy="prior").fit(features, labels)
    model = clone(learner)
    last, prefix = (model.steps[-1][1], f"{model.steps[-1][0]}__") if isinstance(model, Pipeline) else (model, "")
    if not has_fit_parameter(last, "sample_weight"):
        raise UsageError(
            f"the learner {type(last).__name__} takes no sample weights, and a doubted label must count less: give one "
            "whose fit has sample_weight, such as LogisticRegression() or HistGradientBoostingClassifier()."
        )
    with config_context(enable_metadata_routing=False):  # by which a pipeline would refuse the name with a prefix
        return model.fit(features, labels, **{f"{prefix}sample_weight": weights})
