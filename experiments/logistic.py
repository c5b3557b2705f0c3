"""Logistic regression on a frozen network's features: a rival, and an oracle where it gets the right labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experiments import cleanlab, measures
from experiments.experiment import Sides
from experiments.results import Row
from soseleto.data import Examples
from soseleto.errors import need

NAME = "logistic"  # the base of its lines
ORACLE_FOLDS = 5


def run(data: Sides, settings: dict[str, Any], seed: int) -> Row:
    """Accuracy on the test side, whose inputs are features, as those of all sides.

    settings: ``mixed`` trains on the target too, ``right`` on the right label of every example that has a known one
    """
    if settings.get("right"):
        return _on_right_labels(data, seed)
    return _accuracy([data.source, data.target] if settings.get("mixed") else [data.source], data)


def _accuracy(sides: Sequence[Examples], data: Sides) -> Row:
    evaluated = data.test if data.heldout is None else data.heldout
    right = _regression(sides).predict(evaluated.inputs.numpy()) == evaluated.labels.numpy()
    return {"accuracy" if data.heldout is None else "heldout_accuracy": 100.0 * float(right.mean())}


def _on_right_labels(data: Sides, seed: int) -> Row:
    """The given labels are ranked by probabilities that come from the right labels of other examples."""
    known = data.truth != measures.UNKNOWN
    truth, given = data.truth[known], data.source.labels[known]
    checked = replace(data.source.subset(known), labels=truth)

    def predict(training: Examples, inputs: Tensor, fold: int) -> Tensor:
        return torch.from_numpy(_regression([training, data.target]).predict_proba(inputs.numpy()))

    by_fold = cleanlab.out_of_sample(checked, ORACLE_FOLDS, seed, predict)
    trust = {"right labels": by_fold.gather(1, given[:, None]).squeeze(1)}
    return {**_accuracy([checked, data.target], data), **measures.detection(given, truth, trust)}


def _regression(sides: Sequence[Examples]) -> Any:
    """scikit-learn's, with its default penalty."""
    regression = need("sklearn.linear_model", to="logistic regression").LogisticRegression(max_iter=1000)
    inputs, labels = (torch.cat([getattr(side, name) for side in sides]).numpy() for name in ("inputs", "labels"))
    return regression.fit(inputs, labels)
