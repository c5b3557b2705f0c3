"""Columns of a table: what the cells of each kind become, fitted on the source alone.

``read`` gives the numbers that are stored for every example (``names`` of them); ``ramps`` and ``codes`` say what the
model gets of those: pieces of a piecewise-linear encoding, and one place for each category.
"""

from __future__ import annotations

import re
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch

from soseleto.data import cells
from soseleto.data.cells import Kind
from soseleto.data.preprocess import SHARE, rounded_away

BINS = 8  # of a number's piecewise-linear encoding; more of them help to memorise wrong labels
PER_BIN = 60  # examples: a small source gets fewer bins
FEWEST = 3  # examples of a category that gets a place of its own
MOST = 250  # categories with a place of their own; scikit-learn's boosting takes 255 codes
LARGEST = float(np.finfo(np.float32).max)
OTHER, GONE, FIRST = 0, 1, 2  # codes: a rare or unseen category, a missing one, the first known one
BUCKETS = 2048  # of hashed words
TEXT_LENGTH = 6.0  # norm of a text as the model gets it: a linear model learns in time at the learning rate of 0.03
_TEXTS = 4096  # texts whose counts are in memory together
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?", re.UNICODE)


class Ramp(NamedTuple):
    """clamp((x - low)·scale, least, most) of one stored number."""

    low: float
    scale: float
    least: float
    most: float


_UNCHANGED = Ramp(0.0, 1.0, -np.inf, np.inf)


class Column(ABC):
    """A column of a table, fitted on the source."""

    kind: ClassVar[str]
    name: str

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stored numbers."""
        return (self.name,)

    @property
    def has_gaps(self) -> bool:
        """Whether a missing value is stored as such; otherwise it is a usual one."""
        return True

    def formatted_as(self, column: Any) -> Self:
        """A copy for another table's whole column, which may spell its values otherwise."""
        return self

    @abstractmethod
    def read(self, column: Any) -> np.ndarray:
        """The stored numbers of a pyarrow column, (N, len(names))."""

    def unusable(self, column: Any) -> np.ndarray:
        """(N,) whether a value is present but not of this kind, from a pyarrow column."""
        return np.zeros(len(column), dtype=bool)

    def outside(self, column: Any) -> np.ndarray:
        """(N,) whether a number or a date is outside the source's range, from a pyarrow column."""
        return np.zeros(len(column), dtype=bool)

    @abstractmethod
    def missing(self) -> tuple[float, ...]:
        """What is stored for a missing value."""

    @abstractmethod
    def ramps(self) -> list[list[Ramp]]:
        """For each stored number, its pieces."""

    def codes(self) -> list[int]:
        """The values of the first stored number that have a place of their own."""
        return []

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values."""
        return {"kind": self.kind, **asdict(self)}  # type: ignore[call-overload]


@dataclass(frozen=True)
class Number(Column):
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
    kind: ClassVar[str] = "number"

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
        fill, gaps = float(np.median(known)), bool(np.isnan(values).any())
        return cls(name, fill, centre, spread, tuple(map(float, edges)), gaps, exact)

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, f"{self.name} is missing") if self.gaps else (self.name,)

    @property
    def has_gaps(self) -> bool:
        return self.gaps

    def read(self, column: Any) -> np.ndarray:
        return self.fill_in(cells.numbers(column).values)

    def unusable(self, column: Any) -> np.ndarray:
        return cells.numbers(column).is_word

    def outside(self, column: Any) -> np.ndarray:
        return self.beyond(cells.numbers(column).values)

    def beyond(self, values: np.ndarray) -> np.ndarray:
        """(N,) whether a value is outside the source's range; a missing one is not."""
        with np.errstate(over="ignore"):
            values = values if self.exact else values.astype(np.float32)
        return (values < self.edges[0]) | (values > self.edges[-1])

    def fill_in(self, values: np.ndarray) -> np.ndarray:
        gone = np.isnan(values)
        with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite, which is checked later
            filled = np.where(gone, self.fill, values).astype(np.float64 if self.exact else np.float32)
        return np.stack([filled, gone.astype(filled.dtype)], axis=1) if self.gaps else filled[:, None]

    def missing(self) -> tuple[float, ...]:
        return (self.fill, 1.0) if self.gaps else (self.fill,)

    def ramps(self) -> list[list[Ramp]]:
        """The first piece is the standardised value itself."""
        pieces = [Ramp(self.centre, 1 / self.spread, -5.0, 5.0)]
        pieces += [Ramp(low, 1 / (high - low), 0.0, 1.0) for low, high in pairwise(self.edges)]
        return [pieces, [_UNCHANGED]] if self.gaps else [pieces]


@dataclass(frozen=True)
class Category(Column):
    """One of a few words: its code; rare and unseen ones share a code, and missing ones have their own."""

    name: str
    values: tuple[str, ...]
    kind: ClassVar[str] = "category"

    @classmethod
    def fit(cls, name: str, text: Any) -> Self:
        frequent = [value for value, count in cells.counts_of(text) if count >= FEWEST]
        return cls(name, tuple(frequent[:MOST]))

    def read(self, column: Any) -> np.ndarray:
        code_of = self._code_of()
        encoded = cells.words(column).dictionary_encode()
        words = encoded.dictionary.to_pylist()
        codes = np.array([*(code_of.get(word, code_of.get(cells.one_spelling(word), OTHER)) for word in words), GONE])
        at = encoded.indices.fill_null(len(codes) - 1).to_numpy(zero_copy_only=False)
        return codes[at].astype(np.float32)[:, None]

    def unusable(self, column: Any) -> np.ndarray:
        """Rare and unseen values."""
        return np.asarray(self.read(column)[:, 0] == OTHER) if self.values else super().unusable(column)

    def _code_of(self) -> dict[str, int]:
        """The codes of the values as the source spells them, and as every file format would."""
        codes = {value: FIRST + at for at, value in enumerate(self.values)}
        spellings = Counter(map(cells.one_spelling, codes))
        unique = {cells.one_spelling(value): code for value, code in codes.items()}
        return {spelling: code for spelling, code in unique.items() if spellings[spelling] == 1} | codes

    def missing(self) -> tuple[float, ...]:
        return (float(GONE),)

    def ramps(self) -> list[list[Ramp]]:
        return [[]]

    def codes(self) -> list[int]:
        return list(range(FIRST + len(self.values)))


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

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for part in self.parts for name in part.names)

    @property
    def has_gaps(self) -> bool:
        return self.parts[0].gaps

    def formatted_as(self, column: Any) -> Self:
        return replace(self, format=cells.format_of(column, self.format))

    def read(self, column: Any) -> np.ndarray:
        return np.concatenate([part.fill_in(values) for part, values in self._values(column)], axis=1)

    def _values(self, column: Any) -> list[tuple[Number, np.ndarray]]:
        parts = _date_parts(cells.times(column, self.format))
        return [(part, parts[part.name[len(self.name) + 1 :]]) for part in self.parts]

    def outside(self, column: Any) -> np.ndarray:
        part, values = self._values(column)[0]
        return part.beyond(values)

    def unusable(self, column: Any) -> np.ndarray:
        present = cells.words(column).is_valid().to_numpy(zero_copy_only=False)
        return np.asarray(np.isnat(cells.times(column, self.format)) & present)

    def missing(self) -> tuple[float, ...]:
        return tuple(value for part in self.parts for value in part.missing())

    def ramps(self) -> list[list[Ramp]]:
        return [pieces for part in self.parts for pieces in part.ramps()]


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

    idf: log((1 + N) / (1 + n_b)) + 1, where n_b texts have a word or pair in bucket b
    """

    name: str
    idf: tuple[float, ...]
    kind: ClassVar[str] = "text"

    @classmethod
    def fit(cls, name: str, text: Any, buckets: int = BUCKETS) -> Self:
        texts, present = text.to_pylist(), np.zeros(buckets)
        for first in range(0, len(texts), _TEXTS):
            present += (_hashed_counts(texts[first : first + _TEXTS], buckets) != 0).sum(axis=0)
        idf = np.log((1 + len(texts)) / (1 + present)) + 1
        return cls(name, tuple(round(float(value), 6) for value in idf))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.name} #{bucket}" for bucket in range(len(self.idf)))

    def read(self, column: Any) -> np.ndarray:
        texts = cells.words(column).to_pylist()
        weighted = _hashed_counts(texts, len(self.idf)) * np.asarray(self.idf, dtype=np.float32)
        length = np.linalg.norm(weighted, axis=1, keepdims=True)
        return np.asarray(weighted / np.maximum(length, 1e-12), dtype=np.float32)

    def missing(self) -> tuple[float, ...]:
        return (0.0,) * len(self.idf)

    def ramps(self) -> list[list[Ramp]]:
        return [[Ramp(0.0, TEXT_LENGTH, -np.inf, np.inf)] for _ in self.idf]


def words_and_pairs(text: str) -> list[str]:
    """Words in lower case, and pairs of neighbouring words.

    >>> words_and_pairs("Not bad, at all!")
    ['not', 'bad', 'at', 'all', 'not bad', 'bad at', 'at all']
    """
    words = _WORD.findall(text.lower())
    return words + [f"{first} {second}" for first, second in pairwise(words)]


def _hashed_counts(texts: Iterable[str | None], buckets: int) -> np.ndarray:
    """(N, buckets) float32: signed counts of words and pairs by their hash."""
    rows = [words_and_pairs(text or "") for text in texts]
    counts = np.zeros((len(rows), buckets), dtype=np.float32)
    for row, words in enumerate(rows):
        for word in words:
            code = zlib.crc32(word.encode())
            counts[row, code % buckets] += 1.0 if code & 0x8000_0000 else -1.0
    return counts


def fit_column(name: str, column: Any, kind: Kind) -> Column:
    if kind.name == "number":
        return Number.fit(name, cells.numbers(column).values)
    if kind.name == "date":
        return Date.fit(name, column, kind.format)
    if kind.name == "text":
        return Text.fit(name, cells.words(column))
    return Category.fit(name, cells.words(column))


def column_from_dict(fields: Mapping[str, Any]) -> Column:
    """What ``Column.to_dict`` wrote."""
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    kind = str(values.pop("kind"))
    if kind == Date.kind:
        values["parts"] = tuple(Number(**{**part, "edges": tuple(part["edges"])}) for part in values["parts"])
    cls: type[Column] = {one.kind: one for one in (Number, Category, Date, Text)}[kind]
    return cls(**values)
