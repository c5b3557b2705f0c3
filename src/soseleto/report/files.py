"""What the report knows: the run folder's files as plain values, and nothing of the code that trained."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from soseleto.run_folder import thumbnails
from soseleto.run_folder.folder import RANKING, RunFolder
from soseleto.run_folder.ranking import feature_columns, suggested_labels

Record = dict[str, Any]


@dataclass(frozen=True)
class RunFiles:
    """One run as its files tell it; ``ranking`` is None while the run has not ended."""

    name: str
    config: Record
    start: Record
    epochs: tuple[Record, ...]
    end: Record
    messages: tuple[str, ...]
    ranking: dict[str, np.ndarray] | None
    pictures: dict[str, bytes]  # by id, of the examples that are shown
    source: Record  # where it came from
    comparison: Record  # with other methods on the same data
    suspects: Record  # how the suspects were told from the others

    @property
    def last(self) -> Record:
        """The last epoch's record with the closing evaluation on top."""
        return {**(self.epochs[-1] if self.epochs else {}), **self.end}

    def series(self, key: str) -> np.ndarray:
        """One number of every epoch, NaN where a record has none; (E,)."""
        return np.array([as_number(record.get(key)) for record in self.epochs], dtype=float)

    def group(self, name: str, key: str, among: str = "groups") -> np.ndarray:
        """One number of a group of every epoch ("right" or "wrong"), NaN where it is missing; (E,)."""
        groups = (record.get(among) or {} for record in self.epochs)
        return np.array([as_number((group.get(name) or {}).get(key)) for group in groups], dtype=float)

    def column(self, name: str) -> np.ndarray | None:
        """A column of the ranking, or None."""
        return None if self.ranking is None else self.ranking.get(name)

    @cached_property
    def suggested(self) -> np.ndarray | None:
        """Another label for each suspect of the ranking."""
        return None if self.ranking is None else suggested_labels(self.ranking)

    @property
    def features(self) -> dict[str, str]:
        """The feature columns, ``x0`` first, by their names in the source."""
        return feature_columns(self.ranking or {}, self.source)


def read(path: str | os.PathLike[str]) -> RunFiles:
    """Read a run folder; one that has not ended is read as far as it goes."""
    folder = RunFolder.open(path)
    records = folder.metrics()
    return RunFiles(
        name=folder.path.resolve().name,
        config=folder.config(),
        start=_first(records, "start"),
        epochs=tuple(record for record in records if record.get("event") == "epoch"),
        end=_first(records, "end"),
        messages=_messages(records),
        ranking=folder.ranking() if (folder.path / RANKING).exists() else None,
        pictures=thumbnails.load(folder),
        source=folder.source(),
        comparison=folder.comparison() or {},
        suspects=folder.suspects() or {},
    )


def _first(records: list[Record], event: str) -> Record:
    return next((record for record in records if record.get("event") == event), {})


def _messages(records: list[Record]) -> tuple[str, ...]:
    """What the run had to say, each sentence once, in order."""
    said = [str(text) for text in _first(records, "start").get("messages") or []]
    said += [str(record.get("text", "")) for record in records if record.get("event") == "message"]
    return tuple(dict.fromkeys(said))


def as_number(value: object) -> float:
    """NaN where it is none."""
    return float(value) if isinstance(value, int | float) else float("nan")
