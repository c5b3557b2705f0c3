"""What a reviewer is shown: the suspects, most suspicious first, and what their classes usually look like."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from soseleto.errors import UsageError
from soseleto.run_folder import thumbnails
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.ranking import ClassRows, by_class, feature_columns, suggested_labels, suspect_rows

LIKE_THESE = 6  # examples that show what a class looks like
LARGEST = 1024  # pixels of a picture read from the data itself


@dataclass(frozen=True)
class Queue:
    """The rows of a ranking to go through, and what is shown beside each."""

    ranking: Mapping[str, np.ndarray]
    rows: np.ndarray
    pictures: Mapping[str, bytes]
    classes: tuple[str, ...]
    suggested: np.ndarray | None
    features: Mapping[str, str]  # columns by their names

    @classmethod
    def of(cls, run: RunFolder) -> Queue:
        ranking = run.ranking()
        if ranking["label"].dtype.kind == "f":
            raise UsageError(f"the labels of {run.path} are real numbers: a review needs classes.")
        rows = suspect_rows(ranking)
        if not len(rows):
            raise UsageError(f"{run.path} has no suspects: there is nothing to review.")
        return cls(
            ranking=ranking,
            rows=rows,
            pictures=thumbnails.load(run),
            classes=_classes(run, ranking),
            suggested=suggested_labels(ranking),
            features=feature_columns(ranking, run.source()),
        )

    def id_of(self, row: int) -> str:
        return str(self.ranking["id"][row])

    def to_json(self) -> dict[str, Any]:
        """Everything the page needs before it asks for pictures."""
        return {
            "classes": list(self.classes),
            "items": [self._item(int(row)) for row in self.rows],
            "like": {one.label: [int(row) for row in one.least_suspicious[:LIKE_THESE]] for one in self._by_class()},
            "pictures": bool(self.pictures) or "path" in self.ranking,
            "features": list(self.features.values()),
            "usual": self._usual(),
        }

    def picture(self, row: int) -> bytes | None:
        """The example itself where its file is still there, else the small picture of the run."""
        small = self.pictures.get(self.id_of(row))
        path = self.ranking.get("path")
        return (None if path is None else _from_file(str(path[row]))) or small

    def _by_class(self) -> list[ClassRows]:
        return by_class(self.ranking, each=LIKE_THESE, most=len(self.classes) + 1)

    def _item(self, row: int) -> dict[str, Any]:
        item: dict[str, Any] = {"row": row, "id": self.id_of(row), "label": str(self.ranking["label"][row])}
        item["suggested"] = None if self.suggested is None else self.suggested[row]
        for name, column in (("wrong", "mislabelled_probability"), ("weight", "weight"), ("score", "score")):
            item[name] = _finite(self.ranking[column][row]) if column in self.ranking else None
        item["values"] = [_finite(self.ranking[name][row]) for name in self.features]
        return item

    def _usual(self) -> dict[str, list[float | None]]:
        """By class, the medians of its features over the better half of its examples."""
        labels, usual = self.ranking["label"].astype(str), {}
        for name in self.classes if self.features else ():
            rows = np.flatnonzero(labels == name)
            rows = rows[: -(-len(rows) // 2)]
            usual[name] = [_finite(np.median(self.ranking[x][rows])) if len(rows) else None for x in self.features]
        return usual


def _classes(run: RunFolder, ranking: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """The class names there are, as the run knew them; else those that somebody carries."""
    config, suggested = run.config(), suggested_labels(ranking)
    known = [] if config.get("mode") == "transfer" else config.get("classes") or []  # there the target's own
    names = [str(name) for name in known]
    names += [one.label for one in by_class(ranking, most=len(ranking["label"]))]
    return tuple(dict.fromkeys([*names, *sorted({*(suggested if suggested is not None else ())} - {None})]))


def _from_file(path: str) -> bytes | None:
    """Decoded and encoded anew, so that nothing but a picture ever leaves; None where it cannot be read."""
    from PIL import Image

    if not os.path.isfile(path):  # reading a pipe would never end
        return None
    try:
        with Image.open(path) as image:
            image.seek(0)
            return thumbnails.shrink(image.convert("RGB"), LARGEST)
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError):
        return None


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
