"""Append-only files with one JSON object per line: ``metrics.jsonl`` and ``review.jsonl``.

A record counts once its newline is written. A process killed during a write leaves an incomplete last line: ``read``
ignores it, and ``append`` removes it so that the next record starts on a line of its own.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from soseleto.errors import DataError
from soseleto.run_folder.files import as_json, writing
from soseleto.run_folder.reading import complete_lines

T = TypeVar("T")


def line_of(record: Mapping[str, Any]) -> bytes:
    """A record as it is written."""
    return as_json(record).encode() + b"\n"


def append(path: Path, record: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one record; non-finite numbers are written as null. ``durable`` returns only after an fsync.

    A failed write is undone: either the whole record is in the file or nothing of it.
    """
    line = line_of(record)
    with writing(path), path.open("a+b", buffering=0) as file:
        _remove_incomplete_line(file)
        before = file.seek(0, os.SEEK_END)
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def read(path: Path, parse: Callable[[dict[str, Any]], T], *, kind: str, fix: str) -> list[T]:
    """Every complete record, in order, through ``parse``; an empty list where the file does not exist.

    A line that is not a JSON object, or that ``parse`` rejects, raises: "line 2 of FILE is not ``kind``: ``fix``."
    """
    if not path.exists():
        return []
    *lines, _incomplete = complete_lines(path).split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            records.append(parse(_object(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is not {kind}: {fix}.") from error
    return records


def _object(line: bytes) -> dict[str, Any]:
    record = json.loads(line)
    if not isinstance(record, dict):
        raise TypeError(f"a {type(record).__name__}")
    return record


def _remove_incomplete_line(file: BinaryIO) -> None:
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
