"""Limits on memory, and files for what would exceed it.

Large tensors are kept in files without a name, which are mapped and disappear with the process: the system reads their
pages when they are used and drops them when memory is needed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from soseleto.errors import DataError

LARGE = 1 << 28  # bytes above which data is kept on disk
PIECE = 1 << 13  # rows that are read or copied at a time
MAX_BYTES = 1 << 36  # 64 GiB: the largest array a reader allocates
MAX_EXPANSION = 200  # largest ratio of unpacked to compressed size of a file ...
FREE_BYTES = 1 << 24  # ... that unpacks to more than this
_STALE = 24 * 3600  # seconds after which the unfinished file of another process is removed


def check_expansion(packed: int, unpacked: int, *, what: str) -> None:
    """Refuse a decompression bomb by its declared sizes."""
    if unpacked > MAX_BYTES or (unpacked > FREE_BYTES and unpacked > MAX_EXPANSION * max(packed, 1)):
        raise DataError(
            f"{what} would grow from {packed} to {unpacked} bytes, which looks like a decompression bomb: "
            "unpack it yourself if you trust it."
        )


def check_size(unpacked: int, *, what: str) -> None:
    """Refuse an array above ``MAX_BYTES``."""
    if unpacked > MAX_BYTES:
        raise DataError(f"{what} holds {unpacked} bytes, more than the limit of {MAX_BYTES}: split the file.")


def cache_root() -> Path:
    """SOSELETO_CACHE, else ~/.cache/soseleto/images."""
    chosen = os.environ.get("SOSELETO_CACHE") or Path.home() / ".cache" / "soseleto" / "images"
    return Path(chosen).expanduser()


def sweep(root: Path) -> None:
    """Remove what killed processes left unfinished more than a day ago."""
    for unfinished in root.glob("unfinished-*"):
        if time.time() - unfinished.stat().st_mtime > _STALE:
            shutil.rmtree(unfinished, ignore_errors=True) if unfinished.is_dir() else unfinished.unlink()


def is_large(size: int) -> bool:
    """Whether this many bytes are kept on disk."""
    return size > LARGE


@contextmanager
def passing_file(*, what: str) -> Iterator[Path]:
    """A new file in the cache, whose name is removed at the end; a process that has mapped it keeps its content."""
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        sweep(root)
        with tempfile.NamedTemporaryFile(prefix="unfinished-table-", dir=root) as file:
            yield Path(file.name)
    except OSError as error:
        raise DataError(
            f"{what} is too large for memory and could not be kept in {root} ({error}): set SOSELETO_CACHE to a folder "
            "on a larger disk."
        ) from error


def empty(rows: int, *sizes: int, what: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor (rows, *sizes) to be filled, on disk if it is large."""
    size = rows * int(np.prod(sizes))
    if not is_large(size * dtype.itemsize):
        return torch.empty(rows, *sizes, dtype=dtype)
    with passing_file(what=what) as path:
        with open(path, "r+b") as file:
            if hasattr(os, "posix_fallocate"):  # a full disk is noticed now, and not as a crash later
                os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
            else:
                file.truncate(size * dtype.itemsize)
        return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(rows, *sizes)


def concatenate(first: Tensor, second: Tensor) -> Tensor:
    """The rows of both, on disk if they are large."""
    if first.device.type != "cpu" or not is_large(first.nbytes + second.nbytes):
        return torch.cat([first, second])
    both = empty(len(first) + len(second), *first.shape[1:], what="the data with its probes", dtype=first.dtype)
    both[: len(first)] = first
    both[len(first) :] = second
    return both


def select(tensor: Tensor, index: Tensor) -> Tensor:
    """``tensor[index]``, on disk if it is large; a tensor on a GPU stays there."""
    if tensor.device.type != "cpu" or not is_large(len(index) * tensor[:1].nbytes):
        return tensor.index_select(0, index)
    selected = empty(len(index), *tensor.shape[1:], what="a part of the data", dtype=tensor.dtype)
    for out, rows in zip(selected.split(PIECE), index.split(PIECE), strict=True):
        torch.index_select(tensor, 0, rows, out=out)
    return selected
