"""How well a run found the wrong labels, counted on the source examples whose right label is known."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from experiments.detection import average_precision, compare
from experiments.results import Row
from soseleto.suspects.suspects import Suspects

UNKNOWN = -1  # the right label of an example that was never checked


def detection(labels: Tensor, truth: Tensor, trust: Mapping[str, Tensor]) -> Row:
    """AUROC, average precision and precision at the true number of errors of every signal."""
    known = truth != UNKNOWN
    wrong = (labels != truth)[known]
    signals = {name: signal[known] for name, signal in trust.items()}
    found = compare(signals, wrong)
    for name, signal in signals.items():
        found[name]["average_precision"] = round(average_precision(signal, wrong), 4)
    return {"detection": found} if found else {}


def suspects(found: Suspects, labels: Tensor, truth: Tensor, asked: float) -> Row:
    """The suspects at a requested precision: what their probabilities claim beside what is true, in percent.

    interval: of the precision of the whole list
    """
    known = truth != UNKNOWN
    probability, listed = found.probability[known].double(), found.is_suspect[known]
    claimed = _rates(listed, probability)
    true = _rates(listed, (labels != truth)[known].double())
    low, high = (_percent(value) if len(found) else None for value in (found.precision.low, found.precision.high))
    return {
        "asked": 100 * asked,
        "count": len(found),
        "basis": found.basis,
        "interval": [low, high],
        **{name: {"claimed": claimed[name], "truth": true[name]} for name in claimed},
    }


def issues(listed: Tensor, labels: Tensor, truth: Tensor) -> Row:
    """A list without probabilities: its length, and its true precision and recall in percent."""
    known = truth != UNKNOWN
    true = _rates(listed[known], (labels != truth)[known].double())
    return {"count": int(listed.sum()), "precision": true["precision"], "recall": true["recall"]}


def _rates(listed: Tensor, wrong: Tensor) -> dict[str, float | None]:
    """Precision, recall and the share of wrong labels in percent; ``wrong`` has probabilities, or 0 and 1."""
    hits, total = float(wrong[listed].sum()), float(wrong.sum())
    return {
        "precision": _percent(hits / int(listed.sum())) if bool(listed.any()) else None,
        "recall": _percent(hits / total) if total else None,
        "wrong_share": _percent(total / len(wrong)),
    }


def _percent(share: float) -> float:
    return round(100 * share, 2)
