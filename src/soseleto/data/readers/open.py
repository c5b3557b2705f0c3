"""Any accepted form of data as a Raw data set: dispatch by type."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soseleto.data import image_folder, structure
from soseleto.data.examples import Examples
from soseleto.data.lazy import refuse_iterable
from soseleto.data.readers import huggingface, npz, tables
from soseleto.data.readers.frames import frame_table, is_frame
from soseleto.data.readers.in_memory import inputs_of, labels_of, stack_dataset
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.read_once import ReadOnce
from soseleto.data.readers.reading import Reading
from soseleto.data.readers.table_files import SUFFIXES as TABLES
from soseleto.data.text import TextExamples
from soseleto.errors import DataError, UsageError, did_you_mean

UNLABELLED = "unlabelled set"
_FORMS = (
    "a path (image folder, .csv, .tsv, .parquet, .jsonl, .npz), a pair (inputs, labels), "
    "a Dataset of (input, label), a data frame or Examples"
)


def is_dataset(data: Any) -> bool:
    """Whether this is a map-style Dataset of items, and none of the other accepted forms."""
    if isinstance(data, Examples | str | os.PathLike | Tensor | dict) or _is_pair(data):
        return False
    if huggingface.is_huggingface(data) or (hasattr(data, "columns") and hasattr(data, "to_numpy")):
        return False
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _is_pair(data: Any) -> bool:
    return isinstance(data, tuple | list) and len(data) == 2


def raw_of(data: Any, *, name: str, reading: Reading) -> Raw:
    """Read any accepted form; labels are not yet numbered and images not yet decoded."""
    if isinstance(data, Examples):
        return _from_examples(data, name)
    if isinstance(data, ReadOnce):
        return _from_read_once(data, name=name, reading=reading)
    if isinstance(data, str | os.PathLike):
        return _from_path(Path(data).expanduser(), name=name, reading=reading)
    if _is_pair(data):
        return _from_pair(data[0], data[1], name)
    if huggingface.is_huggingface(data):
        return huggingface.from_huggingface(data, name=name, reading=reading)
    if is_frame(data):
        return _from_frame(data, name=name, reading=reading)
    if is_dataset(data):
        return _from_pair(*stack_dataset(data, name=name), name)
    refuse_iterable(data, name=name)
    raise UsageError(f"the {name} is a {type(data).__name__}: give {_FORMS}.")


def _from_read_once(data: ReadOnce, *, name: str, reading: Reading) -> Raw:
    if huggingface.is_huggingface(data.dataset):
        return huggingface.from_huggingface(data.dataset, name=name, reading=reading, constant=False)
    if not hasattr(data.dataset, "__getitem__") or not hasattr(data.dataset, "__len__"):
        raise UsageError(f"ReadOnce is for a Dataset, and the {name} is a {type(data.dataset).__name__}: leave it out.")
    return _from_pair(*stack_dataset(data, name=name), name)


def _from_examples(data: Examples, name: str) -> Raw:
    return Raw(
        name,
        data.labels,
        inputs=data.inputs,
        ids=data.ids,
        classes=data.classes,
        truth=data.truth,
        paths=data.paths,
        texts=isinstance(data, TextExamples),
    )


def _from_pair(inputs: Any, labels: Any, name: str) -> Raw:
    made = Raw(name, labels_of(labels, name=name), inputs=inputs_of(inputs, name=name))
    count = structure.length(made.inputs)
    if count != len(made):
        raise DataError(f"the {name} has {count} inputs but {len(made)} labels: give one for each.")
    return made


def _from_frame(data: Any, *, name: str, reading: Reading) -> Raw:
    return tables.from_table(frame_table(data), name=name, reading=reading, folder=None, what=f"the {name} frame")


def _from_path(path: Path, *, name: str, reading: Reading) -> Raw:
    if path.is_dir():
        return image_folder.read_folder(path, name=name, reading=_folder_options(reading, path))
    if _is_npz(path, name):
        return replace(npz.read_npz(path, name=name, encoding=reading.encoding), name=name)
    return tables.read_table(path, name=name, reading=reading)


def _is_npz(path: Path, name: str) -> bool:
    """Whether a file is an ``.npz`` file or a table; any other raises."""
    suffix = path.suffix.lower()
    if suffix not in (*TABLES, ".npz"):
        known = f"an image folder, or a file ending in {', '.join(TABLES)} or .npz"
        problem = "has an unknown ending" if path.exists() else f"is not there{_close(path)}"
        raise UsageError(f"the {name} {str(path)!r} {problem}: give {known}.")
    if not path.is_file():
        raise UsageError(f"the {name} {str(path)!r} is not there{_close(path)}: check the path.")
    return suffix == ".npz"


def raw_without_labels(path: Path, *, source: Raw, reading: Reading) -> Raw:
    """Inputs like the source's from a path; labels are not read, and every one is 0."""
    if path.is_dir():
        return image_folder.read_any_folder(path, name=UNLABELLED, reading=reading)
    if _is_npz(path, UNLABELLED):
        inputs = npz.read_npz_inputs(path, name=UNLABELLED)
        return Raw(UNLABELLED, torch.zeros(len(inputs), dtype=torch.int64), inputs=inputs)
    features = () if source.table is None else source.table.column_names
    return tables.read_any_table(path, name=UNLABELLED, reading=reading, features=features)


def _folder_options(reading: Reading, path: Path) -> Reading:
    """Refuse options for tables, which have no effect on an image folder."""
    for option in ("path_column", "id_column", "truth_column", "root"):
        if getattr(reading, option) is not None:
            raise UsageError(f"{option} is for tables and has no effect on the image folder {path}: leave it out.")
    return reading


def _close(path: Path) -> str:
    try:
        return did_you_mean(path.name, os.listdir(path.parent))
    except OSError:
        return ""
