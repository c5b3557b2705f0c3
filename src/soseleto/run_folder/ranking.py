"""Which examples of a ranking a person should look at: the suspects, and the best and worst of every class."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

LOW_WEIGHT = np.float32(0.1)  # below it an example is a suspect where nobody has judged the labels
PER_CLASS = 12
MOST_CLASSES = 60

Ranking = Mapping[str, np.ndarray]  # the columns of ranking.parquet, best example first


@dataclass(frozen=True)
class ClassRows:
    """One class: its rows in the ranking, best, most suspicious and surest first; at most half of the class each."""

    label: str
    count: int
    suspects: int
    best: np.ndarray
    worst: np.ndarray
    surest: np.ndarray


def is_suspect(ranking: Ranking) -> np.ndarray:
    """(N,) whether the given label is doubted: by judgement where there is one, else by a low weight."""
    if "is_label_issue" in ranking:
        return np.asarray(ranking["is_label_issue"], dtype=bool)
    return np.asarray(ranking["weight"] < LOW_WEIGHT)


def most_suspicious_first(ranking: Ranking) -> np.ndarray:
    """(N,) all rows: suspects before the others, then by the probability of a wrong label, then from the bottom up."""
    rows = np.arange(len(ranking["weight"]))
    probability = ranking.get("mislabelled_probability")
    doubt = np.zeros(len(rows)) if probability is None else np.nan_to_num(probability, nan=0.0)
    return np.lexsort((-rows, -doubt, ~is_suspect(ranking)))


def suggested_labels(ranking: Ranking) -> np.ndarray | None:
    """(N,) another label for each suspect, None where there is none; None as a whole where nobody suggests any."""
    column = ranking.get("suggested_label", ranking.get("predicted_label"))
    if column is None:
        return None
    other = is_suspect(ranking) & (column.astype(str) != ranking["label"].astype(str))
    labels = column.astype(str).astype(object)
    labels[~other] = None
    return np.asarray(labels)


def suspect_rows(ranking: Ranking) -> np.ndarray:
    """(S,) the rows of the suspects, most suspicious first."""
    return most_suspicious_first(ranking)[: int(is_suspect(ranking).sum())]


def feature_columns(ranking: Ranking, source: Mapping[str, Any]) -> dict[str, str]:
    """The feature columns ``x0``, ``x1``, ... of a ranking, by what the source calls them where that is known."""
    columns = [name for name in ranking if name[:1] == "x" and name[1:].isdigit()]
    columns.sort(key=lambda name: int(name[1:]))
    names = source.get("features") or []
    return dict(zip(columns, names if len(names) == len(columns) else columns, strict=True))


def by_class(ranking: Ranking, *, each: int = PER_CLASS, most: int = MOST_CLASSES) -> list[ClassRows]:
    """The ``most`` largest classes by name; none where labels are real numbers."""
    labels = ranking["label"]
    if labels.dtype.kind == "f" or not len(labels):
        return []
    names, place, counts = np.unique(labels.astype(str), return_inverse=True, return_counts=True)
    order, doubted = most_suspicious_first(ranking), is_suspect(ranking)
    best = np.argsort(doubted, kind="stable")  # as ranked, but nobody under suspicion before the others
    largest = np.sort(np.argsort(-counts, kind="stable")[:most])
    return [
        ClassRows(
            label=str(names[which]),
            count=int(counts[which]),
            suspects=int(doubted[place == which].sum()),
            best=best[place[best] == which][: _half(int(counts[which]), each)],
            worst=order[place[order] == which][: _half(int(counts[which]), each)],
            surest=order[::-1][place[order[::-1]] == which][: _half(int(counts[which]), each)],
        )
        for which in sorted(largest, key=lambda which: _natural(str(names[which])))
    ]


def _half(count: int, each: int) -> int:
    return min(each, -(-count // 2))


def _natural(name: str) -> tuple[int, int, str]:
    """Whole numbers by value, before names."""
    return (0, int(name), name) if name.isdecimal() else (1, 0, name)
