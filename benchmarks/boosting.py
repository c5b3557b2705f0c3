"""Boosted models for the table of ``tables.py``, trained on source and target together with sample weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from soseleto.data import Examples
from soseleto.errors import UsageError, need

Weighting = Literal["mean", "each"]
MEMBERS, JUDGES = 5, 2
_SMALLEST = 1e-7  # probability, before its logarithm
FOLDS = 5
FEWEST = 13  # rows of a class: a model's own validation, a tenth of four fifths of all rows, needs one of every class
STEP = 0.02  # between the shares of wrong labels that are tried
_SMALLEST_TRUE = 1e-3  # probability


@dataclass(frozen=True, eq=False)
class FinalData:
    """What a final model is trained on: rows, class indices and sample weights of source and target together."""

    inputs: Tensor  # (N, D) float32, or float64 as the source has them
    labels: Tensor  # (N,) int64
    weights: Tensor  # (N,) float32

    @classmethod
    def of(cls, source: Examples, target: Examples, weights: Tensor | None, how: Weighting = "mean") -> FinalData:
        """Target rows have weight 1, source rows by ``how``.

        weights: (n_source,) learned weights; None for 1, which is ordinary training on both
        how: "mean" gives every source row the mean of all weights, so that the target counts more the more of the
            source is doubtful; "each" gives it its own weight. A model trained with each row's own weight repeats the
            network's mistakes, since rows that contradict the network weigh little (``results/tables.json``).
        """
        if source.inputs.ndim != 2:
            raise UsageError(
                f"a final model takes rows of numbers, got inputs of shape {tuple(source.inputs.shape[1:])}: leave it "
                "out."
            )
        own = torch.ones(len(source)) if weights is None else weights.cpu().float()
        if how == "mean":
            own = own.mean().expand(len(own))
        return cls(
            torch.cat([source.inputs, target.inputs]).cpu().float(),
            torch.cat([source.labels, target.labels]).cpu(),
            torch.cat([own, torch.ones(len(target))]).float(),
        )

    def doubted(self, estimator: Any, n_source: int, seed: int) -> FinalData:
        """The same with each of the first ``n_source`` weights times the probability that its label is right.

        estimator: a classifier by whose predictions for rows that it has not seen labels are judged
        """
        trusted = np.arange(len(self.labels)) >= n_source
        right = right_labels(estimator, self.inputs.numpy(), self.labels.numpy(), trusted, seed)
        return replace(self, weights=self.weights * torch.from_numpy(right).float())

    def tensors(self) -> dict[str, Tensor]:
        return {"inputs": self.inputs, "labels": self.labels, "weights": self.weights}


def gradient_boosting(codes: Sequence[int] = (), seed: int = 0) -> Any:
    """scikit-learn's gradient boosting as it is, which is what tables are usually trained with.

    codes: the columns that hold codes of categories
    """
    ensemble = need("sklearn.ensemble", to="gradient boosting")
    return ensemble.HistGradientBoostingClassifier(categorical_features=list(codes) or None, random_state=seed)


def boosting(codes: Sequence[int] = (), seed: int = 0, members: int | None = None) -> Any:
    """The mean of five boosted models with small trees and half of the columns per split.

    Wrong labels make single boosted models differ a lot; their mean loses that variance.
    """
    ensemble = need("sklearn.ensemble", to="gradient boosting")
    members_by_name = [
        (
            str(number),
            ensemble.HistGradientBoostingClassifier(
                categorical_features=list(codes) or None,
                learning_rate=0.05,
                max_iter=400,
                max_leaf_nodes=12,
                max_features=0.5,
                early_stopping=True,
                random_state=seed + number,
            ),
        )
        for number in range(members or MEMBERS)
    ]
    return ensemble.VotingClassifier(members_by_name, voting="soft")


def fit_final(estimator: Any, data: FinalData) -> Final:
    """Fit a scikit-learn model that takes ``sample_weight``; rows of weight 0 are left out."""
    keep = (data.weights > 0).numpy()
    labels = data.labels.numpy()[keep]
    if not _can_hold_out(labels):
        stops = [name for name in estimator.get_params() if name.split("__")[-1] == "early_stopping"]
        estimator.set_params(**dict.fromkeys(stops, False))
    try:
        estimator.fit(data.inputs.numpy()[keep], labels, sample_weight=data.weights.numpy()[keep])
    except TypeError as error:
        raise UsageError(
            f"the final model {type(estimator).__name__} cannot be fitted with sample_weight ({error}): choose one "
            "that takes it."
        ) from error
    return Final(estimator, int(data.labels.max()) + 1)


def _can_hold_out(labels: np.ndarray) -> bool:
    """Whether scikit-learn can hold out a stratified tenth of the rows, by which boosting stops early."""
    _, counts = np.unique(labels, return_counts=True)
    return bool(counts.min() >= 2 and len(labels) >= 10 * len(counts))


@dataclass(frozen=True, eq=False)
class Final:
    """A fitted final model."""

    estimator: Any
    classes: int

    def outputs(self, inputs: Tensor | np.ndarray) -> Tensor:
        """log p of every class, (N, classes): the outputs of a classifier."""
        rows = inputs.cpu().numpy() if isinstance(inputs, Tensor) else np.asarray(inputs)
        known = torch.from_numpy(np.asarray(self.estimator.predict_proba(rows), dtype=np.float32))
        p = torch.zeros(len(rows), self.classes)
        p[:, torch.from_numpy(np.asarray(self.estimator.classes_, dtype=np.int64))] = known
        return p.clamp(min=_SMALLEST).log()


def right_labels(estimator: Any, inputs: np.ndarray, labels: np.ndarray, trusted: np.ndarray, seed: int) -> np.ndarray:
    """(N,) the probability that each label is right; 1 for those that are trusted, or of a class with few rows.

    A model trained on the labels as they are predicts p_c = (1 − ρ)·q_c + ρ/(C − 1)·(1 − q_c) for C classes with
    probabilities q, if a share ρ of the labels was replaced by any other class. The ρ under which the trusted labels
    are likeliest is searched; then a label y is right with probability

        (1 − ρ)·q_y / ((1 − ρ)·q_y + ρ/(C − 1)·(1 − q_y)).

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
    predicted = selection.cross_val_predict(estimator, inputs[common], places, cv=folds, method="predict_proba")
    of_label, trusted = predicted[np.arange(len(places)), places], trusted[common]
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
    return np.asarray(np.clip((of_label - other) / (1.0 - share - other), _SMALLEST_TRUE, 1.0 - _SMALLEST_TRUE))
