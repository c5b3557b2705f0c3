"""The run folder's files as plain values: the only input of the report."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from soseleto.run_folder import thumbnails
from soseleto.run_folder.folder import RANKING, RunFolder
from soseleto.run_folder.ranking import best_count, feature_columns, suggested_labels

Record = dict[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """The contents of one run folder; ``ranking`` is None while the run has not finished."""

    name: str
    config: Record
    start: Record
    epochs: tuple[Record, ...]
    end: Record
    messages: tuple[str, ...]
    ranking: dict[str, np.ndarray] | None
    pictures: dict[str, bytes]  # thumbnails by id
    source: Record  # path and columns of the source
    comparison: Record  # accuracies of other methods on the same data
    suspects: Record  # threshold and estimates of the suspects

    @property
    def last(self) -> Record:
        """The last epoch's record, updated with the final evaluation."""
        return {**(self.epochs[-1] if self.epochs else {}), **self.end}

    def series(self, key: str) -> np.ndarray:
        """One metric of every epoch, NaN where it is missing; (E,)."""
        return np.array([as_number(record.get(key)) for record in self.epochs], dtype=float)

    def group(self, name: str, key: str, among: str = "groups") -> np.ndarray:
        """One statistic of the group "right" or "wrong" in every epoch, NaN where it is missing; (E,)."""
        groups = (record.get(among) or {} for record in self.epochs)
        return np.array([as_number((group.get(name) or {}).get(key)) for group in groups], dtype=float)

    def column(self, name: str) -> np.ndarray | None:
        """A column of the ranking, or None."""
        return None if self.ranking is None else self.ranking.get(name)

    @property
    def wrong(self) -> np.ndarray | None:
        """Which labels are wrong, where every true label is known."""
        truth = self.column("true_label")
        return self.column("wrong") if truth is None or not _missing(truth).any() else None

    @cached_property
    def suggested(self) -> np.ndarray | None:
        """The suggested label of each suspect, see ``suggested_labels``."""
        return None if self.ranking is None else suggested_labels(self.ranking, best_count(self.suspects))

    @property
    def is_strong(self) -> bool:
        """Whether a teacher judged the labels, so that weights are probabilities and there are no alignments."""
        return self.config.get("method") in ("strong", "strong_pair")

    @property
    def is_transfer(self) -> bool:
        """Whether weights are about the target and not about wrong labels."""
        return self.config.get("mode") == "transfer"

    @property
    def features(self) -> dict[str, str]:
        """Feature columns ``x0``, ``x1``, ... -> names in the source."""
        return feature_columns(self.ranking or {}, self.source)


def read(path: str | os.PathLike[str]) -> RunFiles:
    """Read a run folder; an unfinished run is read as far as it got."""
    folder = RunFolder.open(path)
    records = folder.metrics()
    return RunFiles(
        name=folder.path.resolve().name,
        config=folder.config(),
        start=_first(records, "start"),
        epochs=tuple(record for record in records if record.get("event") == "epoch"),
        end=_first(records, "end"),
        messages=_messages(records),
        ranking=folder.ranking() if folder.has(RANKING) else None,
        pictures=thumbnails.load(folder),
        source=folder.source(),
        comparison=folder.comparison() or {},
        suspects=folder.suspects() or {},
    )


def _first(records: list[Record], event: str) -> Record:
    return next((record for record in records if record.get("event") == event), {})


def _missing(truth: np.ndarray) -> np.ndarray:
    """(N,) which true labels of a ranking are not known: NaN of numbers, -1 of indices, blank of names."""
    if truth.dtype.kind == "f":
        return np.isnan(truth)
    return truth < 0 if truth.dtype.kind == "i" else truth.astype(str) == ""


def _messages(records: list[Record]) -> tuple[str, ...]:
    """The messages of the run, without repetition, in order."""
    texts = [str(text) for text in _first(records, "start").get("messages") or []]
    texts += [str(record.get("text", "")) for record in records if record.get("event") == "message"]
    return tuple(dict.fromkeys(texts))


def as_number(value: object) -> float:
    """A float; NaN for anything that is not a number."""
    return float(value) if isinstance(value, int | float) else float("nan")
