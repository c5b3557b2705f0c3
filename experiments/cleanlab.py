"""The baseline for label-error detection: cleanlab, which ranks labels by out-of-sample probabilities.

The probabilities come from k-fold cross-validation of the same network, with as many steps in total as the other
methods take: each fold trains for epochs/(k − 1) epochs on its share (k − 1)/k of the source. The clean images are
mixed in, as in the table's line "noisy and clean mixed"; without them the baseline would be weaker.

The rankings are computed here, so that the experiment runs without cleanlab installed; a test compares them with the
package's own. Each is a trust: the higher, the more probably the label is right (Northcutt et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from experiments import measures
from experiments.results import Row
from soseleto.data import Examples, generator, seed_for
from soseleto.training.result import Result

Array = np.ndarray


Train = Callable[[Any, Any], Result]  # from a configuration and its sides


def probabilities(train: Train, config: Any, sides: Any, name: str) -> Tensor:
    """Out-of-sample probabilities from trainings that together take as many steps as one on the whole source."""

    def predict(training: Examples, inputs: Tensor, fold: int) -> Tensor:
        seed = seed_for(config.seed, f"{name}/fold", fold)
        of_fold = replace(config, epochs=fold_epochs(config.epochs, config.folds), seed=seed)
        return train(of_fold, replace(sides, source=training)).outputs(inputs).softmax(1)

    return out_of_sample(sides.source, config.folds, config.seed, predict)


def cleaned(train: Train, config: Any, sides: Any, name: str) -> tuple[Result, Row]:
    """A training on the examples without issues, and how good rankings and issues are."""
    by_fold, labels = probabilities(train, config, sides, name), sides.source.labels
    listed = flagged(by_fold, labels)
    row = {
        "issues": measures.issues(listed, labels, sides.truth),
        **measures.detection(labels, sides.truth, trusts(by_fold, labels)),
    }
    return train(config, replace(sides, source=sides.source.subset(~listed))), row


def fold_epochs(epochs: int, folds: int) -> int:
    """Epochs of each fold's training, for a total of ``epochs`` passes over the whole source; folds: at least 2."""
    return max(1, round(epochs / (folds - 1)))


def out_of_sample(
    source: Examples, folds: int, seed: int, predict: Callable[[Examples, Tensor, int], Tensor]
) -> Tensor:
    """Probabilities (n, classes), each example's from a model that was not trained on it.

    ``predict(training, inputs, fold)`` trains on ``training`` and returns the probabilities of ``inputs``.
    """
    order = torch.randperm(len(source), generator=generator(seed, "cleanlab/folds"))
    pieces = order.tensor_split(folds)
    found = []
    for number, held in enumerate(pieces):
        others = torch.cat([piece for other, piece in enumerate(pieces) if other != number])
        found.append(predict(source.subset(others.sort().values), source.inputs[held], number))
    return torch.cat(found)[torch.argsort(order)]


def trusts(probabilities: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """cleanlab's rankings by name, (n,) each."""
    p, y = probabilities.double().numpy(), labels.cpu().numpy()
    found = {
        "cleanlab_self_confidence": _own(p, y),
        "cleanlab_margin": normalized_margin(p, y),
        "cleanlab_confident": normalized_margin(adjusted(p, y), y),
    }
    return {name: torch.from_numpy(trust) for name, trust in found.items()}


def confident_thresholds(probabilities: Array, labels: Array) -> Array:
    """Each class's mean probability over the examples labelled with it, (classes,); 2 for a class without examples."""
    classes = range(probabilities.shape[1])
    means = [probabilities[labels == c, c].mean() if (labels == c).any() else 2.0 for c in classes]
    return np.maximum(means, 2e-6)


def adjusted(probabilities: Array, labels: Array) -> Array:
    """Probabilities relative to the confident thresholds, shifted to be positive and normalised to sum to 1."""
    thresholds = confident_thresholds(probabilities, labels)
    moved = probabilities - thresholds + thresholds.max()
    return moved / moved.sum(axis=1, keepdims=True)


def normalized_margin(probabilities: Array, labels: Array) -> Array:
    """The label's probability minus the largest of another class, scaled to [0, 1]."""
    others = probabilities.copy()
    others[np.arange(len(labels)), labels] = -np.inf
    return (_own(probabilities, labels) - others.max(axis=1) + 1) / 2


def confident_issues(probabilities: Array, labels: Array) -> Array:
    """The off-diagonal of the confident joint: examples that confidently belong to another class, (n,) booleans."""
    sure = probabilities >= confident_thresholds(probabilities, labels) - 1e-6
    guess = np.where(sure.sum(axis=1) > 1, probabilities.argmax(axis=1), sure.argmax(axis=1))
    return sure.any(axis=1) & (guess != labels)


def flagged(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(n,) whether cleanlab finds an issue: as the package, it spares labels that the model itself would give."""
    issues = torch.from_numpy(confident_issues(probabilities.double().numpy(), labels.numpy()))
    return issues & (probabilities.argmax(1) != labels)


def _own(probabilities: Array, labels: Array) -> Array:
    return probabilities[np.arange(len(labels)), labels]
