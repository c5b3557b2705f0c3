"""The queue of a review (the suspects, most suspicious first) or of an audit, and typical examples of the classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from soseleto.errors import UsageError
from soseleto.run_folder import thumbnails
from soseleto.run_folder.files import readable
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.ranking import ClassRows, by_class, feature_columns, suggested_labels, suspect_rows

TYPICAL = 6  # examples shown of each class
PICTURED = 20  # the first examples of an audit, whose pictures must be there
LARGEST = 1024  # longer side in pixels of an image read from the data


@dataclass(frozen=True)
class Queue:
    """The rows of a ranking under review, and what is shown with each.

    blind: the answers of an audit must not be led by the model, so its opinion is not shown
    """

    ranking: Mapping[str, np.ndarray]
    rows: np.ndarray
    pictures: Mapping[str, bytes]
    classes: tuple[str, ...]
    suggested: np.ndarray | None
    features: Mapping[str, str]  # column -> name in the source
    blind: bool = False
    basis: str = ""  # of the probabilities
    noun: str = "Suspect"

    @classmethod
    def of(cls, run: RunFolder) -> Queue:
        with readable(run.path):
            return cls._of(run)

    @classmethod
    def _of(cls, run: RunFolder) -> Queue:
        ranking = _ranking(run)
        rows = suspect_rows(ranking)
        if not len(rows):
            low = "no low weights" if run.config().get("mode") == "transfer" else "no suspects"
            raise UsageError(f"{run.path} has {low}: there is nothing to review.")
        return cls._make(run, ranking, rows)

    @classmethod
    def of_sample(cls, run: RunFolder, ids: Sequence[str]) -> Queue:
        """The examples of an audit, in this order."""
        ranking = _ranking(run)
        place = {str(name): row for row, name in enumerate(ranking["id"])}
        made = replace(cls._make(run, ranking, np.array([place[name] for name in ids])), suggested=None, blind=True)
        missing = made.pictures and "path" not in ranking and any(name not in made.pictures for name in ids[:PICTURED])
        if missing:
            raise UsageError(
                f"{run.path} has no pictures of this sample, only of that with --seed 0: leave --seed out, and delete "
                "audit.json."
            )
        return made

    @classmethod
    def _make(cls, run: RunFolder, ranking: Mapping[str, np.ndarray], rows: np.ndarray) -> Queue:
        transfer = run.config().get("mode") == "transfer"
        return cls(
            ranking=ranking,
            rows=rows,
            pictures=thumbnails.load(run),
            classes=_classes(run, ranking),
            suggested=None if transfer else suggested_labels(ranking),
            features=feature_columns(ranking, run.source()),
            basis=(run.suspects() or {}).get("probability_basis", ""),
            noun="Low weight" if transfer else "Suspect",
        )

    def id_of(self, row: int) -> str:
        return str(self.ranking["id"][row])

    def to_json(self) -> dict[str, Any]:
        """Everything the page needs except the images."""
        return {
            "classes": list(self.classes),
            "items": [self._item(int(row)) for row in self.rows],
            "like": {one.label: [int(row) for row in one.least_suspicious[:TYPICAL]] for one in self._by_class()},
            "pictures": bool(self.pictures) or "path" in self.ranking,
            "features": list(self.features.values()),
            "typical": self._typical(),
            "basis": self.basis,
            "noun": self.noun,
        }

    def picture(self, row: int) -> bytes | None:
        """The image from its own file where it still exists, else the thumbnail in the run folder."""
        small = self.pictures.get(self.id_of(row))
        path = self.ranking.get("path")
        return (None if path is None else thumbnails.from_file(str(path[row]), LARGEST)) or small

    def _by_class(self) -> list[ClassRows]:
        return by_class(self.ranking, each=TYPICAL, most=len(self.classes) + 1)

    def _item(self, row: int) -> dict[str, Any]:
        item: dict[str, Any] = {"row": row, "id": self.id_of(row), "label": str(self.ranking["label"][row])}
        item["suggested"] = None if self.suggested is None else self.suggested[row]
        for name, column in (("wrong", "mislabelled_probability"), ("weight", "weight"), ("score", "score")):
            shown = column in self.ranking and not self.blind
            item[name] = _finite(self.ranking[column][row]) if shown else None
        item["values"] = [_shown(self.ranking[name][row]) for name in self.features]
        item["against"] = self._against(row)
        return item

    def _against(self, row: int) -> list[int]:
        """The places of the features that speak most against the label; none in an audit."""
        if "against" not in self.ranking or self.blind:
            return []
        names, found = list(self.features.values()), []
        text = f"{self.ranking['against'][row]}, "
        while text:  # names may have commas: the longest that fits
            fits = [name for name in names if text.startswith(f"{name}, ")]
            name = max(fits, key=len, default=text.partition(", ")[0])  # or a column that is not shown
            text = text[len(name) + 2 :]
            found += [names.index(name)] if fits else []
        return found

    def _typical(self) -> dict[str, list[float | str | None]]:
        """Per class, the medians of the features, or the most frequent words, over the better half of its examples."""
        labels, medians = self.ranking["label"].astype(str), {}
        for name in self.classes if self.features else ():
            rows = np.flatnonzero(labels == name)
            rows = rows[: -(-len(rows) // 2)]
            medians[name] = [_middle(self.ranking[x][rows]) if len(rows) else None for x in self.features]
        return medians


def _ranking(run: RunFolder) -> dict[str, np.ndarray]:
    ranking = run.ranking()
    if ranking["label"].dtype.kind == "f":
        raise UsageError(f"the labels of {run.path} are real numbers: only classes can be reviewed.")
    return ranking


def _classes(run: RunFolder, ranking: Mapping[str, np.ndarray]) -> tuple[str, ...]:
    """Class names in the run's order, followed by names that occur only in labels or suggestions."""
    config, suggested = run.config(), suggested_labels(ranking)
    known = [] if config.get("mode") == "transfer" else config.get("classes") or []  # not the target's
    names = [str(name) for name in known]
    names += [one.label for one in by_class(ranking, most=len(ranking["label"]))]
    return tuple(dict.fromkeys([*names, *sorted({*(suggested if suggested is not None else ())} - {None})]))


def _middle(values: np.ndarray) -> float | str | None:
    """The median of numbers, the most frequent of words."""
    if values.dtype.kind == "f":
        known = values[np.isfinite(values)]
        return _finite(np.median(known)) if len(known) else None
    names, counts = np.unique(values.astype(str), return_counts=True)
    return str(names[counts.argmax()])


def _shown(value: Any) -> float | str | None:
    return value if isinstance(value, str) else _finite(value)


def _finite(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None
