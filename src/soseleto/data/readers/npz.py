"""``.npz`` files with arrays x and y, and optionally id and truth; no pickles, no decompression bombs."""

from __future__ import annotations

import struct
import zipfile
import zlib
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from torch import Tensor

from soseleto.data.readers.in_memory import inputs_of
from soseleto.data.readers.labels import names_of, text_of
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.tables import labels_from
from soseleto.data.storage import check_expansion, check_size
from soseleto.errors import DataError, SoseletoError

_FIELDS = ("x", "y", "id", "truth")


def read_npz(path: Path, *, name: str, encoding: str | None = None) -> Raw:
    """Read x as inputs, y as labels (numbered as in ``labels``), id as ids and truth as correct labels."""
    arrays = load_arrays(path)
    for field in ("x", "y"):
        if field not in arrays:
            raise DataError(f"{path} has no array {field!r}: save it with np.savez(path, x=inputs, y=labels).")
    count = len(arrays["x"]) if arrays["x"].ndim else 0
    for field, array in arrays.items():
        if array.ndim == 0 or len(array) != count:
            raise DataError(f"{path} has {count} inputs in x but shape {array.shape} in {field}: give one for each.")
    if "id" in arrays and arrays["id"].ndim != 1:
        raise DataError(f"id in {path} has shape {arrays['id'].shape}: give one name per example.")
    labels = arrays["y"]
    return Raw(
        name,
        labels_from(labels.reshape(-1).tolist() if labels.size == count else labels, name=name, encoding=encoding),
        inputs=inputs_of(arrays["x"], name=name),
        ids=_ids(arrays["id"].tolist(), path, encoding) if "id" in arrays else None,
        truth=names_of(arrays["truth"].reshape(-1).tolist(), encoding=encoding) if "truth" in arrays else None,
        paths=None,
    )


def read_npz_inputs(path: Path, *, name: str = "predicted") -> Tensor:
    """Only the array x."""
    arrays = load_arrays(path)
    if "x" not in arrays:
        raise DataError(f"{path} has no array 'x': save it with np.savez(path, x=inputs).")
    return inputs_of(arrays["x"], name=name)


def _ids(values: list[Any], path: Path, encoding: str | None) -> tuple[str, ...]:
    return tuple(text_of(v, where=f"id {at} in {path}", encoding=encoding) for at, v in enumerate(values))


def load_arrays(path: Path, *, every: bool = False) -> dict[str, Any]:
    """The arrays x, y, id and truth by name, as far as the file has them; with ``every``, all of its arrays."""
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            wanted = members if every else [field for field in _FIELDS if field in members]
            return {field: _array(archive, members[field], path) for field in wanted}
    except SoseletoError:
        raise
    except _DAMAGED_ARCHIVE as error:
        if isinstance(error, FileNotFoundError):
            raise DataError(f"{path} is missing: check the path.") from error
        raise DataError(f"{path} is not a complete .npz file ({error}): save it again with np.savez.") from error


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, path: Path) -> Any:
    """One array; its declared shape is checked against its size before memory is allocated."""
    what = f"{info.filename} in {path}"
    check_expansion(info.compress_size, info.file_size, what=what)
    with archive.open(info) as file:
        try:
            version = np.lib.format.read_magic(file)
            read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
            shape, fortran, dtype = read(file)
        except _DAMAGED_HEADER as error:
            raise DataError(f"{what} is not a NumPy array ({error}): save it again.") from error
        if dtype.hasobject or dtype.kind not in "buifUS":
            raise DataError(f"{what} is of type {dtype}: save numbers or fixed-length text, not objects.")
        size = int(dtype.itemsize)
        for side in shape:
            size *= int(side)
        check_size(size, what=what)
        if size != info.file_size - file.tell() or min(shape, default=0) < 0:
            raise DataError(f"{what} declares shape {shape} but holds {info.file_size} bytes: save it again.")
        content = file.read(size)
    if len(content) != size:
        raise DataError(f"{what} is truncated: save it again.")
    flat = np.frombuffer(bytearray(content), dtype=dtype)
    return flat.reshape(shape, order="F" if fortran else "C")


# What zipfile raises; undecodable names and negative offsets are ValueErrors.
_DAMAGED_ARCHIVE = (
    zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError, struct.error
)  # fmt: skip
# What NumPy raises for a header that is not a literal: it parses it and, if that fails, filters its tokens.
_DAMAGED_HEADER = (ValueError, TypeError, KeyError, SyntaxError, TokenError, RecursionError, MemoryError)
