"""Data already in memory: pairs of arrays or tensors, and ``.npz`` files."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from soseleto.data import structure
from soseleto.data.reading import Names, Raw, labels_from, names_of, text_of
from soseleto.data.structure import Inputs, check_size
from soseleto.errors import DataError, SoseletoError, first_line

_CHANNELS = (1, 3, 4)
_FIELDS = ("x", "y", "id", "truth")  # of .npz files


def inputs_of(values: Any, *, name: str) -> Inputs:
    """Inputs as a tensor: uint8 is kept, floats and booleans become float32, other integers int64.

    NumPy images (N, H, W, C) become (N, C, H, W), and uint8 (N, H, W) becomes (N, 1, H, W); tensors keep their shape.
    A mapping or a tuple of arrays keeps its structure.
    """
    if isinstance(values, Tensor):
        return _narrow(values, name=name)
    if isinstance(values, Mapping) or (
        isinstance(values, tuple) and values and all(isinstance(part, Tensor | np.ndarray | Mapping) for part in values)
    ):
        return pytree.tree_map(lambda part: narrowed(_real(part, name)), structure.plain(values))
    array = np.asarray(values)
    if array.dtype.kind not in "buif":
        raise DataError(f"{name} inputs are of type {array.dtype}: give real numbers.")
    if array.ndim == 4 and array.shape[3] in _CHANNELS and array.shape[1] not in _CHANNELS:
        array = array.transpose(0, 3, 1, 2)
    elif array.ndim == 3 and array.dtype == np.uint8:
        array = array[:, None]
    if array.dtype != np.uint8:
        array = array.astype(np.float32 if array.dtype.kind in "bf" else np.int64, copy=False)
    return _narrow(torch.from_numpy(_writable(array)), name=name)


def _real(values: Any, name: str) -> Tensor:
    tensor = values.detach() if isinstance(values, Tensor) else torch.from_numpy(_writable(np.asarray(values)))
    if tensor.ndim == 0 or tensor.dtype.is_complex:
        raise DataError(f"{name} inputs hold a {structure.describe(tensor)}: give real numbers, one row per example.")
    return tensor


def narrowed(tensor: Tensor) -> Tensor:
    """float32, uint8, bool or int64: of a structure, in which masks stay bool and no dimension is added."""
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor if tensor.dtype in (torch.uint8, torch.bool) else tensor.to(torch.int64)


def _narrow(values: Tensor, *, name: str) -> Tensor:
    values = narrowed(_real(values, name))
    values = values.float() if values.dtype == torch.bool else values
    return values[:, None] if values.ndim == 1 else values  # one column


def _writable(array: Any) -> Any:
    """A copy if needed: torch warns about read-only arrays and refuses negative strides."""
    fine = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return array if fine else array.copy()


def labels_of(values: Any, *, name: str) -> Tensor | Names:
    """Labels in memory: integers are class indices, floats are regression targets, text is class names."""
    if isinstance(values, Tensor):
        labels = values.detach()
    else:
        array = np.asarray(values)
        if array.dtype.kind in "OUS":
            return names_of(array.reshape(-1).tolist())
        if array.dtype.kind not in "buif":
            raise DataError(f"{name} labels are of type {array.dtype}: give class indices, names or numbers.")
        labels = torch.from_numpy(_writable(array.astype(np.int64) if array.dtype.kind in "bui" else array))
    if labels.dtype.is_floating_point:
        return labels.to(torch.float32)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    return labels.to(torch.int64)


def tensor_of(value: Any) -> Tensor:
    """Arrays and Pillow images as tensors, images of bytes with their channels first."""
    if isinstance(value, Tensor):
        return value
    array = np.array(value)  # a copy: torch warns about read-only arrays
    if array.dtype == np.uint8 and array.ndim in (2, 3):
        image: Tensor = inputs_of(array[None], name="given")[0]
        return image
    return torch.from_numpy(array)


def read_npz(path: Path, *, name: str, labelled: bool = True) -> Raw:
    """Read x as inputs, y as labels, id as ids and truth as correct labels; without ``labelled`` x alone."""
    arrays = load_arrays(path)
    for field in ("x", "y") if labelled else ("x",):
        if field not in arrays:
            raise DataError(f"{path} has no array {field!r}: save it with np.savez(path, x=inputs, y=labels).")
    inputs = inputs_of(arrays["x"], name=name)
    if not labelled:
        return Raw(name, torch.zeros(len(inputs), dtype=torch.int64), inputs=inputs)
    count, labels = len(inputs), arrays["y"]
    for field, array in arrays.items():
        if array.ndim == 0 or len(array) != count:
            raise DataError(f"{path} has {count} inputs in x but shape {array.shape} in {field}: give one for each.")
    ids = arrays["id"].reshape(-1).tolist() if "id" in arrays else None
    return Raw(
        name,
        labels_from(labels.reshape(-1).tolist() if labels.size == count else labels, name=name),
        inputs=inputs,
        ids=ids and tuple(text_of(v, where=f"id {at} in {path}") for at, v in enumerate(ids)),
        truth=names_of(arrays["truth"].reshape(-1).tolist()) if "truth" in arrays else None,
    )


def load_arrays(path: Path) -> dict[str, Any]:
    """The arrays x, y, id and truth by name, as far as the file has them."""
    try:
        with zipfile.ZipFile(path) as archive:
            for member in archive.infolist():
                check_size(member.file_size, what=f"{member.filename} in {path}")
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files if name in _FIELDS}
    except SoseletoError:
        raise
    except Exception as error:  # many kinds, from NumPy, zipfile and zlib
        raise DataError(
            f"{path} cannot be read ({first_line(error)}): save numbers or fixed-length text by np.savez, not objects."
        ) from error
    for name, array in arrays.items():
        if array.dtype.kind not in "buifUS":
            raise DataError(f"{name} in {path} is of type {array.dtype}: save numbers or fixed-length text.")
    return arrays
