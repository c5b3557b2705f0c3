"""CSV, TSV, Parquet and JSON-lines tables, and data frames: one example per row.

With a path column the rows are images; else every column other than label, id and truth is a feature, which
``prepare_tables`` turns into numbers. Columns that are not given are found by their usual names, ignoring case.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data import cells
from soseleto.data.image_folder import outside
from soseleto.data.preparation import TablePreparation
from soseleto.data.preprocess import single_precision
from soseleto.data.readers.file_names import escaped, existing
from soseleto.data.readers.labels import Names, is_regression, names_of, text_of
from soseleto.data.readers.pandas_index import index_columns, index_problem
from soseleto.data.readers.problems import Problem, some
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.reading import Reading
from soseleto.data.readers.table_files import IDS, LABELS, PATHS, load, usual, values_of
from soseleto.data.readers.unusable_values import unusable_values
from soseleto.data.text import TextPreparation
from soseleto.errors import DataError, UsageError, counted, did_you_mean, need

logger = logging.getLogger("soseleto")


def read_table(path: Path, *, name: str, reading: Reading) -> Raw:
    return from_table(
        load(path, name, reading, all_text=True), name=name, reading=reading, folder=path.parent, what=str(path)
    )


def read_any_table(path: Path, *, name: str, reading: Reading, features: Sequence[str]) -> Raw:
    """A table whose labels are not used, if it has any: every label is 0.

    features: of the source, none of which holds the labels
    """
    table = load(path, name, reading, all_text=True)
    others = [column for column in table.column_names if column not in features]
    label = reading.label_column or usual(others, LABELS) or LABELS[0]
    if label in table.column_names:
        table = table.drop_columns([label])
    labels = need("pyarrow", to="reading tables").array(np.zeros(table.num_rows, dtype=np.int64))
    reading = replace(reading, label_column=label)
    raw = from_table(table.append_column(label, labels), name=name, reading=reading, folder=path.parent, what=str(path))
    return replace(raw, labels=torch.zeros(len(raw), dtype=torch.int64), truth=None)


def read_prepared(path: Path, preparation: TablePreparation | TextPreparation, encoding: str | None = None) -> Tensor:
    """The inputs of a table by the preparation of a training; columns that it did not use are ignored."""
    table = load(path, "", Reading(encoding=encoding), all_text=True)
    return prepared(table, preparation, str(path))


def prepared(table: Any, preparation: TablePreparation | TextPreparation, what: str) -> Tensor:
    """The inputs of a pyarrow table; DataError where columns are missing or numbers are infinite."""
    missing = [column for column in preparation.used if column not in table.column_names]
    if missing:
        hint = did_you_mean(missing[0], table.column_names)
        raise DataError(f"{what} has no column {some(missing)}{hint}: give all columns that the model was trained on.")
    twice = [column for column in preparation.used if table.column_names.count(column) > 1]
    if twice:
        raise DataError(f"{what} has two columns of one name: rename one of {some(twice)}.")
    if isinstance(preparation, TablePreparation):
        _check_values(table, preparation, what)
    read = preparation.read(table)
    bad = (~read.isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        rows = some([str(row) for row in bad])
        raise DataError(f"{counted(len(bad), 'row')} of {what} with infinite values ({rows}): remove them.")
    return read


def _check_values(table: Any, preparation: TablePreparation, what: str) -> None:
    """Raise where most values of a column of numbers or dates are none; log where a category's are unseen."""
    problems = [one.problem(what) for one in unusable_values(table, preparation) if one.is_most]
    if stopping := [str(problem) for problem in problems if problem.stops]:
        raise DataError(" ".join(stopping))
    for problem in problems:
        logger.warning("%s", problem)


def read_columns(path: Path, columns: Sequence[str], encoding: str | None = None) -> Tensor:
    """These columns of numbers as (N, D) float32, for a run of an earlier version, which recorded no preparation."""
    table = load(path, "", Reading(encoding=encoding))
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        hint = did_you_mean(missing[0], table.column_names)
        raise DataError(f"{path} has no column {some(missing)}{hint}: give all columns that the model was trained on.")
    return _finite_features(table, list(columns), path)


def read_features(path: Path, count: int, encoding: str | None = None) -> Tensor:
    """All ``count`` feature columns of a table in their order, for a model whose inputs had no names."""
    table = load(path, "", Reading(encoding=encoding))
    roles = (usual(table.column_names, LABELS), usual(table.column_names, IDS), *index_columns(table))
    columns = [column for column in table.column_names if column not in roles]
    if len(columns) != count:
        raise DataError(
            f"{path} has {counted(len(columns), 'feature column')} ({some(columns)}): the model was trained on "
            f"{count} without names, so give exactly those, in that order."
        )
    return _finite_features(table, columns, path)


def _finite_features(table: Any, columns: list[str], path: Path) -> Tensor:
    twice = [column for column in columns if table.column_names.count(column) > 1]
    if twice:
        raise DataError(f"{path} has two columns of one name: rename one of {some(twice)}.")
    found = {column: cells.numbers(table[column]) for column in columns}
    wordy = [column for column, numbers in found.items() if numbers.is_word.any()]
    if wordy:
        raise DataError(f"column {some(wordy)} of {path} holds words, not numbers: the model was trained on numbers.")
    with np.errstate(over="ignore"):
        read = single_precision(torch.from_numpy(np.stack([numbers.values for numbers in found.values()], 1)))
    bad = (~read.isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        rows = some([str(row) for row in bad])
        raise DataError(f"{counted(len(bad), 'row')} of {path} with missing or infinite values ({rows}): remove them.")
    return read


def read_paths(path: Path, encoding: str | None = None, path_column: str | None = None) -> list[str]:
    """The image files of a table with a path column; relative paths start from the table's folder.

    path_column: its name in the training; a table without it has a column of a usual name
    """
    table = load(path, "", Reading(encoding=encoding, path_column=path_column))
    given = path_column if path_column in table.column_names else None
    column = _column(table, given, PATHS, "path_column", str(path), text_only=True)
    if column is None:
        raise DataError(f"{path} has no column of image paths among {some(table.column_names)}: call it path.")
    files = [existing(str(value or ""), root=path.parent) for value in table[column].to_pylist()]
    if left := outside(path.parent, files):
        raise DataError(f"{some([files[row] for row in left])} in {path} lead outside its folder: name them directly.")
    return [os.path.join(path.parent, file) for file in files]


def from_table(table: Any, *, name: str, reading: Reading, folder: Path | None, what: str) -> Raw:
    """A pyarrow table as a data set; relative paths start from ``folder``."""
    if table.num_rows == 0:
        raise DataError(f"{what} has no rows: give the {name} at least one example.")
    if len(set(table.column_names)) != len(table.column_names):
        raise DataError(f"{what} has two columns of one name: rename one of {some(table.column_names)}.")
    if name != "source" and reading.truth_column not in table.column_names:
        reading = replace(reading, truth_column=None)  # only the source needs correct labels beside its own
    found = columns_of(table, reading, what=what)
    label, path, identity, truth = found.label, found.path, found.identity, found.truth
    used = [c for c in (label, path, identity, truth, reading.before_column) if c is not None]
    made = Raw(
        name,
        labels_from(values_of(table[label]), name=name, encoding=reading.encoding),
        ids=None if identity is None else _ids(table[identity].to_pylist(), identity, what, reading.encoding),
        truth=None if truth is None else names_of(values_of(table[truth]), encoding=reading.encoding),
        files=(),
    )
    if path is not None:
        return _with_images(made, table[path].to_pylist(), reading, folder)
    index = [column for column in index_columns(table) if column not in used]
    features = [column for column in table.column_names if column not in (*used, *index)]
    return _with_features(replace(made, problems=index_problem(name, index)), table, features, what)


@dataclass(frozen=True)
class Columns:
    """The columns with a role; the others are features."""

    label: str
    path: str | None
    identity: str | None
    truth: str | None


def columns_of(table: Any, reading: Reading, *, what: str) -> Columns:
    """Find the columns by the given names, else by the usual ones."""
    label = _column(table, reading.label_column, LABELS, "label_column", what)
    if label is None:
        raise DataError(
            f"{what} has no label column among {some(table.column_names)}: "
            "type reading=Reading(label_column=...), or --label-column."
        )
    path = _column(table, reading.path_column, PATHS, "path_column", what, text_only=True)
    identity = _column(table, reading.id_column, IDS, "id_column", what)
    truth = _column(table, reading.truth_column, (), "truth_column", what)
    used = [c for c in (label, path, identity, truth) if c is not None]
    if len(set(used)) != len(used):
        raise UsageError(f"{what}: one column is named for two roles among {some(used)}: name another.")
    return Columns(label, path, identity, truth)


def labels_from(values: Any, *, name: str, encoding: str | None = None) -> Names | Tensor:
    """Labels of a file: numbers that are not all integers are regression targets, all else is a class name."""
    if isinstance(values, np.ndarray):  # more than one number per example
        if values.dtype.kind not in "buif":
            raise DataError(f"{name} labels have shape {values.shape} and type {values.dtype}: give one name each.")
        return torch.from_numpy(values.astype(np.float32))
    if is_regression(values):
        return torch.tensor([float("nan") if v is None else float(v) for v in values], dtype=torch.float32)
    return names_of(values, encoding=encoding)


def _column(
    table: Any, given: str | None, names: tuple[str, ...], option: str, what: str, *, text_only: bool = False
) -> str | None:
    columns: list[str] = table.column_names
    if given is not None:
        if given not in columns:
            hint = did_you_mean(given, columns) or f": choose from {some(columns)}"
            raise UsageError(f"{what} has no column {given!r} for {option}{hint}.")
        return given
    found = usual(columns, names)
    if found is not None and text_only and not _is_text(table[found].type):
        return None
    return found


def _is_text(kind: Any) -> bool:
    types = need("pyarrow", to="reading tables").types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind))


def _ids(values: list[Any], column: str, what: str, encoding: str | None) -> tuple[str, ...]:
    for row, value in enumerate(values):
        if value is None or value == "":
            raise DataError(f"row {row} of {what} has no id in column {column!r}: give every row one.")
    where = f"column {column!r} of {what}"
    return tuple(text_of(value, where=f"row {row}, {where}", encoding=encoding) for row, value in enumerate(values))


def _with_images(made: Raw, paths: list[Any], reading: Reading, folder: Path | None) -> Raw:
    root = Path(reading.root).expanduser() if reading.root is not None else folder or Path()
    missing = {row for row, path in enumerate(paths) if not path or "\0" in str(path)}
    relative = ["." if row in missing else existing(str(path), root=root) for row, path in enumerate(paths)]
    left = [] if reading.allow_outside else outside(root, relative)
    problems = [
        *_rows(made, "missing", sorted(missing), "without a path: give every row one, or leave it out"),
        *_rows(
            made, "outside", left, f"with a path outside {root}: type reading=Reading(allow_outside=True), or root=..."
        ),
    ]
    unread = missing.union(left)  # an empty name is never opened
    files = tuple("" if row in unread else os.path.join(root, path) for row, path in enumerate(relative))
    return replace(made, files=files, paths=tuple(map(escaped, files)), problems=tuple(problems))


def _rows(made: Raw, kind: str, rows: list[int], what: str) -> list[Problem]:
    ids = tuple(made.id_of(row) for row in rows)
    return [Problem(made.name, kind, f"{counted(len(ids), 'row')} {what} ({some(ids)}).", ids)] if ids else []


def _with_features(made: Raw, table: Any, columns: list[str], what: str) -> Raw:
    if not columns:
        raise DataError(f"{what} has a label but no features: add feature columns, or name the path_column.")
    return replace(made, table=table.select(columns), files=None)
