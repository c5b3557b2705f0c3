"""Fitted columns: what a number, a category, a date or a text of a table becomes.

``read`` makes the numbers that are stored for every example (``names`` of them); ``outputs`` says what the model gets
of those: pieces of a piecewise-linear encoding, and one place for each category.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from soseleto.data.precision import SHARE, rounded_away
from soseleto.data.table_columns import hashed_words
from soseleto.data.table_columns.dates import spelling, times
from soseleto.data.table_columns.values import counts_of, numbers, plain, words

BINS = 8  # of a number's piecewise-linear encoding; more of them help to memorise wrong labels
PER_BIN = 60  # examples: a small source gets fewer bins
FEWEST = 3  # examples of a category that gets a place of its own
MOST = 250  # categories with a place of their own; scikit-learn's boosting takes 255 codes
LARGEST = float(np.finfo(np.float32).max)
OTHER, GONE, FIRST = 0, 1, 2  # codes: a rare or unseen category, a missing one, the first known one


class Ramp(NamedTuple):
    """clamp((x - low)·scale, least, most) of one stored number."""

    low: float
    scale: float
    least: float
    most: float


@dataclass(frozen=True)
class Number:
    """A number: its value with the median in place of a missing one, and whether it was missing.

    edges: quantiles of the source, between which the encoding rises from 0 to 1
    exact: stored and encoded in float64, for numbers such as Unix times that float32 would round away
    """

    name: str
    fill: float
    centre: float
    spread: float
    edges: tuple[float, ...]
    gaps: bool
    exact: bool = False

    @classmethod
    def fit(cls, name: str, values: np.ndarray) -> Self:
        """values: (N,) float64 of the source, NaN where missing."""
        known = values[np.abs(values) <= LARGEST]  # not NaN
        if not len(known):
            known = np.zeros(1)
        shares = np.linspace(0, 1, max(2, min(BINS, len(known) // PER_BIN)) + 1)
        centre, spread = float(known.mean()), float(known.std())
        spread = spread if spread > 1e-10 * (1 + abs(centre)) else 1.0
        exact = rounded_away(torch.from_numpy(known)[:, None], torch.tensor([SHARE * spread]))
        if not exact and spread <= 1e-6 * (1 + abs(centre)):
            spread = 1.0
        edges = np.unique(np.quantile(known, shares).astype(np.float64 if exact else np.float32))
        return cls(
            name,
            fill=float(np.median(known)),
            centre=centre,
            spread=spread,
            edges=tuple(float(edge) for edge in edges),
            gaps=bool(np.isnan(values).any()),
            exact=exact,
        )

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, f"{self.name} is missing") if self.gaps else (self.name,)

    def read(self, column: Any) -> np.ndarray:
        return self.fill_in(numbers(column).values)

    def fill_in(self, values: np.ndarray) -> np.ndarray:
        gone = np.isnan(values)
        with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite, which is checked later
            filled = np.where(gone, self.fill, values).astype(np.float64 if self.exact else np.float32)
        return np.stack([filled, gone.astype(filled.dtype)], axis=1) if self.gaps else filled[:, None]

    def gone(self, stored: Tensor) -> Tensor:
        """(N,) whether the value is missing, from the stored numbers."""
        return stored[:, 1] != 0 if self.gaps else torch.zeros(len(stored), dtype=torch.bool)

    def missing(self) -> tuple[float, ...]:
        """What is stored for a missing value."""
        return (self.fill, 1.0) if self.gaps else (self.fill,)

    def ramps(self) -> list[list[Ramp]]:
        """For each stored number, its pieces; the first is the standardised value itself."""
        pieces = [Ramp(self.centre, 1 / self.spread, -5.0, 5.0)]
        pieces += [Ramp(low, 1 / (high - low), 0.0, 1.0) for low, high in pairwise(self.edges)]
        return [pieces, [_AS_IT_IS]] if self.gaps else [pieces]

    def matches(self) -> list[int]:
        return []


_AS_IT_IS = Ramp(0.0, 1.0, -np.inf, np.inf)


@dataclass(frozen=True)
class Category:
    """One of a few words: its code; rare and unseen ones share a code, and missing ones have their own."""

    name: str
    values: tuple[str, ...]

    @classmethod
    def fit(cls, name: str, text: Any) -> Self:
        frequent = [value for value, count in counts_of(text) if count >= FEWEST]
        return cls(name, tuple(frequent[:MOST]))

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, column: Any) -> np.ndarray:
        place = self._places()
        encoded = words(column).dictionary_encode()
        found = [place.get(value, place.get(plain(value), OTHER)) for value in encoded.dictionary.to_pylist()]
        codes = np.array([*found, GONE])
        at = encoded.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)
        return codes[at].astype(np.float32)[:, None]

    def _places(self) -> dict[str, int]:
        """The codes of the values as the source spells them, and as every file format would."""
        place = {value: FIRST + at for at, value in enumerate(self.values)}
        alike = Counter(map(plain, place))
        return {plain(value): code for value, code in place.items() if alike[plain(value)] == 1} | place

    def gone(self, stored: Tensor) -> Tensor:
        return stored[:, 0] == GONE

    def missing(self) -> tuple[float, ...]:
        return (float(GONE),)

    def ramps(self) -> list[list[Ramp]]:
        return [[]]

    def matches(self) -> list[int]:
        """The codes that have a place of their own."""
        return list(range(FIRST + len(self.values)))


@dataclass(frozen=True)
class Date:
    """A day or time: days since 1970, month, day of the week and hour, each a number."""

    name: str
    format: str | None  # of the source's words; None where its file has times
    parts: tuple[Number, ...]

    @classmethod
    def fit(cls, name: str, column: Any, format: str | None) -> Self:
        found = _parts(times(column, format))
        varied = {part: values for part, values in found.items() if np.nanmin(values) < np.nanmax(values)}
        kept = varied or {"day": found["day"]}
        return cls(name, format, tuple(Number.fit(f"{name} {part}", values) for part, values in kept.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names)

    def spelled_as(self, column: Any) -> Self:
        """A copy that reads the words or numbers of another table's column, all of which must be given."""
        return replace(self, format=spelling(column, self.format))

    def read(self, column: Any) -> np.ndarray:
        found = _parts(times(column, self.format))
        prefix = len(self.name) + 1
        return np.concatenate([part.fill_in(found[part.name[prefix:]]) for part in self.parts], axis=1)

    def gone(self, stored: Tensor) -> Tensor:
        return self.parts[0].gone(stored)

    def missing(self) -> tuple[float, ...]:
        return tuple(value for part in self.parts for value in part.missing())

    def ramps(self) -> list[list[Ramp]]:
        return [pieces for part in self.parts for pieces in part.ramps()]

    def matches(self) -> list[int]:
        return []


def _parts(moments: np.ndarray) -> dict[str, np.ndarray]:
    gone = np.isnat(moments)
    known = np.where(gone, np.datetime64(0, "s"), moments)
    days = known.astype("datetime64[D]").astype(np.int64)
    found = {
        "day": days,
        "month": known.astype("datetime64[M]").astype(np.int64) % 12 + 1,
        "weekday": (days + 3) % 7,  # 1 January 1970 was a Thursday
        "hour": (known.astype(np.int64) - 86_400 * days) / 3600,
    }
    return {part: np.where(gone, np.nan, values) for part, values in found.items()}


@dataclass(frozen=True)
class Text:
    """Free text: a hashed bag of words, see ``hashed_words``."""

    name: str
    idf: tuple[float, ...]

    @classmethod
    def fit(cls, name: str, text: Any, buckets: int = hashed_words.BUCKETS) -> Self:
        return cls(name, hashed_words.inverse_frequencies(text.to_pylist(), buckets))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.name} #{bucket}" for bucket in range(len(self.idf)))

    def read(self, column: Any) -> np.ndarray:
        return hashed_words.vectors(words(column).to_pylist(), self.idf)

    def gone(self, stored: Tensor) -> Tensor:
        return ~stored.any(1)

    def missing(self) -> tuple[float, ...]:
        return (0.0,) * len(self.idf)

    def ramps(self) -> list[list[Ramp]]:
        return [[Ramp(0.0, hashed_words.LENGTH, -np.inf, np.inf)] for _ in self.idf]

    def matches(self) -> list[int]:
        return []


Fitted = Number | Category | Date | Text
_KINDS: dict[str, type[Number] | type[Category] | type[Date] | type[Text]] = {
    "number": Number,
    "category": Category,
    "date": Date,
    "text": Text,
}


def to_dict(column: Fitted) -> dict[str, Any]:
    """JSON-compatible values."""
    kind = next(kind for kind, made in _KINDS.items() if type(column) is made)
    return {"kind": kind, **asdict(column)}


def from_dict(fields: dict[str, Any]) -> Fitted:
    kind, values = fields["kind"], {name: value for name, value in fields.items() if name != "kind"}
    if kind == "date":
        values["parts"] = tuple(_number(part) for part in values["parts"])
        return Date(**values)
    if kind == "number":
        return _number(values)
    if kind == "category":
        return Category(str(values["name"]), tuple(map(str, values["values"])))
    return Text(str(values["name"]), tuple(map(float, values["idf"])))


def _number(fields: dict[str, Any]) -> Number:
    return Number(**{**fields, "edges": tuple(map(float, fields["edges"]))})
