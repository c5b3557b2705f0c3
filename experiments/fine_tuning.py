"""What experiments with pretrained networks share: a training and what it tells of the labels, and two rivals' lines.

The rivals are cleanlab, and logistic regression on the frozen network's features, which is an oracle too where it gets
the right labels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from experiments import cleanlab, measures
from experiments.results import Row
from soseleto.data import Examples, seed_for
from soseleto.errors import need
from soseleto.methods import Signals
from soseleto.training.result import Result

LOGISTIC = "logistic"  # the base of its lines
ASKED = 0.9  # the precision that suspects are requested at


class Train(Protocol):
    """Train on a part of the source, for this many epochs and from this seed; both are the run's own if not given."""

    def __call__(self, source: Examples, **changes: Any) -> Result: ...


def trained(
    train: Callable[[Signals | None], Result], source: Examples, truth: Tensor, evaluated: Examples, *, probes: bool
) -> Row:
    """One training; every signal that ranks labels is recorded, or probes give suspects."""
    signals = None if probes else Signals(len(source))
    result = train(signals)
    trust = {} if result.learned is None else {"weight": result.weights, "score": result.scores}
    if signals is not None:
        trust |= {"loss": -signals.loss.cpu(), "margin": signals.margin.cpu()}
    row: Row = {"accuracy": result.evaluate(evaluated)["accuracy"]}
    if probes:
        found = result.suspects(ASKED)
        trust["probability"] = -found.probability
        row["suspects"] = [measures.suspects(found, source.labels, truth, ASKED)]
    return {**row, **measures.detection(source.labels, truth, trust), "messages": list(result.messages)}


def cleaned(
    train: Train, source: Examples, truth: Tensor, evaluated: Examples, *, epochs: int, folds: int, seed: int, name: str
) -> Row:
    """cleanlab's rankings and issues by cross-validation, and a training on the examples without issues.

    The folds together take about as many steps as one training, and the training on what is kept comes after them.
    """

    def predict(training: Examples, inputs: Tensor, fold: int) -> Tensor:
        of_fold = {"epochs": cleanlab.fold_epochs(epochs, folds), "seed": seed_for(seed, f"{name}/fold", fold)}
        return train(training, **of_fold).outputs(inputs).softmax(1)

    labels = source.labels
    probabilities = cleanlab.out_of_sample(source, folds, seed, predict)
    issues = cleanlab.flagged(probabilities, labels)
    result = train(source.subset(~issues))
    return {
        "accuracy": result.evaluate(evaluated)["accuracy"],
        "issues": measures.issues(issues, labels, truth),
        **measures.detection(labels, truth, cleanlab.trusts(probabilities, labels)),
        "messages": list(result.messages),
    }


def logistic(sides: Sequence[Examples], evaluated: Examples) -> Row:
    """scikit-learn's logistic regression with its default penalty, on sides whose inputs are features."""
    right = _regression(sides).predict(evaluated.inputs.numpy()) == evaluated.labels.numpy()
    return {"accuracy": 100.0 * float(right.mean())}


def logistic_on_right_labels(
    source: Examples, truth: Tensor, trusted: Examples, evaluated: Examples, *, folds: int, seed: int
) -> Row:
    """What the features allow: trained on the right label of every example that has a known one, the source's too.

    The given labels are ranked by their probabilities, which come from the right labels of other examples.
    """
    known = truth != measures.UNKNOWN
    checked = replace(source.subset(known), labels=truth[known])

    def predict(training: Examples, inputs: Tensor, fold: int) -> Tensor:
        return torch.from_numpy(_regression([training, trusted]).predict_proba(inputs.numpy()))

    given = source.labels[known]
    probabilities = cleanlab.out_of_sample(checked, folds, seed, predict)
    trust = {"right labels": probabilities.gather(1, given[:, None]).squeeze(1)}
    return {**logistic([checked, trusted], evaluated), **measures.detection(given, truth[known], trust)}


def _regression(sides: Sequence[Examples]) -> Any:
    made = need("sklearn.linear_model", to="logistic regression").LogisticRegression(max_iter=1000)
    inputs, labels = (torch.cat([getattr(side, name) for side in sides]).numpy() for name in ("inputs", "labels"))
    return made.fit(inputs, labels)
