"""CSV, TSV, Parquet and JSON-lines tables, and data frames: one example per row.

With a path column the rows are images; else every column other than label, id and truth is a feature and must hold
numbers. Columns that are not given are found by their usual names, ignoring case.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data.limits import check_size
from soseleto.data.readers.image_folder import outside
from soseleto.data.readers.labels import Names, is_regression, names_of
from soseleto.data.readers.problems import Problem, some
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.reading import Reading
from soseleto.errors import DataError, UsageError, did_you_mean, need

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")
LABELS = ("label", "class", "target", "y", "category")
PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
IDS = ("id", "uid", "uuid", "key")


def read_table(path: Path, *, name: str, reading: Reading) -> Raw:
    return from_table(load(path, name), name=name, reading=reading, folder=path.parent, what=str(path))


def read_columns(path: Path, columns: Sequence[str]) -> Tensor:
    """These columns of a table as (N, D) float32; others are ignored."""
    table = load(path, "")
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        hint = did_you_mean(missing[0], table.column_names)
        raise DataError(f"{path} has no column {some(missing)}{hint}: give all columns that the model was trained on.")
    read = _with_features(Raw("", Names(())), table, list(columns), str(path)).inputs
    assert read is not None
    bad = (~read.isfinite()).any(1).nonzero().flatten().tolist()
    if bad:
        rows = some([str(row) for row in bad])
        raise DataError(f"{len(bad)} rows of {path} have missing or infinite values ({rows}): remove them.")
    return read


def read_paths(path: Path) -> list[str]:
    """The image files of a table with a path column; relative paths start from the table's folder."""
    table = load(path, "")
    column = _column(table, None, PATHS, "path_column", str(path), text_only=True)
    if column is None:
        raise DataError(f"{path} has no column of image paths among {some(table.column_names)}: call it path.")
    files = [str(value or "") for value in table[column].to_pylist()]
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
    used = [c for c in (label, path, identity, truth) if c is not None]
    made = Raw(
        name,
        labels_from(table[label].to_pylist(), name=name),
        ids=None if identity is None else _ids(table[identity].to_pylist(), identity, what),
        truth=None if truth is None else names_of(table[truth].to_pylist()),
        files=(),
    )
    if path is not None:
        return _with_images(made, table[path].to_pylist(), reading, folder)
    return _with_features(made, table, [c for c in table.column_names if c not in used], what)


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


def labels_from(values: Any, *, name: str) -> Names | Tensor:
    """Labels of a file: numbers that are not all integers are regression targets, all else is a class name."""
    if isinstance(values, np.ndarray):  # more than one number per example
        if values.dtype.kind not in "buif":
            raise DataError(f"{name} labels have shape {values.shape} and type {values.dtype}: give one name each.")
        return torch.from_numpy(values.astype(np.float32))
    if is_regression(values):
        return torch.tensor([float("nan") if v is None else float(v) for v in values], dtype=torch.float32)
    return names_of(values)


def load(path: Path, name: str) -> Any:
    """Read the file as a pyarrow table; any error becomes a DataError."""
    need("pyarrow", to=f"reading the table {path}")
    try:
        table = _parsed(path)
        table.validate(full=True)  # text that is not UTF-8, offsets out of range
        str(table.column_names)
        return table
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"the {name} table {path} is missing: check the path.") from error
    except Exception as error:  # Arrow's errors, and OSErrors and ValueErrors from within it
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"the {name} table {path} cannot be read ({reason}): fix it or save it again.") from error


def _parsed(path: Path) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _load_parquet(path)
    if suffix in (".csv", ".tsv"):
        return _load_csv(path, "\t" if suffix == ".tsv" else ",")
    return need("pyarrow.json", to="reading JSON lines").read_json(str(path))


def _load_csv(path: Path, delimiter: str) -> Any:
    csv = need("pyarrow.csv", to="reading CSV")
    return csv.read_csv(
        str(path),
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
    )


def _load_parquet(path: Path) -> Any:
    parquet = need("pyarrow.parquet", to="reading Parquet")
    with parquet.ParquetFile(str(path)) as file:
        # A few bytes of run lengths can encode billions of rows: check the size before reading.
        check_size(8 * file.metadata.num_rows * max(1, file.metadata.num_columns), what=str(path))
        return file.read()


def _column(
    table: Any, given: str | None, usual: tuple[str, ...], option: str, what: str, *, text_only: bool = False
) -> str | None:
    columns: list[str] = table.column_names
    if given is not None:
        if given not in columns:
            hint = did_you_mean(given, columns) or f": choose from {some(columns)}"
            raise UsageError(f"{what} has no column {given!r} for {option}{hint}.")
        return given
    lower = {column.lower(): column for column in reversed(columns)}
    found = next((lower[candidate] for candidate in usual if candidate in lower), None)
    if found is not None and text_only and not _is_text(table[found].type):
        return None
    return found


def _is_text(kind: Any) -> bool:
    types = need("pyarrow", to="reading tables").types
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_dictionary(kind))


def _ids(values: list[Any], column: str, what: str) -> tuple[str, ...]:
    for row, value in enumerate(values):
        if value is None or value == "":
            raise DataError(f"row {row} of {what} has no id in column {column!r}: give every row one.")
    return tuple(str(value) for value in values)


def _with_images(made: Raw, paths: list[Any], reading: Reading, folder: Path | None) -> Raw:
    root = Path(reading.root).expanduser() if reading.root is not None else folder or Path()
    missing = {row for row, path in enumerate(paths) if not path or "\0" in str(path)}
    relative = ["." if row in missing else str(path) for row, path in enumerate(paths)]
    left = [] if reading.allow_outside else outside(root, relative)
    problems = [
        *_rows(made, "missing", sorted(missing), "have no path: give them one, or leave them out"),
        *_rows(made, "outside", left, f"lead outside {root}: type reading=Reading(allow_outside=True), or root=..."),
    ]
    unread = missing.union(left)  # an empty name is never opened
    files = tuple("" if row in unread else os.path.join(root, path) for row, path in enumerate(relative))
    return replace(made, files=files, paths=files, problems=tuple(problems))


def _rows(made: Raw, kind: str, rows: list[int], what: str) -> list[Problem]:
    ids = tuple(made.id_of(row) for row in rows)
    return [Problem(made.name, kind, f"{len(ids)} rows {what} ({some(ids)}).", ids)] if ids else []


def _with_features(made: Raw, table: Any, columns: list[str], what: str) -> Raw:
    if not columns:
        raise DataError(f"{what} has a label but no features: add feature columns, or name the path_column.")
    check_size(4 * table.num_rows * len(columns), what=what)
    inputs = torch.empty(table.num_rows, len(columns))
    for at, column in enumerate(columns):
        inputs[:, at] = torch.from_numpy(_numbers(table[column], column, what))
    return replace(made, inputs=inputs, files=None, columns=tuple(columns))


def _numbers(column: Any, name: str, what: str) -> Any:
    """A column as float32, with NaN for missing values."""
    types = need("pyarrow", to="reading tables").types
    kind = column.type
    if types.is_null(kind):
        return np.full(len(column), np.nan, dtype=np.float32)
    if not (types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)):
        raise DataError(
            f"column {name!r} of {what} holds {kind}, not numbers: leave it out, turn it into numbers, or name "
            "it as path_column, id_column or label_column."
        )
    if column.null_count or not (types.is_integer(kind) or types.is_floating(kind)):
        values = np.asarray([np.nan if value is None else float(value) for value in column.to_pylist()])
    else:
        values = column.to_numpy()
    with np.errstate(over="ignore"):  # a number too large for float32 becomes infinite, which is checked later
        return values.astype(np.float32)
