"""Sizes that are refused before memory is spent on them."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import BinaryIO

from soseleto.errors import DataError

MAX_BYTES = 1 << 36  # 64 GiB: the largest array any reader makes
MAX_EXPANSION = 200  # how many times its compressed size a file may grow to ...
FREE_BYTES = 1 << 24  # ... once it is larger than this


def check_expansion(packed: int, unpacked: int, *, what: str) -> None:
    """Refuse a decompression bomb by the sizes it declares."""
    if unpacked > MAX_BYTES or (unpacked > FREE_BYTES and unpacked > MAX_EXPANSION * max(packed, 1)):
        raise DataError(
            f"{what} would grow from {packed} to {unpacked} bytes, which looks like a decompression bomb: "
            "unpack it yourself if you trust it."
        )


def check_size(unpacked: int, *, what: str) -> None:
    """Refuse an array beyond any sensible size."""
    if unpacked > MAX_BYTES:
        raise DataError(f"{what} holds {unpacked} bytes, more than the {MAX_BYTES} that are read.")


def open_maybe_gzip(path: Path) -> BinaryIO:
    """The file for reading, unzipped on the way when it begins like gzip."""
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not zipped:
        return file
    file.close()
    return gzip.open(path, "rb")  # type: ignore[return-value]


def read_exactly(file: BinaryIO, count: int, *, path: Path) -> bytes:
    """``count`` bytes and then the end of the file; memory grows only with what is really there."""
    if count > FREE_BYTES:
        check_expansion(os.path.getsize(path), count, what=str(path))
    try:
        content = file.read(count)
        more = file.read(1)
    except (OSError, EOFError, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is damaged ({error}): fetch it again.") from error
    if len(content) < count or more:
        extra = "more" if more else f"only {len(content)}"
        raise DataError(f"{path} should hold {count} bytes after its header but has {extra}: fetch it again.")
    return content
