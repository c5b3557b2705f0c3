"""Content digests of files that were read before, so that a large set of files need not be read at every start.

A file counts as unchanged if its size, its inode and the times of its last modification and last change are what they
were. No program can set the time of the last change, so that a file is noticed that was written to and got its old time
back. Digests are remembered only of files that had been left alone for a while before they were read: a second change
within the resolution of the clock would not show. In addition some files, evenly spaced, are read again; if the content
of one has changed all the same, none is believed.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

CHEAP = 1 << 28  # bytes: the files of a smaller set are all read
SAMPLE = 64  # files that are read again in any case
SETTLED = 2.0  # seconds since the last change of a file whose digest is remembered
_NAME = "known-files.sqlite"

Stamp = tuple[int, int, int, int]  # size, inode, nanoseconds of the last modification and change
Digests = Callable[[Sequence[str]], list[str]]  # reads these files


def stamps_of(files: Sequence[str]) -> list[Stamp | None]:
    """To be taken before the files are read; None for a file that is not there."""
    return [_stamp(file) for file in files]


def are_cheap(stamps: Sequence[Stamp | None]) -> bool:
    return sum(stamp[0] for stamp in stamps if stamp is not None) <= CHEAP


def digests_of(root: Path, files: Sequence[str], stamps: Sequence[Stamp | None], read: Digests) -> list[str]:
    """The digest of every file; those that have not changed since they were read are not read again."""
    found = [None] * len(files) if are_cheap(stamps) else _known(root, files, stamps)
    known = [row for row, digest in enumerate(found) if digest is not None]
    again = known[:: max(1, len(known) // SAMPLE)]
    if read([files[row] for row in again]) != [found[row] for row in again]:
        found = [None] * len(files)
    left = [row for row, digest in enumerate(found) if digest is None]
    new = dict(zip(left, read([files[row] for row in left]), strict=True))
    remember(root, [files[row] for row in left], [stamps[row] for row in left], list(new.values()))
    return [new[row] if digest is None else digest for row, digest in enumerate(found)]


def remember(root: Path, files: Sequence[str], stamps: Sequence[Stamp | None], digests: Sequence[str]) -> None:
    """Nothing of a set that is cheap to read, and nothing of files that were changed just now."""
    if are_cheap(stamps):
        return
    latest = time.time_ns() - int(SETTLED * 1e9)
    rows = [
        (os.fsencode(os.path.abspath(file)), *map(str, stamp), digest)
        for file, stamp, digest in zip(files, stamps, digests, strict=True)
        if stamp is not None and stamp[3] < latest and len(digest) == 64  # else it is the name of an error
    ]
    try:
        with closing(_opened(root)) as table, table:
            table.executemany("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?)", rows)
    except sqlite3.Error:  # a damaged file of what was only remembered
        (root / _NAME).unlink(missing_ok=True)


def _known(root: Path, files: Sequence[str], stamps: Sequence[Stamp | None]) -> list[str | None]:
    if not (root / _NAME).exists():
        return [None] * len(files)
    found: list[str | None] = []
    try:
        with closing(_opened(root)) as table:
            for file, stamp in zip(files, stamps, strict=True):
                path = os.fsencode(os.path.abspath(file))
                row = table.execute("SELECT * FROM files WHERE path = ?", (path,)).fetchone()
                same = row is not None and stamp is not None and tuple(row[1:5]) == tuple(map(str, stamp))
                found.append(str(row[5]) if same else None)
    except sqlite3.Error:
        return [None] * len(files)
    return found


def _opened(root: Path) -> sqlite3.Connection:
    table = sqlite3.connect(root / _NAME, timeout=60)
    columns = "path BLOB PRIMARY KEY, size TEXT, inode TEXT, modified TEXT, changed TEXT, digest TEXT"
    table.execute(f"CREATE TABLE IF NOT EXISTS files ({columns})")
    return table


def _stamp(file: str) -> Stamp | None:
    try:
        found = os.stat(file)
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_ino, found.st_mtime_ns, found.st_ctime_ns
