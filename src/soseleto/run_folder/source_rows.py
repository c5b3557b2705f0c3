"""Recognise the rows of a source file after the training: by id or by content, never by row number alone.

``rows.parquet`` has the id of every row and a digest of its cells, in the order of the table at the time of training.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from soseleto.data.readers import table_files
from soseleto.data.readers.problems import some
from soseleto.data.readers.reading import Reading
from soseleto.data.readers.tables import columns_of
from soseleto.errors import DataError, counted, need
from soseleto.run_folder import checksums
from soseleto.run_folder.folder import ROWS, RunFolder
from soseleto.run_folder.npz_source import row_table
from soseleto.run_folder.plausible import readable
from soseleto.run_folder.reading import table_of

_BATCH = 1 << 14  # rows at a time, whose cells are in memory as text
_need = partial(need, to="recording the rows of a table")


class Digests(Sequence[bytes]):
    """The digests of many rows, one after the other."""

    SIZE = 16

    def __init__(self, joined: bytes) -> None:
        self._joined = joined

    @classmethod
    def of(cls, digests: Sequence[bytes]) -> Digests:
        if any(len(digest) != cls.SIZE for digest in digests):
            raise ValueError(f"a digest has not {cls.SIZE} bytes")
        return cls(b"".join(digests))

    def __len__(self) -> int:
        return len(self._joined) // self.SIZE

    def __getitem__(self, at: Any) -> Any:
        first = range(len(self))[at] * self.SIZE
        return self._joined[first : first + self.SIZE]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digests) and self._joined == other._joined

    __hash__ = None  # type: ignore[assignment]

    def column(self) -> Any:
        """As a pyarrow array."""
        pyarrow = _need("pyarrow")
        buffers = [None, pyarrow.py_buffer(self._joined)]
        return pyarrow.Array.from_buffers(pyarrow.binary(self.SIZE), len(self), buffers).cast(pyarrow.binary())


class RowNumbers(Sequence[str]):
    """The ids of rows that have none of their own: "0", "1", ..."""

    def __init__(self, count: int) -> None:
        self._range = range(count)

    def __len__(self) -> int:
        return len(self._range)

    def __getitem__(self, at: Any) -> Any:
        return str(self._range[at])


@dataclass(frozen=True)
class Rows:
    """The rows of a table: their ids, and digests of their cells in ``columns``."""

    columns: tuple[str, ...]
    ids: Sequence[str]
    digests: Digests

    @classmethod
    def of(cls, source: Path, reading: Reading) -> Rows | None:
        """The rows of the table or ``.npz`` file ``source``; None where it is neither."""
        source = source.expanduser()
        if not source.is_file():
            return None
        if is_npz(source):
            table = row_table(source, reading.encoding)
            identity = "id" if "id" in table.column_names else None
        elif is_table(source):
            table = table_files.load(source, "source", reading, all_text=True)
            identity = columns_of(table, reading, what=str(source)).identity
        else:
            return None
        columns = tuple(table.column_names)
        return cls(columns, ids_of(table, identity), digests_of(table, columns))

    def save(self, run: RunFolder) -> None:
        pyarrow, parquet = _need("pyarrow"), _need("pyarrow.parquet")
        columns = {"id": pyarrow.array(iter(self.ids), pyarrow.string()), "digest": self.digests.column()}
        with checksums.replacing(run.path / ROWS) as part:
            parquet.write_table(pyarrow.table(columns), part, compression="zstd")

    @classmethod
    def load(cls, run: RunFolder) -> Rows | None:
        """None where the run did not record them; its ``source.json`` has the names of the columns."""
        columns = run.source().get("columns")
        path = None if columns is None else checksums.verified(run.path, ROWS)
        if columns is None or path is None:
            return None
        table = table_of(path)
        with readable(run.path):
            digests = Digests.of(table.column("digest").to_pylist())
            return cls(tuple(columns), tuple(table.column("id").to_pylist()), digests)


def is_table(source: Path) -> bool:
    return source.suffix.lower() in table_files.SUFFIXES


def is_npz(source: Path) -> bool:
    return source.suffix.lower() == ".npz"


@contextmanager
def unchanged(source: Path) -> Iterator[None]:
    """DataError if the file is replaced or written to inside the block."""
    before = _stamp(source)
    yield
    if _stamp(source) != before:
        raise DataError(f"{source} changed while it was read: wait until it is complete and start again.")


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except OSError:  # the reader will say so
        return None
    return None if path.is_dir() else (found.st_ino, found.st_size, found.st_mtime_ns)


def ids_of(table: Any, identity: str | None) -> Sequence[str]:
    """The ids as the reader gives them: the id column, else the row number."""
    if identity is None:
        return RowNumbers(table.num_rows)
    return [str(value) for value in table.column(identity).to_pylist()]


def digests_of(table: Any, columns: Sequence[str]) -> Digests:
    """A digest of each row's cells in these columns; equal for equal values, in whatever format they were written."""
    pyarrow, compute = _need("pyarrow"), _need("pyarrow.compute")
    found = bytearray()
    for batch in table.select(list(columns)).to_batches(max_chunksize=_BATCH):
        cells = [_as_text(column) for column in batch.columns]
        # The lengths make cells such as "a,b" and "a", "b" different, and empty from missing.
        lengths = [compute.cast(compute.binary_length(cell), pyarrow.string()).fill_null("-") for cell in cells]
        rows = compute.binary_join_element_wise(*lengths, *(cell.fill_null("") for cell in cells), ",")
        for row in rows.to_pylist():
            found += hashlib.blake2b(row.encode(), digest_size=Digests.SIZE).digest()
    return Digests(bytes(found))


def _as_text(column: Any) -> Any:
    pyarrow = _need("pyarrow")
    try:
        return column.cast(pyarrow.string())
    except (pyarrow.ArrowInvalid, pyarrow.ArrowNotImplementedError):  # lists, structures, bytes
        return pyarrow.array([None if value is None else str(value) for value in column.to_pylist()], pyarrow.string())


def match(
    was: Rows | None, table: Any, identity: str | None, *, file: Path, used: Collection[str], corrected: Collection[str]
) -> list[str | None]:
    """The id in the run of every row of ``table``, None for a row that the run does not have.

    used: the ids of the run's examples, each of which must be found exactly once
    corrected: the ids of the rows that will be changed, which must have the values that they were trained with
    """
    ids = ids_of(table, identity)
    if was is None:
        if identity is None:
            raise DataError(
                f"the rows of {file} cannot be verified, as this run recorded neither ids nor rows: train again."
            )
        _require_once(file, ids, used)
        return list(ids)
    missing = [column for column in was.columns if column not in table.column_names]
    if missing:
        raise _changed(file, f"it has no column {some(missing)}")
    now = digests_of(table, was.columns)
    if now == was.digests:
        return list(was.ids)
    if identity is None:
        return _by_content(was, now, file, used)
    _require_once(file, ids, used)
    old, new = dict(zip(was.ids, was.digests, strict=True)), dict(zip(ids, now, strict=True))
    if others := [name for name in corrected if old.get(name) != new.get(name)]:
        raise _changed(file, f"{counted(len(others), 'row')} to correct with other values, such as id {others[0]}")
    return list(ids)


def _by_content(was: Rows, now: Sequence[bytes], file: Path, used: Collection[str]) -> list[str | None]:
    """Equal rows are interchangeable, and matched in their order."""
    ids_by_digest: dict[bytes, deque[str]] = defaultdict(deque)
    for name, digest in zip(was.ids, was.digests, strict=True):
        ids_by_digest[digest].append(name)
    counts = Counter(now)
    used = set(used)
    wrong = [
        name
        for digest, names in ids_by_digest.items()
        if counts[digest] != len(names)
        for name in names
        if name in used
    ]
    if wrong:
        raise _changed(file, _not_once("row", wrong, used))
    return [ids_by_digest[digest].popleft() if ids_by_digest.get(digest) else None for digest in now]


def _require_once(file: Path, ids: Sequence[str], used: Collection[str]) -> None:
    counts = Counter(ids)
    if wrong := [name for name in used if counts[name] != 1]:
        raise _changed(file, _not_once("id", wrong, used))


def _not_once(what: str, wrong: Sequence[str], used: Collection[str]) -> str:
    return (
        f"{len(wrong):,} of the {counted(len(used), what)} of the training not found exactly once, such as {wrong[0]}"
    )


def _changed(file: Path, what: str) -> DataError:
    return DataError(f"{file} has changed since the training ({what}): restore it, or train again.")
