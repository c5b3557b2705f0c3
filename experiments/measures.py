"""How well a run found the wrong labels, counted on the source examples whose right label is known.

Every signal is a *trust*: the higher, the more probably the label is right (a weight, a score, a margin, a negated
loss). Ties are treated exactly: every number is the expectation over all orders of the tied examples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

from experiments.results import Row
from soseleto.errors import DataError
from soseleto.methods import Signals
from soseleto.suspects.suspects import Suspects
from soseleto.training.result import Result

UNKNOWN = -1  # the right label of an example that was never checked
# Shares of the source that are kept, for the curves of the paper's appendix: 5 %, 10 %, ... 100 %.
FRACTIONS = tuple(round(0.05 * step, 2) for step in range(1, 21))


def trusts(result: Result, signals: Signals | None) -> dict[str, Tensor]:
    """Every signal of a training that ranks labels, and with probes the probability that a label is wrong."""
    trust = {} if result.learned is None else {"weight": result.weights, "score": result.scores}
    if signals is not None and bool((signals.visits > 0).all()):
        trust |= {"loss": -signals.loss.cpu(), "margin": signals.margin.cpu()}
    if result.evidence is not None:
        probability = result.suspects().probability
        if not bool(probability.isnan().any()):  # unknown in a class that the target lacks
            trust["probability"] = -probability
    return trust


def detection(labels: Tensor, truth: Tensor, trust: Mapping[str, Tensor]) -> Row:
    """AUROC and precision at the true number of errors of every signal; nothing where no label is known to be wrong."""
    known = truth != UNKNOWN
    wrong = (labels != truth)[known]
    if not trust or not bool(wrong.any()):
        return {}
    return {"detection": compare({name: signal[known] for name, signal in trust.items()}, wrong)}


def compare(signals: Mapping[str, Tensor], wrong: Tensor) -> dict[str, dict[str, float]]:
    """AUROC and precision at the true number of errors, for each signal, to 4 digits as results files hold them."""
    return {
        name: {"auroc": round(auroc(trust, wrong), 4), "precision": round(precision_at_errors(trust, wrong), 4)}
        for name, trust in signals.items()
    }


def kept(labels: Tensor, truth: Tensor, trust: Mapping[str, Tensor]) -> Row:
    """The curves of the paper's appendix: percent of wrong labels at 20 sizes of the kept source."""
    wrong = labels != truth
    if not trust or not bool(wrong.any()):
        return {}
    curves = {name: [round(100 * share, 2) for share in wrong_among_kept(t, wrong)] for name, t in trust.items()}
    return {"kept": {"fraction": list(FRACTIONS), **curves}}


def suspects(listed: Suspects, labels: Tensor, truth: Tensor, asked: float) -> Row:
    """The suspects at a requested precision: what their probabilities claim beside what is true, in percent.

    interval: of the precision of the whole list
    """
    known = truth != UNKNOWN
    is_listed = listed.is_suspect[known]
    claimed = _rates(is_listed, listed.probability[known].double())
    true = _rates(is_listed, (labels != truth)[known].double())
    bounds = (listed.precision.low, listed.precision.high) if len(listed) else ()
    return {
        "asked": 100 * asked,
        "count": len(listed),
        "basis": listed.basis,
        "interval": [_percent(bound) for bound in bounds] or [None, None],
        **{name: {"claimed": claimed[name], "truth": true[name]} for name in claimed},
    }


def issues(is_listed: Tensor, labels: Tensor, truth: Tensor) -> Row:
    """A list without probabilities: its length, and its true precision and recall in percent."""
    known = truth != UNKNOWN
    true = _rates(is_listed[known], (labels != truth)[known].double())
    return {"count": int(is_listed.sum()), "precision": true["precision"], "recall": true["recall"]}


def _rates(is_listed: Tensor, wrong: Tensor) -> dict[str, float | None]:
    """Precision, recall and the share of wrong labels in percent; ``wrong`` has probabilities, or 0 and 1."""
    hits, total = float(wrong[is_listed].sum()), float(wrong.sum())
    return {
        "precision": _percent(hits / int(is_listed.sum())) if bool(is_listed.any()) else None,
        "recall": _percent(hits / total) if total else None,
        "wrong_share": _percent(total / len(wrong)),
    }


def _percent(share: float) -> float | None:
    """None where a part is not known."""
    return None if math.isnan(share) else round(100 * share, 2)


def auroc(trust: Tensor, wrong: Tensor) -> float:
    """The probability that a right label is trusted more than a wrong one; a tie counts half."""
    trust, wrong = _checked(trust, wrong)
    return float(roc_auc_score(~wrong, trust))


def precision_at_errors(trust: Tensor, wrong: Tensor) -> float:
    """The share of wrong labels among the k least trusted, with k the true number of wrong labels."""
    trust, wrong = _checked(trust, wrong)
    k = int(wrong.sum())
    return float(_wrong_among_lowest(trust, wrong, np.array([k]))[0] / k)


def wrong_among_kept(trust: Tensor, wrong: Tensor, fractions: Sequence[float] = FRACTIONS) -> list[float]:
    """The share of wrong labels among the most trusted round(f·n) examples, for each f: the appendix's figure."""
    trust, wrong = _checked(trust, wrong)
    sizes = np.array([max(1, round(f * len(trust))) for f in fractions])
    lost = _wrong_among_lowest(trust, wrong, len(trust) - sizes)
    return ((int(wrong.sum()) - lost) / sizes).tolist()


def _wrong_among_lowest(trust: Tensor, wrong: Tensor, k: np.ndarray) -> np.ndarray:
    """The expected number of wrong labels among the k least trusted, which is linear in k within a group of ties."""
    _, place, counts = trust.unique(return_inverse=True, return_counts=True)
    errors = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, place, wrong.double())
    examples = np.concatenate([[0.0], counts.cumsum(0).double().numpy()])
    return np.interp(k, examples, np.concatenate([[0.0], errors.cumsum(0).numpy()]))


def _checked(trust: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    trust, wrong = trust.detach().cpu().double(), wrong.detach().cpu()
    if bool(trust.isnan().any()):
        raise DataError(f"{int(trust.isnan().sum())} entries of the signal are NaN: such examples cannot be ranked.")
    if bool(wrong.all()) or not bool(wrong.any()):
        raise DataError("the labels are all right or all wrong: detection needs right and wrong ones.")
    return trust, wrong
