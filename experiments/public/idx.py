"""IDX files (MNIST), plain or gzipped: a big-endian header with the shape, then the bytes."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.data.limits import check_size, open_maybe_gzip, read_exactly
from soseleto.errors import DataError


def read_idx(path: Path) -> Any:
    """A uint8 array; raises unless the file holds exactly the bytes its header declares."""
    try:
        with open_maybe_gzip(path) as file:
            shape = _shape(file.read(4), file, path)
            content = read_exactly(file, math.prod(shape), path=path)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: type soseleto data mnist.") from error
    except (OSError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}): fetch it again.") from error
    return np.frombuffer(bytearray(content), dtype=np.uint8).reshape(shape)


def _shape(magic: bytes, file: Any, path: Path) -> tuple[int, ...]:
    if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] != 8 or not 1 <= magic[3] <= 4:
        raise DataError(f"{path} is not an IDX file of bytes (it starts with {magic.hex()}): fetch it again.")
    sides = file.read(4 * magic[3])
    if len(sides) < 4 * magic[3]:
        raise DataError(f"{path} ends inside its header: fetch it again.")
    shape = struct.unpack(f">{magic[3]}I", sides)
    check_size(math.prod(shape), what=str(path))
    return shape
