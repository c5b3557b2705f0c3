"""The preparation of a table: fitted on the source alone, kept in the run as JSON, and applied to every other table.

    prepared = TablePreparation.fit(source)      # a pyarrow table of features
    inputs = prepared.read(table)                # (N, D): what is stored for every example
    prepared(inputs)                             # (N, width) float32: what the model gets, on the inputs' device

Numbers become a piecewise-linear encoding between quantiles of the source (Gorishniy et al. 2022, "On Embeddings for
Numerical Features"), categories one place each; a linear layer on top of them is an embedding of either.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from soseleto.data import cells
from soseleto.data.cells import LEFT_OUT, Kind, Seen, kind_of
from soseleto.data.columns import Category, Column, Date, Number, Place, Text, column_from_dict, fit_column
from soseleto.data.reading import Problem, Raw, Reading, some
from soseleto.data.structure import PIECE, check_size
from soseleto.data.text import TextPreparation
from soseleto.errors import DataError, UsageError, counted, did_you_mean


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

    @cached_property
    def _places(self) -> list[list[Place]]:
        """The stored numbers of every column."""
        return [column.places() for column in self.columns]

    @cached_property
    def places(self) -> list[Place]:
        """All stored numbers."""
        return [place for places in self._places for place in places]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the stored numbers."""
        return tuple(place.name for place in self.places)

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return tuple(column.name for column in self.columns)

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns of text."""
        return tuple(column.name for column in self.columns if isinstance(column, Text))

    @property
    def codes(self) -> tuple[int, ...]:
        """The places of the categories among the stored numbers."""
        return tuple(at for at, place in enumerate(self.places) if place.codes)

    @property
    def is_text(self) -> bool:
        """Whether most of what the model gets are words of a text."""
        texts = sum(len(column.rarity) for column in self.columns if isinstance(column, Text))
        return 2 * texts > self.width

    @property
    def width(self) -> int:
        """Numbers that the model gets for an example."""
        return sum(len(place.ramps) + len(place.codes) for place in self.places)

    def read(self, table: Any) -> Tensor:
        """The stored numbers of a pyarrow table, (N, D) float32; other columns are ignored."""
        check_size(4 * table.num_rows * len(self.places), what="the table")
        inputs = torch.empty(table.num_rows, len(self.places))
        for first in range(0, table.num_rows, PIECE):  # texts have 2,048 numbers a row before they are stored
            rows, at = table.slice(first, PIECE), 0
            for column in self.columns:
                piece = torch.from_numpy(column.read(rows[column.name]))
                inputs[first : first + len(piece), at : at + piece.shape[1]] = piece
                at += piece.shape[1]
        return inputs

    def __call__(self, inputs: Tensor) -> Tensor:
        """Stored numbers (N, D) as the model gets them, (N, width) float32, on the same device."""
        if inputs.ndim != 2 or inputs.shape[1] != len(self.places):
            raise DataError(f"inputs of shape {tuple(inputs.shape)} are no table rows: give (N, {len(self.places)}).")
        key = str(inputs.device)
        if key not in self._tensors:
            self._tensors[key] = tuple(tensor.to(inputs.device) for tensor in self._encoding())
        ramp_of, low, scale, least, most, code_of, code = self._tensors[key]
        inputs = inputs.to(torch.float32)
        ramps = ((inputs.index_select(1, ramp_of) - low) * scale).maximum(least).minimum(most)
        if not len(code_of):
            return ramps
        return torch.cat([ramps, (inputs.index_select(1, code_of) == code).to(ramps.dtype)], dim=1)

    def _encoding(self) -> tuple[Tensor, ...]:
        """Stored number, low, scale, least and most of every ramp; stored number and value of every code."""
        ramps = [(at, *ramp) for at, place in enumerate(self.places) for ramp in place.ramps]
        codes = [(at, code) for at, place in enumerate(self.places) for code in place.codes]
        numbers = torch.tensor([ramp[1:] for ramp in ramps], dtype=torch.float64).reshape(-1, 4).to(torch.float32)
        ramp_of = torch.tensor([ramp[0] for ramp in ramps], dtype=torch.int64)
        places = torch.tensor(codes, dtype=torch.int64).reshape(-1, 2)
        return ramp_of, *numbers.unbind(1), places[:, 0], places[:, 1].to(torch.float32)

    def stored(self, inputs: Tensor) -> list[tuple[Column, Tensor, Tensor]]:
        """Every column with its stored numbers, and (N,) whether its value is missing."""
        stored, parts = [], inputs.cpu().split(list(map(len, self._places)), dim=1)
        for column, places, part in zip(self.columns, self._places, parts, strict=True):
            missing = torch.tensor([place.missing for place in places], dtype=inputs.dtype)
            stored.append((column, part, (part == missing).all(1)))
        return stored

    def values_of(self, inputs: Tensor) -> dict[str, np.ndarray]:
        """The stored numbers as values of the table, by column: numbers, and words of the others; no texts."""
        return {
            column.name: _values(column, stored, gone.numpy())
            for column, stored, gone in self.stored(inputs)
            if not isinstance(column, Text)
        }

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values, for the run folder."""
        return {"columns": [column.to_dict() for column in self.columns], "seen": [vars(seen) for seen in self.seen]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        columns = tuple(map(column_from_dict, fields["columns"]))
        return cls(columns, tuple(map(Seen.from_dict, fields["seen"])))


def _values(column: Column, stored: Tensor, gone: np.ndarray) -> np.ndarray:
    if isinstance(column, Number):
        return np.where(gone, np.float32(np.nan), stored[:, 0].numpy())
    if isinstance(column, Category):
        known = np.array(["(other)", "", *column.values], dtype=object)
        return np.asarray(known[stored[:, 0].long().clamp(0, len(known) - 1).numpy()])
    names = [place.name for place in column.places()]
    if f"{column.name} day" not in names:
        return np.full(len(stored), "", dtype=object)
    days, at = np.unique(stored[:, names.index(f"{column.name} day")].round().long().numpy(), return_inverse=True)
    return np.where(gone, "", days.astype("datetime64[D]").astype(str).astype(object)[at])


# Tables read together: the preparation is fitted on the source, and every problem of every column is found at once

Preparation = TablePreparation | TextPreparation

_OTHER_KIND = 0.5  # share among the present values, from which a column of numbers or dates is of another kind
_UNSEEN = 0.9  # the same of categories, whose values may well be new
_FAULTS = {
    Number: ("not numbers", "cannot be read as numbers"),
    Date: ("not dates", "cannot be read as dates in the source's format or as 2020-12-31"),
    Category: ("unseen", "the source does not have"),
}
logger = logging.getLogger("soseleto")


def prepare(
    raws: Sequence[Raw], reading: Reading, preparation: Preparation | None = None
) -> tuple[list[Raw], Preparation | None]:
    """The sets with the inputs of their tables, and the preparation; sets that are no tables are unchanged.

    preparation: of an earlier training; by default it is fitted on the first set, the source
    """
    source = raws[0]
    is_text = isinstance(preparation, TextPreparation) or (preparation is None and reading.tokenizer is not None)
    if source.table is None and not is_text:
        if reading.kinds:
            raise UsageError(f"the kind of column {next(iter(reading.kinds))!r} has no effect on a source of images.")
        if other := next((raw for raw in raws if raw.table is not None), None):
            raise DataError(f"the {other.name} has features but the source has not: give both the same kind.")
        return list(raws), None
    if is_text and (other := next((raw for raw in raws if raw.table is None), None)):
        raise UsageError(
            f"a pretrained text model reads a column of a table, and the {other.name} is none: give a .csv, .tsv, "
            ".parquet or .jsonl file with --text-column NAME."
        )
    if preparation is None:
        preparation = _fit_text(source, reading) if is_text else _fit(raws, reading)
    _require_columns(raws, preparation, reading)
    return [raw if raw.table is None else _prepared(raw, preparation, reading) for raw in raws], preparation


def _fit(raws: Sequence[Raw], reading: Reading) -> TablePreparation:
    source = raws[0]
    others = {name for raw in raws[1:] if raw.table is not None for name in raw.table.column_names}
    _require_known(source, [name for name, kind in reading.kinds.items() if kind != LEFT_OUT or name not in others])
    labels = source.labels if isinstance(source.labels, Tensor) and source.labels.ndim == 1 else None
    classes = None if labels is None or labels.is_floating_point() else labels.cpu().numpy()
    preparation = TablePreparation.fit(source.table, classes, reading.kinds)
    if not preparation.columns:
        reasons = some([f"{seen.name} ({seen.why})" for seen in preparation.seen])
        raise DataError(
            f"the {source.name} table has no column that can be used as a feature: {reasons}; name one with "
            "--text-column, or in categorical_columns or numeric_columns of [reading], to use it anyway."
        )
    return preparation


def _fit_text(source: Raw, reading: Reading) -> TextPreparation:
    """For the column that is named, else the only column of texts."""
    table, kinds = source.table, reading.kinds
    columns = [name for name in table.column_names if cells.form_of(table[name]) is not None]
    if other := next((name for name, kind in kinds.items() if kind not in ("text", LEFT_OUT)), None):
        raise UsageError(f"the kind of column {other!r} has no effect: a pretrained text model reads the text alone.")
    named = list(reading.text_columns)
    if not named:
        texts = (name for name in columns if cells.form_of(table[name]) == "text")
        named = [name for name in texts if kind_of(name, table[name], None, kinds).name == "text"]
    if len(named) != 1:
        which = f"{len(named)} columns of text ({some(named)})" if named else f"no column of text among {some(columns)}"
        raise UsageError(f"the {source.name} table has {which}: name the one to read, --text-column NAME.")
    _require_known(source, named)
    if named[0] not in columns:
        raise UsageError(f"column {named[0]!r} of the {source.name} holds {table[named[0]].type}, not text.")
    left_out = Kind(LEFT_OUT, "the model reads the text alone")
    seen = (Seen.of(name, table[name], Kind("text") if name == named[0] else left_out) for name in columns)
    assert reading.tokenizer is not None
    return TextPreparation(named[0], reading.tokenizer, tuple(seen))


def _require_known(source: Raw, names: Sequence[str]) -> None:
    known = source.table.column_names
    if unknown := [name for name in names if name not in known]:
        hint = did_you_mean(unknown[0], known) or f": choose from {some(known)}"
        raise UsageError(f"the {source.name} table has no feature column {some(unknown)}{hint}.")


def _require_columns(raws: Sequence[Raw], preparation: Preparation, reading: Reading) -> None:
    """Raise for all columns that are missing or additional in a table, and not dropped, at once."""
    faults = []
    for raw in raws:
        if raw.table is None:
            continue
        names, known = raw.table.column_names, {*raws[0].table.column_names, *reading.drop_columns}
        if missing := [column for column in preparation.used if column not in names]:
            faults.append(f"the {raw.name} table lacks {some(missing)}")
        extra = [column for column in names if column not in known and not cells.INDEX.fullmatch(column)]
        if extra and isinstance(preparation, TablePreparation):
            faults.append(f"the {raw.name} table also has {some(extra)}")
    if faults:
        raise DataError(
            f"{'; '.join(faults)}: give every table the feature columns of the source, or drop others with "
            "--drop-column."
        )


def _prepared(raw: Raw, preparation: Preparation, reading: Reading) -> Raw:
    problems = list(raw.problems)
    if isinstance(preparation, TablePreparation):
        problems += _left_out(preparation, reading) if raw.name == "source" else []
        problems += [problem for column in _checked(raw.table, preparation) if (problem := column.problem(raw.name))]
    is_text = isinstance(preparation, TextPreparation)
    return replace(raw, inputs=preparation.read(raw.table), table=None, texts=is_text, problems=tuple(problems))


def _left_out(preparation: TablePreparation, reading: Reading) -> list[Problem]:
    left = [seen for seen in preparation.seen if seen.kind == LEFT_OUT and seen.name not in reading.drop_columns]
    if not left:
        return []
    reasons = "; ".join(f"{seen.name!r}, since {seen.why}" for seen in left)
    kinds = "--text-column, or numeric_columns or categorical_columns of [reading], uses one anyway"
    return [Problem("source", "left out", f"not used as features: {reasons} ({kinds}).", stops=False)]


class _Checked(NamedTuple):
    """A column of a table beside what the preparation expects; masks are (N,)."""

    column: Column
    words: Any
    present: np.ndarray
    unusable: np.ndarray
    outside: np.ndarray
    source: str  # what the source has in the column

    def shown(self, rows: np.ndarray) -> str:
        return some(list(dict.fromkeys(map(repr, self.words.take(np.flatnonzero(rows)[:1000]).to_pylist()))))

    def problem(self, where: str) -> Problem | None:
        """Of a set to train or measure on.

        It stops where most values of another table's column are no numbers or dates. Unseen categories are reported
        where nearly all values are.
        """
        column, count, present = self.column, int(self.unusable.sum()), self.present.sum()
        unseen = isinstance(column, Category)
        most = count > (_UNSEEN if unseen else _OTHER_KIND) * present
        beside = "" if where == "source" else f"; the source has {self.source}"
        stops = most and not unseen and where != "source"
        if not stops and 0 < present - count == self.outside.sum():
            shown = f"no value within the source's range ({self.shown(self.outside)}{beside}): is its unit the same?"
            return Problem(where, "range", f"column {column.name!r} has {shown}", stops=False)
        if not count or (unseen and (where == "source" or not most)):
            return None
        fix = "write them like those" if stops else f"they are read as {'one unseen value' if unseen else 'missing'}"
        kind, fault = _FAULTS[type(column)]
        shown = f"{counted(count, 'value')} that {fault} ({self.shown(self.unusable)}{beside}): {fix}."
        return Problem(where, kind, f"column {column.name!r} has {shown}", stops=stops)

    def line(self) -> str:
        """Of a table to predict on: how many values are not as in the training; empty if all are."""
        unusable = "unseen" if isinstance(self.column, Category) else "unreadable"
        counts = {"missing": ~self.present, unusable: self.unusable, "outside the training's range": self.outside}
        listed = [
            f"{rows.sum():,} {what}" + (f" ({self.shown(rows)})" if what != "missing" else "")
            for what, rows in counts.items()
            if rows.any()
        ]
        return f"column {self.column.name!r}: {', '.join(listed)}, of {len(self.words):,}" if listed else ""


def _checked(table: Any, preparation: Preparation) -> Iterator[_Checked]:
    source = {seen.name: ", ".join(seen.examples) for seen in preparation.seen}
    columns = preparation.columns if isinstance(preparation, TablePreparation) else (Text(preparation.column, ()),)
    for column in columns:
        cell = table[column.name]
        if cells.form_of(cell) is None:
            raise DataError(
                f"column {column.name!r} holds {cell.type}, and other values in the source: bring both to one form, or "
                "drop it (--drop-column)."
            )
        words = cells.words(cell)
        present = words.is_valid().to_numpy(zero_copy_only=False)
        yield _Checked(column, words, present, *column.check(cell), source.get(column.name, ""))


def prepared(
    table: Any, preparation: Preparation, what: str, *, strict: bool = False, level: int = logging.WARNING
) -> tuple[Tensor, Tensor]:
    """The inputs of a pyarrow table by the preparation of a training, and (N,) whether a row has any value to use.

    Columns that it did not use are ignored. One line is logged for each column with values that are missing,
    unreadable, unseen or outside the training's range; with ``strict`` they raise.
    """
    names = table.column_names
    if missing := [column for column in preparation.used if column not in names]:
        hint = did_you_mean(missing[0], names)
        raise DataError(f"{what} has no column {some(missing)}{hint}: give all columns that the model was trained on.")
    if twice := [column for column in preparation.used if names.count(column) > 1]:
        raise DataError(f"{what} has two columns of one name: rename one of {some(twice)}.")
    problems, lines, usable = [], [], np.zeros(table.num_rows, dtype=bool)
    for column in _checked(table, preparation):
        problems.append(column.problem(what))
        lines.append(column.line())
        usable |= column.present & ~column.unusable
    if stopping := [str(problem) for problem in problems if problem is not None and problem.stops]:
        raise DataError(" ".join(stopping))
    inputs = preparation.read(table)
    if rows := (~inputs.isfinite()).any(1).nonzero().flatten().tolist():
        shown = some([str(row) for row in rows])
        raise DataError(f"{counted(len(rows), 'row')} of {what} with infinite values ({shown}): remove them.")
    if empty := [str(row) for row in np.flatnonzero(~usable)]:
        lines.append(f"{counted(len(empty), 'row')} without a value that can be used ({some(empty)})")
    lines = list(filter(None, lines))
    if strict and lines:
        raise DataError(f"{what}: {'; '.join(lines)}: correct them, or leave --strict out.")
    for line in lines:
        logger.log(level, "%s: %s", what, line)
    return inputs, torch.from_numpy(usable)
