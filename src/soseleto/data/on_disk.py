"""Data that would fill the memory: kept in files without a name, which are mapped and vanish with the process.

The pages of such a file are read when they are used, and the system drops them when memory is needed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soseleto.data.image_decoding.cache import cache_root, sweep
from soseleto.errors import DataError

LARGE = 1 << 28  # bytes, above which a table is read in pieces and kept on disk
PIECE = 1 << 13  # rows that are read or copied at a time


def is_large(size: int) -> bool:
    """Whether so many bytes are kept on disk."""
    return size > LARGE


@contextmanager
def passing_file(folder: Path | str | None, *, what: str) -> Iterator[Path]:
    """A new file, whose name is removed at the end; what has it mapped keeps its content.

    folder: by default the cache, see ``cache_root``
    """
    root, path = cache_root(folder), None
    try:
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        handle, name = tempfile.mkstemp(prefix="unfinished-table-", dir=root)
        os.close(handle)
        path = Path(name)
        yield path
    except OSError as error:
        raise DataError(
            f"{what} is too large for memory and could not be kept in {root} ({error}): set SOSELETO_CACHE to a folder "
            "on a larger disk."
        ) from error
    finally:
        if path is not None:
            path.unlink()


def empty(rows: int, *sizes: int, what: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor (rows, *sizes) to be filled, on disk if it is large."""
    size = rows * int(np.prod(sizes))
    if not is_large(size * dtype.itemsize):
        return torch.empty(rows, *sizes, dtype=dtype)
    with passing_file(None, what=what) as path:
        with open(path, "r+b") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is noticed now, and not as a crash later
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            else:
                file.truncate(size * dtype.itemsize)
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(rows, *sizes)


def select(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[index]``, on disk if it is large; of a tensor on a GPU it stays there."""
    if tensor.device.type != "cpu" or not is_large(len(index) * tensor[:1].nbytes):
        return tensor.index_select(0, index)
    made = empty(len(index), *tensor.shape[1:], what="a part of the data", dtype=tensor.dtype)
    for out, piece in zip(made.split(PIECE), index.split(PIECE), strict=True):
        torch.index_select(tensor, 0, piece, out=out)
    return made
