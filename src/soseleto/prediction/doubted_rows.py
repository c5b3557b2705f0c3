"""How probably each label of a table is right, by models that have not seen its row.

A model that is trained on the labels as they are predicts p_c = (1 − ρ)·q_c + ρ/(C − 1)·(1 − q_c) for C classes with
probabilities q, if a share ρ of the labels was replaced by any other class. Under which ρ the trusted labels are
likeliest is tried out; then a label y is right with probability

    (1 − ρ)·q_y / ((1 − ρ)·q_y + ρ/(C − 1)·(1 − q_y)).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from soseleto.errors import need

FOLDS = 5
FEWEST = 13  # rows of a class: a model's own validation, a tenth of four fifths of all rows, needs one of every class
STEP = 0.02  # between the shares of wrong labels that are tried
_SMALLEST = 1e-3  # probability


def right_labels(estimator: Any, inputs: np.ndarray, labels: np.ndarray, trusted: np.ndarray, seed: int) -> np.ndarray:
    """(N,) the probability that each label is right; 1 for those that are trusted, or of a class with few rows.

    estimator: a scikit-learn classifier; copies of it are trained on four fifths of the rows
    trusted: (N,) which labels are known to be right
    """
    selection = need("sklearn.model_selection", to="a final model")
    result, counts = np.ones(len(labels)), np.bincount(labels)
    common = counts[labels] >= FEWEST
    classes, places = np.unique(labels[common], return_inverse=True)
    if len(classes) < 2 or not trusted[common].any():
        return result
    folds = selection.StratifiedKFold(FOLDS, shuffle=True, random_state=seed)
    found = selection.cross_val_predict(estimator, inputs[common], places, cv=folds, method="predict_proba")
    of_label, trusted = found[np.arange(len(places)), places], trusted[common]
    share = max(_shares(len(classes)), key=lambda rho: np.log(_true(of_label[trusted], rho, len(classes))).sum())
    right = (1.0 - share) * _true(of_label, share, len(classes))
    wrong = share / (len(classes) - 1) * (1.0 - _true(of_label, share, len(classes)))
    result[common] = np.where(trusted, 1.0, right / (right + wrong))
    return result


def _shares(classes: int) -> np.ndarray:
    """From none to nearly as many as say nothing."""
    return np.arange(0.0, 0.95 * (classes - 1) / classes, STEP)


def _true(of_label: np.ndarray, share: float, classes: int) -> np.ndarray:
    """The probability of a label as a class, from that of its being given."""
    other = share / (classes - 1)
    found: np.ndarray = np.clip((of_label - other) / (1.0 - share - other), _SMALLEST, 1.0 - _SMALLEST)
    return found
