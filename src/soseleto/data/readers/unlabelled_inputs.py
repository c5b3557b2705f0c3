"""Unlabelled inputs for prediction: images, folders of images, tables and ``.npz`` files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from soseleto.data.image_folder import SUFFIXES as IMAGES
from soseleto.data.images import decoded
from soseleto.data.readers.file_names import escaped
from soseleto.data.readers.npz import read_npz_inputs
from soseleto.data.readers.prepare_tables import Preparation
from soseleto.data.readers.problems import some
from soseleto.data.readers.reading import Reading
from soseleto.data.readers.table_files import SUFFIXES as TABLES
from soseleto.data.readers.tables import read_columns, read_features, read_paths, read_prepared
from soseleto.errors import DataError, UsageError, counted


class Inputs(NamedTuple):
    names: tuple[str, ...]  # FILE or FILE:ROW of each input
    values: Tensor  # (N, ...) as read for training


def read_inputs(
    paths: Sequence[str | os.PathLike[str]],
    *,
    shape: tuple[int, ...],
    columns: Sequence[str] | None = None,
    encoding: str | None = None,
    path_column: str | None = None,
    preparation: Preparation | None = None,
) -> Inputs:
    """All inputs in ``paths``, in the shape the model was trained on; an unreadable input raises.

    columns: the names of the features in the training; None where it had none
    preparation: of the training's tables
    encoding: of text tables, UTF-8 by default
    path_column: of the training's tables of images, where it had no usual name
    """
    Reading(encoding=encoding)  # raises for an unknown one
    tables = _Tables(shape, columns, encoding, path_column, preparation)
    read = [_one(Path(path).expanduser(), shape, tables) for path in paths]
    if not read:
        raise UsageError("nothing to predict: name image files, folders, tables or .npz files.")
    names = tuple(name for inputs in read for name in inputs.names)
    return Inputs(names, torch.cat([inputs.values for inputs in read]))


class _Tables(NamedTuple):
    """How the tables of a model are read: by the training's preparation or columns, in order, or as image lists."""

    shape: tuple[int, ...]
    columns: Sequence[str] | None
    encoding: str | None
    path_column: str | None
    preparation: Preparation | None

    def read(self, path: Path) -> Inputs:
        if self.preparation is not None:
            return _rows(path, read_prepared(path, self.preparation, self.encoding))
        if self.columns is not None:
            return _rows(path, read_columns(path, self.columns, self.encoding))
        if len(self.shape) == 1:
            return _rows(path, read_features(path, self.shape[0], self.encoding))
        return _images(read_paths(path, self.encoding, self.path_column), self.shape)


def _one(path: Path, shape: tuple[int, ...], tables: _Tables) -> Inputs:
    suffix = path.suffix.lower()
    if not path.exists():
        raise UsageError(f"{path} is not there: check the path.")
    if path.is_dir():
        return _images(_below(path), shape)
    if suffix in IMAGES:
        return _images([str(path)], shape)
    if suffix in TABLES:
        return tables.read(path)
    if suffix == ".npz":
        values = read_npz_inputs(path)
        if tuple(values.shape[1:]) != shape:
            raise DataError(f"{path} holds inputs of shape {tuple(values.shape[1:])}: the model needs {shape}.")
        return _rows(path, values)
    raise UsageError(f"{path} has an unknown ending: name images, folders, {', '.join(TABLES)} or .npz files.")


def _rows(path: Path, values: Tensor) -> Inputs:
    return Inputs(tuple(f"{path}:{row}" for row in range(len(values))), values)


def _below(folder: Path) -> list[str]:
    found = [
        os.path.join(here, name)
        for here, _, names in os.walk(folder)
        for name in names
        if name.lower().endswith(IMAGES) and not name.startswith(".")
    ]
    if not found:
        raise DataError(f"there are no images below {folder}: name a folder with {', '.join(IMAGES[:3])} ... files.")
    return sorted(found)


def _images(files: Sequence[str], shape: tuple[int, ...]) -> Inputs:
    if len(shape) != 3:
        raise UsageError(f"{files[0]} is an image, but the model takes inputs of shape {shape}: name a table.")
    found = decoded(files, (shape[0], shape[1], shape[2]))
    if found.bad:
        why = [f"{escaped(files[row])} {reason}" for row, reason in found.bad]
        raise DataError(f"{counted(len(why), 'image')} cannot be read ({some(why)}): leave them out.")
    return Inputs(tuple(map(escaped, files)), found.inputs)
