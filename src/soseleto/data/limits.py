"""Limits on what readers allocate."""

from __future__ import annotations

from soseleto.errors import DataError

PIECE = 1 << 13  # rows that are read or checked at a time
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
