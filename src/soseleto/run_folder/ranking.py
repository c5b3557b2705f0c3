"""What is selected from a ranking: the suspects, the best and worst examples, and what is said of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from soseleto.errors import counted

LOW_WEIGHT = np.float32(0.1)  # of the paper's Figure 1; suspects without probes are examples of lower weight
SHOWN = 20  # best and worst examples of a report, and its suspects
MOST_SUSPECTS = 4000  # that have a thumbnail
MOST_TABLE_COLUMNS = 64  # of a table with a preparation, whose report scrolls

Ranking = Mapping[str, np.ndarray]  # the columns of ranking.parquet, best example first


def is_suspect(ranking: Ranking) -> np.ndarray:
    """(N,) whether an example is a suspect: ``is_label_issue`` where the run had probes, else a low weight.

    Never where nothing is known about the label.
    """
    if "is_label_issue" in ranking:
        return np.asarray(ranking["is_label_issue"], dtype=bool)
    return np.asarray(ranking["weight"] < LOW_WEIGHT) & ~is_unknown(ranking)


def is_unknown(ranking: Ranking) -> np.ndarray:
    """(N,) whether an example is labelled as a class without target examples, or with probes looks like one."""
    return np.asarray(ranking.get("is_unknown", np.zeros(len(ranking["weight"]))), dtype=bool)


def about_unknown(ranking: Ranking) -> str:
    """A sentence about the examples of which nothing is known; empty where there are none."""
    if not (count := int(is_unknown(ranking).sum())):
        return ""
    return (
        f"Whether the label is right is unknown for {counted(count, 'example')} of or like a class without target "
        "examples, which are never suspects."
    )


def most_suspicious_first(ranking: Ranking) -> np.ndarray:
    """(N,) all rows: suspects first, then by the probability of being mislabelled, then by rank from the bottom."""
    rows = np.arange(len(ranking["weight"]))
    probability = ranking.get("mislabelled_probability")
    probable = np.zeros(len(rows)) if probability is None else np.nan_to_num(probability, nan=0.0)
    return np.lexsort((-rows, -probable, ~is_suspect(ranking)))


def suggested_labels(ranking: Ranking) -> np.ndarray | None:
    """(N,) a different label for each suspect, None for the others; None where the run has no predictions."""
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


def worst_rows(ranking: Ranking) -> np.ndarray:
    """(N,) all rows, worst first: by the probability of a wrong label, else by rank from the bottom."""
    if "mislabelled_probability" in ranking:
        return most_suspicious_first(ranking)
    return np.arange(len(ranking["weight"]))[::-1]


def feature_columns(ranking: Ranking, source: Mapping[str, Any]) -> dict[str, str]:
    """The feature columns ``x0``, ``x1``, ... of a ranking -> their names in the source, where known."""
    columns = [f"x{place}" for place in range(len(ranking)) if f"x{place}" in ranking]
    names = source.get("features") or columns
    return dict(zip(columns, names, strict=False))  # of a wide table only the first columns are in the ranking


def with_names(ranking: Ranking, source: Mapping[str, Any]) -> Ranking:
    """The features under their own names; ``weight`` and others that the ranking has become ``weight_source``."""
    features = feature_columns(ranking, source)
    named = {column: values for column, values in ranking.items() if column not in features}
    for column, name in features.items():
        while name in named:
            name += "_source"
        named[name] = ranking[column]
    return named


def shown_rows(ranking: Ranking, also: Sequence[int] = ()) -> np.ndarray:
    """The best, the worst, the suspects and the rows ``also``; in ranking order."""
    order = most_suspicious_first(ranking)
    count = min(int(is_suspect(ranking).sum()), MOST_SUSPECTS)
    shown = [order[: max(count, SHOWN)], np.arange(min(len(order), SHOWN)), np.array(also, dtype=int)]
    return np.unique(np.concatenate(shown))


# Precision, recall and share of wrong labels, each with its interval and the basis of its estimate


def is_known(figure: Mapping[str, Any] | None) -> bool:
    return figure is not None and figure.get("value") is not None


def in_words(figure: Mapping[str, Any] | None) -> str:
    """``95 % (90 to 98; audited)``, or ``unknown``."""
    if not is_known(figure):
        return "unknown"
    assert figure is not None
    value, low, high = (f"{100 * figure[name]:.0f}" for name in ("value", "low", "high"))
    basis = figure.get("basis")
    return f"{value} % ({low} to {high}{f'; {basis}' if basis else ''})"


def checks_for(count: int) -> int:
    """The number of random checks among ``count`` that tell a share to ± 10 points (95 % confidence).

    >>> checks_for(10), checks_for(100), checks_for(100_000)
    (10, 50, 96)
    """
    needed = (1.96 * 0.5 / 0.1) ** 2
    return math.ceil(needed / (1 + (needed - 1) / count))


def about_suspects(ranking: Ranking, suspects: Mapping[str, Any] | None) -> str:
    """How many suspects there are, with which precision and recall, and on what basis."""
    suspects = suspects or {}
    count, probability = int(is_suspect(ranking).sum()), ranking.get("mislabelled_probability")
    if count and not is_known(suspects.get("precision")):
        return f"{counted(count, 'suspect')}, unchecked: {checks_for(count)} checks tell their precision to ± 10 points"
    if count:
        precision, recall = (in_words(suspects.get(name)) for name in ("precision", "recall"))
        return f"{counted(count, 'suspect')}: precision {precision}, recall {recall}"
    if probability is None:
        return "no suspects"
    return f"no suspects: no label is wrong with more than {100 * float(np.nanmax(probability)):.0f} % probability"


# As an object for users


class Table(dict[str, np.ndarray]):
    """Columns of equal length by name."""

    def head(self, n: int = 10) -> Table:
        return Table({name: column[:n] for name, column in self.items()})

    def tail(self, n: int = 10) -> Table:
        return Table({name: column[-n:] for name, column in self.items()})

    def __repr__(self) -> str:
        shown = self.head()
        rows = zip(*shown.values(), strict=True)
        cells = ([f"{v:.4g}" if isinstance(v, (float, np.floating)) else str(v) for v in row] for row in rows)
        lines = ["  ".join(f"{cell:>12}" for cell in row) for row in (self, *cells)]
        count = len(next(iter(self.values()), ()))
        return "\n".join(lines) + (f"\n... {count} rows" if len(lines) <= count else "")
