"""The baseline for label-error detection: cleanlab, which ranks labels by out-of-sample probabilities.

The probabilities come from k-fold cross-validation of the same network, with as many steps in total as the other
methods take: each fold trains for epochs/(k − 1) epochs on its share (k − 1)/k of the source. The clean images are
mixed in, as in the table's line "noisy and clean mixed"; without them the baseline would be weaker.

Rankings and issues are the package's own. Each ranking is a trust: the higher, the more probably the label is right
(Northcutt et al. 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from experiments import measures
from experiments.results import Row
from soseleto.data import Examples, generator, seed_for
from soseleto.errors import need
from soseleto.training.result import Result

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


RANKINGS: Mapping[str, Mapping[str, Any]] = {
    "cleanlab_self_confidence": {"method": "self_confidence"},
    "cleanlab_margin": {"method": "normalized_margin"},
    "cleanlab_confident": {"method": "normalized_margin", "adjust_pred_probs": True},
}


def trusts(probabilities: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """cleanlab's rankings by name, (n,) each."""
    rank = need("cleanlab.rank", to="ranking labels")
    given = labels.cpu().numpy(), probabilities.double().numpy()
    found = {name: rank.get_label_quality_scores(*given, **settings) for name, settings in RANKINGS.items()}
    return {name: torch.from_numpy(trust) for name, trust in found.items()}


def flagged(probabilities: Tensor, labels: Tensor) -> Tensor:
    """(n,) whether cleanlab finds an issue."""
    find = need("cleanlab.filter", to="finding label issues")
    given = labels.numpy(), probabilities.double().numpy()
    return torch.from_numpy(find.find_label_issues(*given, filter_by="confident_learning", n_jobs=1))
