"""Columns of a table: what the cells of each kind become, fitted on the source alone.

``read`` gives the numbers that are stored for every example, which ``places`` describes one by one: the model gets
pieces of a piecewise-linear encoding of some, and one place for each category of others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from soseleto.data import cells
from soseleto.data.cells import Kind
from soseleto.errors import need

BINS = 8  # of a number's piecewise-linear encoding; more of them help to memorise wrong labels
PER_BIN = 60  # examples: a small source gets fewer bins
FEWEST = 3  # examples of a category that gets a place of its own
MOST = 250  # categories with a place of their own; scikit-learn's boosting takes 255 codes
LARGEST = float(np.finfo(np.float32).max)
OTHER, GONE, FIRST = 0, 1, 2  # codes: a rare or unseen category, a missing one, the first known one
BUCKETS = 2048  # of hashed words
TEXT_LENGTH = 6.0  # norm of a text as the model gets it: a linear model learns in time at the learning rate of 0.03
_WORD = r"[^\W_]+(?:'[^\W_]+)?"


class Ramp(NamedTuple):
    """clamp((x - low)·scale, least, most) of one stored number."""

    low: float
    scale: float
    least: float = -np.inf
    most: float = np.inf


class Place(NamedTuple):
    """One stored number: its name, what is stored for a missing value alone, and what the model gets of it.

    missing: NaN where a missing value is stored as a usual one
    codes: the values that have a place of their own
    """

    name: str
    missing: float
    ramps: tuple[Ramp, ...] = ()
    codes: tuple[int, ...] = ()


class Column(ABC):
    """A column of a table, fitted on the source."""

    kind: ClassVar[str]
    name: str

    @abstractmethod
    def places(self) -> list[Place]:
        """The stored numbers."""

    @abstractmethod
    def read(self, column: Any) -> np.ndarray:
        """The stored numbers of a pyarrow column, (N, len(places))."""

    def check(self, column: Any) -> tuple[np.ndarray, np.ndarray]:
        """(N,) each: whether a value is present but not of this kind, and whether it is outside the source's range."""
        return np.zeros(len(column), dtype=bool), np.zeros(len(column), dtype=bool)

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Number(Column):
    """A number: its value with the median in place of a missing one, and whether it was missing.

    edges: quantiles of the source, between which the encoding rises from 0 to 1
    """

    name: str
    fill: float
    centre: float
    spread: float
    edges: tuple[float, ...]
    gaps: bool
    kind: ClassVar[str] = "number"

    @classmethod
    def fit(cls, name: str, values: np.ndarray) -> Self:
        """values: (N,) float64 of the source, NaN where missing."""
        known = values[np.abs(values) <= LARGEST]  # not NaN
        if not len(known):
            known = np.zeros(1)
        shares = np.linspace(0, 1, max(2, min(BINS, len(known) // PER_BIN)) + 1)
        centre, spread = float(known.mean()), float(known.std())
        spread = spread if spread > 1e-6 * (1 + abs(centre)) else 1.0
        edges = np.unique(np.quantile(known, shares).astype(np.float32))
        fill, gaps = float(np.median(known)), bool(np.isnan(values).any())
        return cls(name, fill, centre, spread, tuple(map(float, edges)), gaps)

    def places(self) -> list[Place]:
        """The first piece is the standardised value itself."""
        pieces = [Ramp(self.centre, 1 / self.spread, -5.0, 5.0)]
        pieces += [Ramp(low, 1 / (high - low), 0.0, 1.0) for low, high in pairwise(self.edges)]
        if not self.gaps:
            return [Place(self.name, float("nan"), tuple(pieces))]
        gap = Place(f"{self.name} is missing", 1.0, (Ramp(0.0, 1.0),))
        return [Place(self.name, self.fill, tuple(pieces)), gap]

    def read(self, column: Any) -> np.ndarray:
        return self.fill_in(cells.numbers(column).values)

    def check(self, column: Any) -> tuple[np.ndarray, np.ndarray]:
        numbers = cells.numbers(column)
        return numbers.is_word, self.beyond(numbers.values)

    def beyond(self, values: np.ndarray) -> np.ndarray:
        """(N,) whether a value is outside the source's range; a missing one is not."""
        with np.errstate(over="ignore"):
            values = values.astype(np.float32)
        return (values < self.edges[0]) | (values > self.edges[-1])

    def fill_in(self, values: np.ndarray) -> np.ndarray:
        gone = np.isnan(values)
        with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite, which is checked later
            filled = np.where(gone, self.fill, values).astype(np.float32)
        return np.stack([filled, gone.astype(filled.dtype)], axis=1) if self.gaps else filled[:, None]


@dataclass(frozen=True)
class Category(Column):
    """One of a few words: its code; rare and unseen ones share a code, and missing ones have their own."""

    name: str
    values: tuple[str, ...]
    kind: ClassVar[str] = "category"

    @classmethod
    def fit(cls, name: str, column: Any) -> Self:
        frequent = [value for value, count in cells.counts_of(cells.categories(column)) if count >= FEWEST]
        return cls(name, tuple(frequent[:MOST]))

    def places(self) -> list[Place]:
        return [Place(self.name, GONE, codes=tuple(range(FIRST + len(self.values))))]

    def read(self, column: Any) -> np.ndarray:
        code_of = {value: FIRST + at for at, value in enumerate(self.values)}
        encoded = cells.categories(column).dictionary_encode()
        codes = np.array([*(code_of.get(word, OTHER) for word in encoded.dictionary.to_pylist()), GONE])
        at = encoded.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)
        return codes[at].astype(np.float32)[:, None]

    def check(self, column: Any) -> tuple[np.ndarray, np.ndarray]:
        """Rare and unseen values are unusable."""
        none, _ = super().check(column)
        return (self.read(column)[:, 0] == OTHER if self.values else none), none


@dataclass(frozen=True)
class Date(Column):
    """A day or time: days since 1970, month, day of the week and hour, each a number."""

    name: str
    format: str | None  # of the source's words; None where its file has times
    parts: tuple[Number, ...]
    kind: ClassVar[str] = "date"

    @classmethod
    def fit(cls, name: str, column: Any, format: str | None) -> Self:
        parts = _date_parts(cells.times(column, format))
        varied = {part: values for part, values in parts.items() if np.nanmin(values) < np.nanmax(values)}
        kept = varied or {"day": parts["day"]}
        return cls(name, format, tuple(Number.fit(f"{name} {part}", values) for part, values in kept.items()))

    def places(self) -> list[Place]:
        return [place for part in self.parts for place in part.places()]

    def read(self, column: Any) -> np.ndarray:
        return np.concatenate([part.fill_in(values) for part, values in self._values(column)], axis=1)

    def check(self, column: Any) -> tuple[np.ndarray, np.ndarray]:
        present = cells.words(column).is_valid().to_numpy(zero_copy_only=False)
        part, values = self._values(column)[0]
        return np.isnan(values) & present, part.beyond(values)

    def _values(self, column: Any) -> list[tuple[Number, np.ndarray]]:
        parts = _date_parts(cells.times(column, self.format))
        return [(part, parts[part.name[len(self.name) + 1 :]]) for part in self.parts]


def _date_parts(moments: np.ndarray) -> dict[str, np.ndarray]:
    gone = np.isnat(moments)
    known = np.where(gone, np.datetime64(0, "s"), moments)
    days = known.astype("datetime64[D]").astype(np.int64)
    parts = {
        "day": days,
        "month": known.astype("datetime64[M]").astype(np.int64) % 12 + 1,
        "weekday": (days + 3) % 7,  # 1 January 1970 was a Thursday
        "hour": (known.astype(np.int64) - 86_400 * days) / 3600,
    }
    return {part: np.where(gone, np.nan, values) for part, values in parts.items()}


@dataclass(frozen=True)
class Text(Column):
    """Free text as a hashed bag of words and pairs of neighbouring words: no vocabulary, no download.

        x_b = s_b / ‖s‖,   s_b = Σ over words and pairs w with hash b of ±1 · idf_b

    A text of any length becomes one vector of unit length; an empty one is all zeros.

    rarity: idf_b = log((1 + N) / (1 + n_b)) + 1, where n_b texts have a word or pair in bucket b
    """

    name: str
    rarity: tuple[float, ...]
    kind: ClassVar[str] = "text"

    @classmethod
    def fit(cls, name: str, column: Any, buckets: int = BUCKETS) -> Self:
        present = np.bincount(_hashed_counts(column, buckets).indices, minlength=buckets)
        rarity = np.log((1 + len(column)) / (1 + present)) + 1
        return cls(name, tuple(round(float(value), 6) for value in rarity))

    def places(self) -> list[Place]:
        return [Place(f"{self.name} #{bucket}", 0.0, (Ramp(0.0, TEXT_LENGTH),)) for bucket in range(len(self.rarity))]

    def read(self, column: Any) -> np.ndarray:
        weighted = _hashed_counts(column, len(self.rarity)).multiply(np.asarray(self.rarity, dtype=np.float32))
        normalize = need("sklearn.preprocessing", to="reading texts").normalize
        return np.asarray(normalize(weighted.tocsr()).toarray(), dtype=np.float32)


def _hashed_counts(column: Any, buckets: int) -> Any:
    """(N, buckets) sparse: signed counts of words and pairs, in lower case, by their hash."""
    vectorizer = need("sklearn.feature_extraction.text", to="reading texts").HashingVectorizer(
        n_features=buckets, ngram_range=(1, 2), token_pattern=_WORD, norm=None, dtype=np.float32
    )
    counts = vectorizer.transform(text or "" for text in cells.words(column).to_pylist())
    counts.eliminate_zeros()  # of words whose signs differ
    return counts


def fit_column(name: str, column: Any, kind: Kind) -> Column:
    if kind.name == "number":
        return Number.fit(name, cells.numbers(column).values)
    if kind.name == "date":
        return Date.fit(name, column, kind.format)
    return (Text if kind.name == "text" else Category).fit(name, column)


def column_from_dict(fields: Mapping[str, Any]) -> Column:
    """What ``Column.to_dict`` wrote."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    kind = str(values.pop("kind"))
    if kind == Date.kind:
        values["parts"] = tuple(Number(**{**part, "edges": tuple(part["edges"])}) for part in values["parts"])
    cls: type[Column] = {one.kind: one for one in (Number, Category, Date, Text)}[kind]
    return cls(**values)
