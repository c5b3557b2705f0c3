"""The labels that the target's examples had before they were checked: a column of its table, or a table of its own.

A table of its own is matched by its id column, else by row.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from soseleto.data import tables
from soseleto.data.classes import plain
from soseleto.data.examples import Examples
from soseleto.data.labels import names_of
from soseleto.data.reading import Reading, some
from soseleto.errors import DataError, UsageError, did_you_mean

_LABELS = ("label_before", "labels_before", "before", *tables.LABELS)


def column_of(given: str, target: Path, reading: Reading) -> str | None:
    """The column of the target's table that ``given`` names, None if it names a file; UsageError if neither."""
    is_table = target.suffix.lower() in tables.SUFFIXES and target.is_file()
    columns = tables.load(target, reading).column_names if is_table else []
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
    file = Path(given).expanduser() if column is None else path
    table = tables.load(file, reading)
    label = column or tables.usual(table.column_names, (reading.label_column or "", *_LABELS))
    if label is None:
        raise DataError(f"{file} has no label column among {some(table.column_names)}: call it label.")
    labels = names_of(tables.load(file, replace(reading, label_column=label))[label].to_pylist()).names
    identity = tables.usual(table.column_names, (reading.id_column or "", *tables.IDS))
    keys = map(str, range(len(labels)) if identity is None else table[identity].to_pylist())
    by_key = dict(zip(keys, labels, strict=True))
    if len(by_key) < len(labels):
        raise DataError(f"{file} has two rows for one example: give every example one.")
    before = [by_key.get(target.id_of(row)) for row in range(len(target))]
    if missing := [target.id_of(row) for row, name in enumerate(before) if name is None]:
        raise DataError(
            f"{file} has no label for {len(missing)} of the {len(target)} target examples ({some(missing)}): give "
            "every one the label it had before the check, and the same id, in a column id."
        )
    return _indices([plain(str(name)) if reading.merge_labels else str(name) for name in before], target, file)


def _indices(names: list[str], target: Examples, file: Path) -> Tensor:
    if target.classes is None:
        places = {name: int(name) for name in names if name.isdecimal()}
    else:
        places = {name: at for at, name in enumerate(target.classes)}
    if wrong := sorted(set(names).difference(places)):
        hint = did_you_mean(wrong[0], target.classes or ())
        raise DataError(f"{file} has the labels {some(wrong)}, which are not classes of the data{hint}: correct them.")
    return torch.tensor([places[name] for name in names], dtype=torch.int64)
