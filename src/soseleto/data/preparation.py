"""The preparation of a table: fitted on the source alone, kept in the run as JSON, and applied to every other table.

    prepared = TablePreparation.fit(source)      # a pyarrow table of features
    inputs = prepared.read(table)                # (N, D): what is stored for every example
    prepared(inputs)                             # (N, width) float32: what the model gets, on the inputs' device

Numbers become a piecewise-linear encoding between quantiles of the source (Gorishniy et al. 2022, "On Embeddings for
Numerical Features"), categories one place each; a linear layer on top of them is an embedding of either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from soseleto.data import cells, storage
from soseleto.data.columns import (
    LEFT_OUT,
    Category,
    Column,
    Date,
    Kind,
    Number,
    Text,
    column_from_dict,
    fit_column,
    kind_of,
)
from soseleto.data.storage import check_size
from soseleto.errors import DataError

_SHOWN = 3  # values of a column in the plan
_LONGEST = 24  # characters of a value in the plan


@dataclass(frozen=True)
class Seen:
    """What the source has in a column, for the plan: its kind, missing values and a few others."""

    name: str
    kind: str
    missing: int
    examples: tuple[str, ...]
    why: str = ""  # it is left out

    @classmethod
    def of(cls, name: str, column: Any, kind: Kind) -> Self:
        text = cells.words(column)
        missing, shown = text.null_count, [value for value, _ in cells.counts_of(text.slice(0, 10_000))[:_SHOWN]]
        if kind.name == "number":
            numbers = cells.numbers(column).values
            missing, known = np.isnan(numbers).sum(), numbers[np.isfinite(numbers)]
            if len(known):
                shown = [f"{known.min():.6g} to {known.max():.6g}", f"median {np.median(known):.6g}"]
        return cls(name, kind.name, int(missing), tuple(map(_shortened, shown)), kind.why)

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "examples": list(self.examples)}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        return cls(**{**fields, "examples": tuple(fields["examples"])})


def _shortened(value: str) -> str:
    value = " ".join(value.split())
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"


def plan_of(columns: Sequence[Seen]) -> list[str]:
    """The columns of a table as lines to print: column, kind, missing values, a few values."""
    rows = [("column", "kind", "missing", "values")]
    rows += [(seen.name, seen.kind, f"{seen.missing:,}", seen.why or ", ".join(seen.examples)) for seen in columns]
    wide = [max(len(row[at]) for row in rows) for at in range(3)]
    return [f"  {a:<{wide[0]}}  {b:<{wide[1]}}  {c:>{wide[2]}}  {d}".rstrip() for a, b, c, d in rows]


@dataclass(frozen=True)
class TablePreparation:
    """Fitted columns, in the order of the table; ``seen`` has all columns, also those that are left out."""

    columns: tuple[Column, ...]
    seen: tuple[Seen, ...] = ()
    _tensors: dict[str, tuple[Tensor, ...]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._tensors["cpu"] = self._encoding()  # now, since a tracing exporter would leave its own tensors here

    @classmethod
    def fit(cls, table: Any, labels: np.ndarray | None = None, kinds: Mapping[str, str] | None = None) -> Self:
        """Fit every column of a pyarrow table.

        labels: (N,) class indices; a column that repeats them is left out
        kinds: by column, "number", "category", "text" or "left out"; the others are inferred
        """
        columns: list[Column] = []
        seen: list[Seen] = []
        for name in table.column_names:
            kind = kind_of(name, table[name], labels, kinds or {})
            seen.append(Seen.of(name, table[name], kind))
            if kind.name != LEFT_OUT:
                columns.append(fit_column(name, table[name], kind))
        return cls(tuple(columns), tuple(seen))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stored numbers."""
        return tuple(name for column in self.columns for name in column.names)

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return tuple(column.name for column in self.columns)

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns that ``values_of`` gives."""
        return tuple(column.name for column in self.columns if not isinstance(column, Text))

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns of text."""
        return tuple(column.name for column in self.columns if isinstance(column, Text))

    @property
    def exact(self) -> bool:
        """Whether some numbers are stored and encoded in float64, since float32 would round them away."""
        parts = [part for column in self.columns for part in getattr(column, "parts", (column,))]
        return any(isinstance(part, Number) and part.exact for part in parts)

    @property
    def codes(self) -> tuple[int, ...]:
        """The places of the categories among the stored numbers."""
        return tuple(first for column, first in self._places() if isinstance(column, Category))

    @property
    def is_text(self) -> bool:
        """Whether most of what the model gets are words of a text."""
        texts = sum(len(column.idf) for column in self.columns if isinstance(column, Text))
        return 2 * texts > self.width

    @property
    def width(self) -> int:
        """Numbers that the model gets for an example."""
        return len(self.origins())

    def _places(self) -> list[tuple[Column, int]]:
        """Every column, and the place of its first stored number."""
        first = np.cumsum([0, *(len(column.names) for column in self.columns)]).tolist()
        return list(zip(self.columns, first, strict=False))

    def read(self, table: Any) -> Tensor:
        """The stored numbers of a pyarrow table, (N, D) float32, or float64 if ``exact``; other columns are ignored."""
        columns, dtype = self.formatted_as(table), self._dtype
        check_size(dtype.itemsize * table.num_rows * len(self.names), what="the table")
        inputs = storage.empty(table.num_rows, len(self.names), what="the table", dtype=dtype)
        for first in range(0, table.num_rows, storage.PIECE):  # texts have 2,048 numbers a row before they are stored
            rows, at = table.slice(first, storage.PIECE), 0
            for column in columns:
                piece = torch.from_numpy(column.read(rows[column.name]))
                inputs[first : first + len(piece), at : at + piece.shape[1]] = piece
                at += piece.shape[1]
        return inputs

    def formatted_as(self, table: Any) -> tuple[Column, ...]:
        """The columns, with dates in the format that this table has them in."""
        return tuple(
            column.formatted_as(table[column.name]) if isinstance(column, Date) else column for column in self.columns
        )

    def __call__(self, inputs: Tensor) -> Tensor:
        """Stored numbers (N, D) as the model gets them, (N, width) float32, on the same device."""
        if inputs.ndim != 2 or inputs.shape[1] != len(self.names):
            raise DataError(
                f"inputs of shape {tuple(inputs.shape)} are not rows of this table: give (N, {len(self.names)}), as "
                "read by its preparation."
            )
        key = str(inputs.device)
        if key not in self._tensors:
            self._tensors[key] = tuple(tensor.to(inputs.device) for tensor in self._encoding())
        ramp_of, low, scale, least, most, code_of, code = self._tensors[key]
        inputs = inputs.to(self._dtype)
        ramps = ((inputs.index_select(1, ramp_of) - low) * scale).maximum(least).minimum(most).float()
        if not len(code_of):
            return ramps
        return torch.cat([ramps, (inputs.index_select(1, code_of) == code).to(ramps.dtype)], dim=1)

    def _encoding(self) -> tuple[Tensor, ...]:
        """Stored number, low, scale, least and most of every ramp; stored number and value of every code."""
        ramps, codes = [], []
        for column, first in self._places():
            ramps += [(first + at, *ramp) for at, pieces in enumerate(column.ramps()) for ramp in pieces]
            codes += [(first, code) for code in column.codes()]
        numbers = torch.tensor([ramp[1:] for ramp in ramps], dtype=torch.float64).reshape(-1, 4).to(self._dtype)
        ramp_of = torch.tensor([ramp[0] for ramp in ramps], dtype=torch.int64)
        places = torch.tensor(codes, dtype=torch.int64).reshape(-1, 2)
        return ramp_of, *numbers.unbind(1), places[:, 0], places[:, 1].to(self._dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else torch.float32

    def present(self, inputs: Tensor) -> Tensor:
        """The number of columns of each row that have a value, (N,)."""
        return torch.stack([~gone for _, _, gone in self._stored(inputs)]).sum(0)

    def _stored(self, inputs: Tensor) -> list[tuple[Column, Tensor, Tensor]]:
        """Every column with its stored numbers, and (N,) whether its value is missing."""
        parts = [(column, inputs[:, at : at + len(column.names)].cpu()) for column, at in self._places()]
        missing = [torch.tensor(column.missing(), dtype=inputs.dtype) for column, _ in parts]
        gone = [(part == one).all(1) & column.has_gaps for (column, part), one in zip(parts, missing, strict=True)]
        return [(column, part, its) for (column, part), its in zip(parts, gone, strict=True)]

    def missing(self) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """What is stored for missing values, (D,), and which stored numbers are missing together: of a column all, of
        texts every hashed word by itself."""
        stored: list[float] = []
        together: list[int] = []
        for column in self.columns:
            first, values = max(together, default=-1) + 1, column.missing()
            stored += values
            together += [first + (at if isinstance(column, Text) else 0) for at in range(len(values))]
        return tuple(stored), tuple(together)

    def origins(self) -> tuple[int, ...]:
        """For each number that the model gets, the place of its column in ``columns``."""
        ramps = [place for place, column in enumerate(self.columns) for pieces in column.ramps() for _ in pieces]
        return (*ramps, *(place for place, column in enumerate(self.columns) for _ in column.codes()))

    def values_of(self, inputs: Tensor) -> dict[str, np.ndarray]:
        """The stored numbers as values of the table, by column: numbers, and words of the others; no texts."""
        return {
            column.name: _values(column, stored, gone.numpy())
            for column, stored, gone in self._stored(inputs)
            if not isinstance(column, Text)
        }

    def describe(self) -> list[str]:
        """The plan as lines to print: column, kind, missing values, a few values."""
        return plan_of(self.seen)

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values, for the run folder."""
        return {
            "columns": [column.to_dict() for column in self.columns],
            "seen": [seen.to_dict() for seen in self.seen],
        }

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        try:
            columns = tuple(map(column_from_dict, fields["columns"]))
            return cls(columns, tuple(map(Seen.from_dict, fields["seen"])))
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the preparation of the table cannot be read ({error}): restore it from a copy."
            ) from error


def _values(column: Column, stored: Tensor, gone: np.ndarray) -> np.ndarray:
    if isinstance(column, Number):
        return np.where(gone, np.float32(np.nan), stored[:, 0].numpy())
    if isinstance(column, Category):
        known = np.array(["(other)", "", *column.values], dtype=object)
        return np.asarray(known[stored[:, 0].long().clamp(0, len(known) - 1).numpy()])
    day = f"{column.name} day"
    if day not in column.names:
        return np.full(len(stored), "", dtype=object)
    days, at = np.unique(stored[:, column.names.index(day)].round().long().numpy(), return_inverse=True)
    return np.where(gone, "", days.astype("datetime64[D]").astype(str).astype(object)[at])
