"""Size limits, checked before memory is allocated."""

from __future__ import annotations

import gzip
import os
from pathlib import Path
from typing import BinaryIO

from soseleto.errors import DataError

MAX_BYTES = 1 << 36  # 64 GiB: the largest array a reader allocates
MAX_EXPANSION = 200  # largest ratio of unpacked to compressed size of a file ...
FREE_BYTES = 1 << 24  # ... that unpacks to more than this


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


def open_maybe_gzip(path: Path) -> BinaryIO:
    """Open the file for reading, decompressing it if it starts with the gzip magic bytes."""
    file = open(path, "rb")  # noqa: SIM115 - the caller closes it
    zipped = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    if not zipped:
        return file
    file.close()
    return gzip.open(path, "rb")  # type: ignore[return-value]


def read_exactly(file: BinaryIO, count: int, *, path: Path) -> bytes:
    """Read exactly ``count`` bytes up to the end of the file; memory grows only with the bytes actually there."""
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
