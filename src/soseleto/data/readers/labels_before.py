"""The labels that the target's examples had before they were checked: a column of its table, or a table of its own.

A table of its own is matched by its id column, else by its column of image paths, else by row.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soseleto.data.examples import Examples
from soseleto.data.readers import table_files, tables
from soseleto.data.readers.labels import names_of
from soseleto.data.readers.look_alikes import plain
from soseleto.data.readers.problems import some
from soseleto.data.readers.reading import Reading
from soseleto.errors import DataError, UsageError, did_you_mean

LABELS = ("label_before", "labels_before", "before", *table_files.LABELS)


def column_of(given: str, target: Path, reading: Reading) -> str | None:
    """The column of the target's table that ``given`` names, None if it names a file; UsageError if neither."""
    columns: list[str] = []
    if target.suffix.lower() in table_files.SUFFIXES and target.is_file():
        columns = table_files.load(target, "target", reading).column_names
    if given in columns:
        return given
    if Path(given).expanduser().is_file():
        return None
    what = f"neither a column of {target} nor a file" if columns else "not a file"
    raise UsageError(
        f"--labels-before {given!r} is {what}{did_you_mean(given, columns)}: name the column, or the table, with the "
        "labels from before the check."
    )


def read_labels_before(given: str, target: Examples, path: Path, reading: Reading) -> Tensor:
    """(N,) class indices, one for each example of ``target``, which was read from ``path``."""
    column = column_of(given, path, reading)
    if column is not None:
        by_key = _column(path, column, reading)
        what = f"column {column!r} of {path}"
    else:
        by_key = _table(Path(given).expanduser(), target, reading)
        what = given
    missing = [name for name in map(target.id_of, range(len(target))) if by_key.get(name) is None]
    if missing:
        raise DataError(
            f"{what} has no label for {len(missing)} of the {len(target)} target examples ({some(missing)}): give "
            "every one the label it had before the check, and the same id."
        )
    return _index([str(by_key[target.id_of(row)]) for row in range(len(target))], target, reading, what)


def _column(path: Path, column: str, reading: Reading) -> dict[str, str | None]:
    table = table_files.load(path, "target", replace(reading, truth_column=column))  # as text, exactly
    identity = tables.columns_of(table, replace(reading, truth_column=None), what=str(path)).identity
    return _by_key(_keys(table, identity), table[column].to_pylist(), reading, str(path))


def _table(path: Path, target: Examples, reading: Reading) -> dict[str, str | None]:
    what = str(path)
    table = table_files.load(path, "labels before", Reading(encoding=reading.encoding))
    names: list[str] = table.column_names
    label = _first(names, (reading.label_column or "", *LABELS))
    if label is None:
        raise DataError(f"{path} has no label column among {some(names)}: call it label.")
    table = table_files.load(path, "labels before", Reading(label_column=label, encoding=reading.encoding))
    identity = _first(names, (reading.id_column or "", *table_files.IDS))
    if identity is not None:
        return _by_key(_keys(table, identity), table[label].to_pylist(), reading, what)
    image = _first(names, (reading.path_column or "", *table_files.PATHS))
    if image is not None:
        keys = _by_path([str(value) for value in table[image].to_pylist()], path.parent, target)
        return _by_key(keys, table[label].to_pylist(), reading, what)
    if target.ids is not None and any(not name.isdecimal() for name in target.ids):
        raise DataError(f"{path} has neither ids nor paths to match the target's examples by: add a column id.")
    return _by_key(_keys(table, None), table[label].to_pylist(), reading, what)


def _by_path(values: Sequence[str], folder: Path, target: Examples) -> list[str]:
    """The id of the target example with each path; the path itself where there is none."""
    places = {os.path.abspath(path): target.id_of(row) for row, path in enumerate(target.paths or ())}
    return [places.get(os.path.abspath(folder / value), value) for value in values]


def _keys(table: Any, identity: str | None) -> list[str]:
    values = range(table.num_rows) if identity is None else table[identity].to_pylist()
    return [str(value) for value in values]


def _by_key(keys: Sequence[str], labels: Sequence[Any], reading: Reading, what: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for key, name in zip(keys, names_of(labels, encoding=reading.encoding).names, strict=True):
        if key in found:
            raise DataError(f"{what} has two rows for the example {key!r}: give it one.")
        found[key] = plain(name) if reading.merge_labels and name is not None else name
    return found


def _index(names: Sequence[str], target: Examples, reading: Reading, what: str) -> Tensor:
    if target.classes is None:
        wrong = [name for name in names if not name.isdecimal()]
        places = {} if wrong else {name: int(name) for name in names}
    else:
        places = {name: at for at, name in enumerate(target.classes)}
        wrong = sorted({name for name in names if name not in places})
    if wrong:
        hint = did_you_mean(wrong[0], target.classes or ())
        raise DataError(f"{what} has the labels {some(wrong)}, which are not classes of the data{hint}: correct them.")
    return torch.tensor([places[name] for name in names], dtype=torch.int64)


def _first(columns: Sequence[str], usual: Sequence[str]) -> str | None:
    lower = {column.lower(): column for column in reversed(columns)}
    return next((lower[name.lower()] for name in usual if name.lower() in lower), None)
