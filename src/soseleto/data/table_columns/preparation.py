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

from soseleto.data import on_disk
from soseleto.data.limits import check_size
from soseleto.data.table_columns import fitted, values
from soseleto.data.table_columns.fitted import Category, Date, Fitted, Number, Text
from soseleto.data.table_columns.kinds import LEFT_OUT, Kind, kind_of
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


@dataclass(frozen=True)
class TablePreparation:
    """Fitted columns, in the order of the table; ``seen`` has all columns, also those that are left out."""

    columns: tuple[Fitted, ...]
    seen: tuple[Seen, ...] = ()
    _tensors: dict[str, tuple[Tensor, ...]] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._tensors["cpu"] = self._made()  # now, since a tracing exporter would leave its own tensors here

    @classmethod
    def fit(
        cls,
        table: Any,
        labels: np.ndarray | None = None,
        given: Mapping[str, str] | None = None,
        rows: np.ndarray | None = None,
    ) -> Self:
        """Fit every column of a pyarrow table.

        labels: (N,) class indices; a column that repeats them is left out
        given: kinds by column ("number", "category", "text" or "left out"); the others are inferred
        rows: (N,) the numbers of the rows, where they are a sample of a larger table
        """
        columns: list[Fitted] = []
        seen: list[Seen] = []
        for name in table.column_names:
            column = table[name]
            kind = kind_of(name, column, labels, given or {}, rows)
            seen.append(seen_in(name, column, kind))
            if kind.name != LEFT_OUT:
                columns.append(_fit(name, column, kind))
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
        return tuple(at for at, name in enumerate(self.names) if name in self._categories)

    @property
    def is_text(self) -> bool:
        """Whether most of what the model gets are words of a text."""
        texts = sum(len(column.idf) for column in self.columns if isinstance(column, Text))
        return 2 * texts > self.width

    @property
    def _categories(self) -> dict[str, Category]:
        return {column.name: column for column in self.columns if isinstance(column, Category)}

    @property
    def width(self) -> int:
        """Numbers that the model gets for an example."""
        return sum(len(pieces) for column in self.columns for pieces in column.ramps()) + sum(
            len(column.matches()) for column in self.columns
        )

    def read(self, table: Any) -> Tensor:
        """The stored numbers of a pyarrow table, (N, D) float32, or float64 if ``exact``; other columns are ignored.

        Those of a large table are on disk, where they are written some rows at a time.
        """
        columns, dtype = self.spelled_as(table), self._dtype
        check_size(dtype.itemsize * table.num_rows * len(self.names), what="the table")
        inputs = on_disk.empty(table.num_rows, len(self.names), what="the table", dtype=dtype)
        for first in range(0, table.num_rows, on_disk.PIECE):
            rows = table.slice(first, on_disk.PIECE)
            at = 0
            for column in columns:
                piece = torch.from_numpy(column.read(rows[column.name]))
                inputs[first : first + len(piece), at : at + piece.shape[1]] = piece
                at += piece.shape[1]
        return inputs

    def spelled_as(self, table: Any) -> tuple[Fitted, ...]:
        """The columns, with dates in the format that this table has them in."""
        return tuple(one.spelled_as(table[one.name]) if isinstance(one, Date) else one for one in self.columns)

    def __call__(self, inputs: Tensor) -> Tensor:
        """Stored numbers (N, D) as the model gets them, (N, width) float32, on the same device."""
        if inputs.ndim != 2 or inputs.shape[1] != len(self.names):
            raise DataError(
                f"inputs of shape {tuple(inputs.shape)} are not rows of this table: give (N, {len(self.names)}), as "
                "read by its preparation."
            )
        at, low, scale, least, most, of, code = self._constants(inputs.device)
        inputs = inputs.to(self._dtype)
        ramps = ((inputs.index_select(1, at) - low) * scale).maximum(least).minimum(most).float()
        if not len(of):
            return ramps
        return torch.cat([ramps, (inputs.index_select(1, of) == code).to(ramps.dtype)], dim=1)

    def present(self, inputs: Tensor) -> Tensor:
        """The number of columns of each row that have a value, (N,)."""
        count, at = torch.zeros(len(inputs), dtype=torch.int64), 0
        for column in self.columns:
            stored = inputs[:, at : at + len(column.names)].cpu()
            count += (column.gone(stored) == 0).to(torch.int64)
            at += len(column.names)
        return count

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
        return (*ramps, *(place for place, column in enumerate(self.columns) for _ in column.matches()))

    def values_of(self, inputs: Tensor) -> dict[str, np.ndarray]:
        """The stored numbers as values of the table, by column: numbers, and words of the others; no texts."""
        found, at = {}, 0
        for column in self.columns:
            if not isinstance(column, Text):
                found[column.name] = _values(column, inputs[:, at : at + len(column.names)].cpu())
            at += len(column.names)
        return found

    def _constants(self, device: torch.device) -> tuple[Tensor, ...]:
        key = str(device)
        if key not in self._tensors:
            self._tensors[key] = tuple(tensor.to(device) for tensor in self._made())
        return self._tensors[key]

    def _made(self) -> tuple[Tensor, ...]:
        ramps, matches, first = [], [], 0
        for column in self.columns:
            ramps += [(first + at, *one) for at, pieces in enumerate(column.ramps()) for one in pieces]
            matches += [(first, code) for code in column.matches()]
            first += len(column.names)
        numbers = torch.tensor([ramp[1:] for ramp in ramps], dtype=torch.float64).reshape(-1, 4)
        at = torch.tensor([ramp[0] for ramp in ramps], dtype=torch.int64)
        codes = torch.tensor(matches, dtype=torch.int64).reshape(-1, 2)
        dtype = self._dtype
        return at, *(numbers[:, k].to(dtype) for k in range(4)), codes[:, 0], codes[:, 1].to(dtype)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.float64 if self.exact else torch.float32

    def describe(self) -> list[str]:
        """The plan as lines to print: column, kind, missing values, a few values."""
        return described(self.seen)

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values, for the run folder."""
        seen = [{**vars(one), "examples": list(one.examples)} for one in self.seen]
        return {"columns": [fitted.to_dict(column) for column in self.columns], "seen": seen}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        try:
            columns = tuple(fitted.from_dict(one) for one in fields["columns"])
            seen = tuple(Seen(**{**one, "examples": tuple(one["examples"])}) for one in fields["seen"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the preparation of the table cannot be read ({error}): restore it from a copy."
            ) from error
        return cls(columns, seen)


def described(seen: Sequence[Seen]) -> list[str]:
    """The columns of a table as lines to print."""
    rows = [("column", "kind", "missing", "values")]
    rows += [(one.name, one.kind, f"{one.missing:,}", one.why or ", ".join(one.examples)) for one in seen]
    wide = [max(len(row[at]) for row in rows) for at in range(3)]
    return [f"  {a:<{wide[0]}}  {b:<{wide[1]}}  {c:>{wide[2]}}  {d}".rstrip() for a, b, c, d in rows]


def _fit(name: str, column: Any, kind: Kind) -> Fitted:
    if kind.name == "number":
        return Number.fit(name, values.numbers(column).values)
    if kind.name == "date":
        return Date.fit(name, column, kind.format)
    if kind.name == "text":
        return Text.fit(name, values.words(column))
    return Category.fit(name, values.words(column))


def seen_in(name: str, column: Any, kind: Kind) -> Seen:
    """What the plan shows of a column."""
    text = values.words(column)
    found = values.numbers(column) if kind.name == "number" else None
    missing = text.null_count if found is None else int(np.isnan(found.values).sum())
    shown = [value for value, _ in values.counts_of(text.slice(0, 10_000))[:_SHOWN]]
    if found is not None and np.isfinite(found.values).any():
        known = found.values[np.isfinite(found.values)]
        shown = [f"{known.min():.6g} to {known.max():.6g}", f"median {np.median(known):.6g}"]
    named = LEFT_OUT if kind.name == LEFT_OUT else kind.name
    return Seen(name, named, int(missing), tuple(_cut(value) for value in shown), kind.why)


def _cut(value: str) -> str:
    value = " ".join(value.split())
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"


def _values(column: Number | Category | Date, stored: Tensor) -> np.ndarray:
    gone = column.gone(stored).numpy()
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
