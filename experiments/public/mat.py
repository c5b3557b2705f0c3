"""Numeric arrays from MATLAB 5 files (SVHN); our own reader, so that every size is checked before memory is used."""

from __future__ import annotations

import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.data.limits import check_expansion
from soseleto.errors import DataError

_MATRIX, _COMPRESSED = 14, 15
_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
_NUMERIC_CLASSES = range(6, 16)  # double to uint64; others are cells, structures, text, sparse
_COMPLEX = 0x0800
_HEAD = 4096  # bytes, enough for flags, shape and name


def read_mat(path: Path, wanted: tuple[str, ...]) -> dict[str, Any]:
    """The wanted variables; raises if one is missing."""
    try:
        content = memoryview(path.read_bytes())
        found = _variables(content, wanted, path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: type soseleto data svhn.") from error
    except (struct.error, ValueError, zlib.error, OverflowError, MemoryError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged ({error}): fetch it again.") from error
    for name in wanted:
        if name not in found:
            raise DataError(f"{path} has no variable {name!r}: it is truncated or another file; fetch it again.")
    return found


def _variables(content: memoryview, wanted: tuple[str, ...], path: Path) -> dict[str, Any]:
    if len(content) < 136 or bytes(content[126:128]) not in (b"IM", b"MI"):
        raise DataError(f"{path} is not a MATLAB 5 file: fetch it again.")
    order = "<" if bytes(content[126:128]) == b"IM" else ">"
    found: dict[str, Any] = {}
    at = 128
    while at + 8 <= len(content) and len(found) < len(wanted):
        kind, size = struct.unpack_from(f"{order}II", content, at)
        body = content[at + 8 : at + 8 + size]
        if len(body) < size:
            raise ValueError("a variable is truncated")
        if kind == _COMPRESSED:
            body = _unpacked(body, order, wanted, path)
        if kind in (_MATRIX, _COMPRESSED) and len(body):
            name, array = _matrix(body, order, wanted)
            if array is not None:
                found[name] = array
        at += 8 + size + (-size % 8 if kind != _COMPRESSED else 0)
    return found


def _unpacked(body: memoryview, order: str, wanted: tuple[str, ...], path: Path) -> memoryview:
    """The decompressed matrix; only its head is decompressed unless it is wanted and its size is plausible."""
    head = zlib.decompressobj().decompress(body, _HEAD)
    kind, size = struct.unpack_from(f"{order}II", head)
    if kind != _MATRIX or _head(memoryview(head)[8:], order)[0] not in wanted:
        return memoryview(b"")
    check_expansion(len(body), size, what=str(path))
    whole = zlib.decompressobj().decompress(body, size + 8)
    if len(whole) != size + 8:
        raise ValueError("a variable is truncated")
    return memoryview(whole)[8:]


def _head(body: memoryview, order: str) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape and flags of a matrix, and the offset of its numbers."""
    _, flags, at = _element(body, 0, order)
    _, sides, at = _element(body, at, order)
    _, name, at = _element(body, at, order)
    shape = struct.unpack(f"{order}{len(sides) // 4}i", sides)
    return bytes(name).decode("ascii", "replace"), shape, struct.unpack_from(f"{order}I", flags)[0], at


def _matrix(body: memoryview, order: str, wanted: tuple[str, ...]) -> tuple[str, Any]:
    name, shape, flags, at = _head(body, order)
    if name not in wanted:
        return name, None
    if flags & 0xFF not in _NUMERIC_CLASSES or flags & _COMPLEX:
        raise ValueError(f"{name} is not an array of real numbers")
    kind, numbers, _ = _element(body, at, order)
    if kind not in _TYPES or not shape or min(shape) < 0:
        raise ValueError(f"{name} has type {kind} and shape {shape}")
    dtype = np.dtype(order + _TYPES[kind])
    if math.prod(shape) * dtype.itemsize != len(numbers):
        raise ValueError(f"{name} declares shape {shape} but holds {len(numbers)} bytes")
    return name, np.frombuffer(numbers, dtype=dtype).reshape(shape, order="F")


def _element(body: memoryview, at: int, order: str) -> tuple[int, memoryview, int]:
    """Type and bytes of one data element, and the offset of the next."""
    kind, size = struct.unpack_from(f"{order}II", body, at)
    if kind >> 16:  # up to 4 bytes, packed into the tag itself
        size, kind = kind >> 16, kind & 0xFFFF
        if size > 4:
            raise ValueError("a small element is too large")
        return kind, body[at + 4 : at + 4 + size], at + 8
    data = body[at + 8 : at + 8 + size]
    if len(data) < size:
        raise ValueError("a variable is truncated")
    return kind, data, at + 8 + size + (-size % 8)
