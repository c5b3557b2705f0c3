"""Cross-fitted residuals: what cross_fit.py is for classes, for labels that are real numbers.

In every fold a regression on the trusted examples of the others judges the source. With its residual r and the median
size s of held-out trusted residuals, a label counts 1/(1 + (r/3s)²), the weight of a Cauchy distribution. A second
regression, on the labels of the other folds so weighted and the trusted examples, judges the fold: the smaller its
residual, the more probably a label is right. Trusted examples are judged in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from soseleto.errors import UsageError, need
from soseleto.suspects.cross_fit import FOLDS, TRUSTED_WEIGHT, Array, Judgement, design_effect, fitted, folds_of_both

FEWEST = 2 * FOLDS  # trusted values
FAR = 3.0  # times the median residual
ALPHAS = 10.0 ** np.arange(-2, 6)  # penalties of the ridge regression, chosen by cross-validation


@dataclass(frozen=True, eq=False, kw_only=True)
class Residuals(Judgement):
    """What regressions say that have not seen the label.

    weights: (n,) of the labels in the final model; predicted: (n,), and of trusted examples trusted_predicted: (m,)
    rivals: (m,) predictions of trusted examples by training on all labels alike, and on none
    """

    weights: Array
    predicted: Array
    trusted_predicted: Array
    rivals: Mapping[str, Array]
    model: Any


def cross_fit_values(
    features: Array,
    values: Array,
    trusted_features: Array,
    trusted_values: Array,
    *,
    learner: Any = None,
    seed: int = 0,
    groups: tuple[Array, Array] | None = None,
) -> Residuals:
    """Residuals of source and trusted values, by any scikit-learn regressor that takes sample weights.

    groups: as in ``cross_fit``
    """
    if (count := len(np.unique(trusted_values if groups is None else groups[1]))) < FEWEST:
        what = "different values" if groups is None else "examples that are no copies"
        raise UsageError(f"the target has {count} {what}, and at least {FEWEST} are needed: give more of them.")
    learner = ridge() if learner is None else learner
    alike, trusted_alike = np.zeros(len(values), dtype=int), np.zeros(len(trusted_values), dtype=int)  # of one class
    folds, of_trusted = folds_of_both(alike, trusted_alike, groups, seed)
    predicted = np.zeros(len(values))
    of_held_out = {name: np.zeros(len(trusted_values)) for name in ("weighted", "mixed", "target_only")}

    def trained(rows: Array, others: Array, weights: Array) -> Any:
        x = np.concatenate([features[rows], trusted_features[others]])
        y = np.concatenate([values[rows], trusted_values[others]])
        return fitted(learner, x, y, np.concatenate([weights, np.full(len(others), TRUSTED_WEIGHT)]))

    nothing = np.zeros(0, dtype=int)
    for fold in range(FOLDS):
        rows, others, held_out = (np.flatnonzero(at) for at in (folds != fold, of_trusted != fold, of_trusted == fold))
        first = trained(nothing, others, np.zeros(0))
        size = np.median(np.abs(first.predict(trusted_features[held_out]) - trusted_values[held_out]))
        weights = _weights(first.predict(features[rows]) - values[rows], size)
        weighted, mixed = trained(rows, others, weights), trained(rows, others, np.ones(len(rows)))
        predicted[folds == fold] = weighted.predict(features[folds == fold])
        for name, model in (("weighted", weighted), ("mixed", mixed), ("target_only", first)):
            of_held_out[name][held_out] = model.predict(trusted_features[held_out])
    known = of_held_out.pop("weighted")
    residual, of_right = np.abs(predicted - values), np.abs(known - trusted_values)
    weights = _weights(residual, np.median(of_right))
    return Residuals(
        right=-residual,
        of_trusted=-of_right,
        labels=values,
        trusted_labels=trusted_values,
        trusted_count=len(known) / design_effect(of_right, groups and groups[1]),
        weights=weights,
        predicted=predicted,
        trusted_predicted=known,
        rivals=of_held_out,
        model=trained(np.arange(len(values)), np.arange(len(trusted_values)), weights),
    )


def _weights(residual: Array, size: float) -> Array:
    return np.asarray(1 / (1 + (residual / max(FAR * size, 1e-12)) ** 2))


def ridge() -> Any:
    need("sklearn", to="soseleto scan")
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), RidgeCV(ALPHAS))
