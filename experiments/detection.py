"""How well a signal separates wrong labels from right ones, where the truth is known.

Every signal is a *trust*: the higher, the more probably the label is right (a weight, a score, a margin, a negated
loss). Ties are treated exactly: every number is the expectation over all orders of the tied examples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from soseleto.errors import DataError

# Shares of the source that are kept, for the curves of the paper's appendix: 5 %, 10 %, ... 100 %.
FRACTIONS = tuple(round(0.05 * step, 2) for step in range(1, 21))


def auroc(trust: Tensor, wrong: Tensor) -> float:
    """The probability that a right label is trusted more than a wrong one; a tie counts half.

    The Mann-Whitney statistic by mid-ranks: (R − n(n+1)/2)/(n·m) for n right and m wrong labels, with R the sum of the
    ranks of the right ones.

    >>> auroc(torch.tensor([0.9, 0.8, 0.3, 0.3]), torch.tensor([False, False, True, False]))
    0.8333333333333334
    """
    trust, wrong = _checked(trust, wrong)
    _, place, counts = trust.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0)
    ranks = (last - (counts - 1).double() / 2)[place]  # tied examples share the mean of their ranks
    right = int((~wrong).sum())
    return float((ranks[~wrong].sum() - right * (right + 1) / 2) / (right * (len(wrong) - right)))


def precision_at_errors(trust: Tensor, wrong: Tensor) -> float:
    """The share of wrong labels among the k least trusted, with k the true number of wrong labels."""
    trust, wrong = _checked(trust, wrong)
    k = int(wrong.sum())
    return float(_wrong_among_lowest(trust, wrong, np.array([k]))[0] / k)


def average_precision(trust: Tensor, wrong: Tensor) -> float:
    """The mean, over the wrong labels, of the share of wrong ones among the examples up to it, least trusted first.

    Of a group of m tied examples with k wrong ones, behind n₀ examples with w₀ wrong ones, place i (1 to m) is wrong
    with probability k/m, and then w₀ + 1 + (i − 1)(k − 1)/(m − 1) of the first n₀ + i are expected to be wrong.

    >>> average_precision(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([True, False, True, False]))
    0.8333333333333333
    """
    trust, wrong = _checked(trust, wrong)
    _, place, counts = trust.unique(return_inverse=True, return_counts=True)
    errors = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, place, wrong.double())
    group = torch.arange(len(counts)).repeat_interleave(counts)  # of each place in the ranking
    rank = torch.arange(1, len(trust) + 1)
    m, k = counts[group], errors[group]
    before = (errors.cumsum(0) - errors)[group]
    inside = rank - (counts.cumsum(0) - counts)[group]  # i
    expected = before + 1 + (inside - 1) * (k - 1) / (m - 1).clamp(min=1)
    return float((k / m * expected / rank).sum() / errors.sum())


def wrong_among_kept(trust: Tensor, wrong: Tensor, fractions: Sequence[float] = FRACTIONS) -> list[float]:
    """The share of wrong labels among the most trusted round(f·n) examples, for each f: the appendix's figure."""
    trust, wrong = _checked(trust, wrong)
    kept = np.array([max(1, round(f * len(trust))) for f in fractions])
    lost = _wrong_among_lowest(trust, wrong, len(trust) - kept)
    return ((int(wrong.sum()) - lost) / kept).tolist()


def compare(signals: Mapping[str, Tensor], wrong: Tensor) -> dict[str, dict[str, float]]:
    """AUROC and precision at the true number of errors, for each signal, to 4 digits as results files hold them."""
    return {
        name: {"auroc": round(auroc(trust, wrong), 4), "precision": round(precision_at_errors(trust, wrong), 4)}
        for name, trust in signals.items()
    }


def _wrong_among_lowest(trust: Tensor, wrong: Tensor, k: np.ndarray) -> np.ndarray:
    """The expected number of wrong labels among the k least trusted, which is linear in k within a group of ties."""
    _, place, counts = trust.unique(return_inverse=True, return_counts=True)
    errors = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, place, wrong.double())
    examples = np.concatenate([[0.0], counts.cumsum(0).double().numpy()])
    return np.interp(k, examples, np.concatenate([[0.0], errors.cumsum(0).numpy()]))


def _checked(trust: Tensor, wrong: Tensor) -> tuple[Tensor, Tensor]:
    trust, wrong = trust.detach().cpu().double(), wrong.detach().cpu()
    if trust.ndim != 1 or trust.shape != wrong.shape or wrong.dtype != torch.bool:
        raise DataError(
            f"a signal of shape {tuple(trust.shape)} was given with {wrong.dtype} {tuple(wrong.shape)}: "
            "give one number and one boolean (whether the label is wrong) for each example."
        )
    if bool(trust.isnan().any()):
        raise DataError(f"{int(trust.isnan().sum())} entries of the signal are NaN: such examples cannot be ranked.")
    if bool(wrong.all()) or not bool(wrong.any()):
        raise DataError("the labels are all right or all wrong: detection needs right and wrong ones.")
    return trust, wrong
