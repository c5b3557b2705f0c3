"""Examples to show: thumbnails where the run has them, table rows otherwise."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import numpy as np

from soseleto.report.files import RunFiles
from soseleto.run_folder import thumbnails
from soseleto.run_folder.ranking import best_count, most_suspicious_first, suspect_rows
from soseleto.run_folder.ranking import by_class as rows_by_class

STRONGEST = 24


@dataclass(frozen=True)
class Example:
    """One row of the ranking with its rank, and its thumbnail as a data URL where there is one."""

    row: dict[str, Any]
    picture: str


@dataclass(frozen=True)
class ClassGallery:
    """The best and the most suspicious examples of one class."""

    label: str
    count: int
    suspects: int
    best: list[Example]
    worst: list[Example]


def strongest_suspects(run: RunFiles) -> list[Example]:
    """The most suspicious examples of all classes; without suspects, those of the best list."""
    assert run.ranking is not None
    rows = suspect_rows(run.ranking)
    if not len(rows):
        rows = most_suspicious_first(run.ranking)[: best_count(run.suspects)]
    return examples(run, rows[:STRONGEST])


def by_class(run: RunFiles) -> tuple[list[ClassGallery], int]:
    """A gallery for each of the largest classes, and the number of classes left out."""
    assert run.ranking is not None
    found = [
        ClassGallery(one.label, one.count, one.suspects, examples(run, one.best), examples(run, one.worst))
        for one in rows_by_class(run.ranking)
    ]
    total = len(np.unique(run.ranking["label"].astype(str))) if found else 0
    return found, total - len(found)


def examples(run: RunFiles, rows: np.ndarray) -> list[Example]:
    """The given rows of the ranking as plain values."""
    assert run.ranking is not None
    columns = {name: values[rows].tolist() for name, values in run.ranking.items()}
    columns["suggested"] = [None] * len(rows) if run.suggested is None else run.suggested[rows].tolist()
    ranks = (rows + 1).tolist()
    return [
        _example({"rank": rank, **dict(zip(columns, values, strict=True))}, run.pictures)
        for rank, values in zip(ranks, zip(*columns.values(), strict=True), strict=True)
    ]


def _example(row: dict[str, Any], known: dict[str, bytes]) -> Example:
    picture = known.get(row["id"])
    if picture is None:
        return Example(row, "")
    return Example(row, f"data:{thumbnails.media_type(picture)};base64,{base64.b64encode(picture).decode()}")
