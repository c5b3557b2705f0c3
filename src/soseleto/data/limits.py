"""Limits on what readers allocate."""

from __future__ import annotations

from soseleto.errors import DataError

PIECE = 1 << 13  # rows that are read or checked at a time
MAX_BYTES = 1 << 36  # 64 GiB: the largest array a reader allocates


def check_size(unpacked: int, *, what: str) -> None:
    """Refuse an array above ``MAX_BYTES``."""
    if unpacked > MAX_BYTES:
        raise DataError(f"{what} holds {unpacked} bytes, more than the limit of {MAX_BYTES}: split the file.")
