"""Statistics of a ranking: histograms, counts above each weight threshold, precision and recall."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

THRESHOLDS = np.linspace(0, 1, 101)
PAPER_THRESHOLD = 0.1  # of the paper's Figure 1


@dataclass(frozen=True)
class Histogram:
    """Counts of one or two groups over common bins; ``edges`` (B + 1,), each count (B,)."""

    edges: np.ndarray
    counts: dict[str, np.ndarray]
    beyond: int = 0  # examples outside the edges, counted in the outermost bins


def weight_histogram(weight: np.ndarray, wrong: np.ndarray | None, bins: int = 40) -> Histogram:
    """Histogram of values in [0, 1], split into correctly labelled and mislabelled where the truth is known."""
    edges = np.linspace(0, 1, bins + 1)
    return Histogram(edges, _counts(weight, wrong, edges))


def score_histogram(score: np.ndarray, wrong: np.ndarray | None, bins: int = 40) -> Histogram | None:
    """The scores between their 0.5 and 99.5 percentiles; the tails are counted in the outermost bins."""
    known = np.isfinite(score)
    score, wrong = score[known], None if wrong is None else wrong[known]
    if not len(score):
        return None
    low, high = np.percentile(score, [0.5, 99.5])
    if low == high:
        low, high = low - 0.5, high + 0.5
    edges = np.linspace(low, high, bins + 1)
    beyond = int(((score < low) | (score > high)).sum())
    return Histogram(edges, _counts(np.clip(score, low, high), wrong, edges), beyond)


def _counts(values: np.ndarray, wrong: np.ndarray | None, edges: np.ndarray) -> dict[str, np.ndarray]:
    if wrong is None:
        return {"all": np.histogram(values, edges)[0]}
    return {
        "right": np.histogram(values[~wrong], edges)[0],
        "wrong": np.histogram(values[wrong], edges)[0],
    }


@dataclass(frozen=True)
class Kept:
    """The examples with a weight of at least each of ``THRESHOLDS``; each (101,)."""

    count: np.ndarray
    effective: np.ndarray  # effective sample size (Σα)² / Σα² of the kept examples
    wrong: np.ndarray | None  # mislabelled examples among the kept, where the truth is known


def kept(weight: np.ndarray, wrong: np.ndarray | None) -> Kept:
    """Exact counts at every threshold, from one sort."""
    order = np.argsort(weight, kind="stable")
    ascending = weight[order].astype(np.float64)
    below = np.searchsorted(weight[order], THRESHOLDS.astype(weight.dtype), side="left")
    total, squares = _tail_sums(ascending)[below], _tail_sums(ascending**2)[below]
    effective = np.divide(total**2, squares, out=np.zeros_like(total), where=squares > 0)
    wrong_kept = None if wrong is None else _tail_sums(wrong[order].astype(np.float64))[below].astype(int)
    return Kept(len(weight) - below, effective, wrong_kept)


def _tail_sums(values: np.ndarray) -> np.ndarray:
    """Entry i is the sum of ``values[i:]``; (N + 1,)."""
    return np.append(np.cumsum(values[::-1])[::-1], 0.0)


def precision_recall(table: Kept) -> tuple[np.ndarray, np.ndarray]:
    """Of "weight below the threshold" as a detector of mislabelled examples; precision is NaN where none is below."""
    if table.wrong is None:
        raise ValueError("precision and recall need the true labels.")
    flagged = table.count[0] - table.count
    caught = table.wrong[0] - table.wrong
    precision = np.divide(caught, flagged, out=np.full(len(flagged), np.nan), where=flagged > 0)
    recall = caught / table.wrong[0] if table.wrong[0] else np.full(len(flagged), np.nan)
    return precision, recall


def noise_curve(wrong: np.ndarray, points: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """For the top of a ranking at several sizes: the share kept, and the share of mislabelled among them."""
    kept_rows = np.unique(np.linspace(1, len(wrong), min(points, len(wrong))).round().astype(int))
    return kept_rows / len(wrong), np.cumsum(wrong)[kept_rows - 1] / kept_rows


@dataclass(frozen=True)
class LabelRow:
    """One label: the number of its source examples, their mean weight, and the counts kept at each threshold."""

    label: str
    count: int
    mean: float
    kept: np.ndarray  # (101,)


def by_label(labels: np.ndarray, weight: np.ndarray, most: int = 60) -> tuple[list[LabelRow], int]:
    """The ``most`` most frequent labels, lowest mean weight first, and the number of labels left out."""
    if labels.dtype.kind == "f":  # regression targets are not classes
        return [], 0
    names, index, counts = np.unique(labels.astype(str), return_inverse=True, return_counts=True)
    largest = np.argsort(-counts, kind="stable")[:most]
    rows = []
    for which in largest:
        own = weight[index == which]
        rows.append(LabelRow(str(names[which]), len(own), float(own.mean()), kept(own, None).count))
    return sorted(rows, key=lambda row: row.mean), len(names) - len(largest)
