"""Tables that do not fit in memory: read once, piece by piece, into a copy on disk that is mapped as a pyarrow table.

All columns of a copied CSV file are text, as in a small one; pyarrow reads only the cells that are asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.data import storage
from soseleto.data.readers.csv_pieces import can_be_cut, csv_pieces
from soseleto.data.readers.csv_text import Before
from soseleto.data.readers.reading import Reading
from soseleto.data.storage import is_large, passing_file
from soseleto.errors import DataError, need

SAMPLE = 250_000  # rows from which the columns of a large table are fitted


def is_large_text(path: Path, encoding: str | None) -> bool:
    return is_large(path.stat().st_size) and can_be_cut(encoding)


def copied_csv(path: Path, delimiter: str, reading: Reading, parse: Callable[[str, Before], Any]) -> Any:
    """A CSV file as a mapped table; ``parse`` makes a table of the header and some rows."""

    def tables() -> Iterator[Any]:
        for piece in csv_pieces(path, reading.encoding, delimiter):
            try:
                yield parse(piece.text, piece.before)
            except DataError:
                raise
            except Exception as error:  # Arrow's errors count the rows of the piece
                reason = " ".join(str(error).split())[:300]
                raise DataError(
                    f"{path} cannot be read ({reason}, counted from row {piece.before.rows} on): fix that row."
                ) from error

    return _copied(tables(), path, reading)


def copied_parquet(file: Any, path: Path, reading: Reading) -> Any:
    """An open Parquet file as a mapped table."""
    pyarrow = need("pyarrow", to="reading Parquet")
    batches = file.iter_batches(batch_size=storage.PIECE)
    return _copied((pyarrow.Table.from_batches([batch]) for batch in batches), path, reading)


def _copied(tables: Iterable[Any], path: Path, reading: Reading) -> Any:
    pyarrow, ipc = need("pyarrow", to="reading tables"), need("pyarrow.ipc", to="reading tables")
    with passing_file(reading.cache, what=str(path)) as copy:
        pieces = iter(tables)
        first = next(pieces)
        with pyarrow.OSFile(str(copy), "wb") as sink, ipc.new_stream(sink, first.schema) as writer:
            writer.write_table(first)
            for piece in pieces:
                writer.write_table(piece)
        return ipc.open_stream(pyarrow.memory_map(str(copy))).read_all()


def sampled_rows(table: Any) -> np.ndarray:
    """The numbers of evenly spaced rows of a large table, at most ``SAMPLE``; all rows of a small one."""
    n = table.num_rows
    if n <= SAMPLE or not is_large(table.nbytes):
        return np.arange(n)
    return np.linspace(0, n - 1, SAMPLE).round().astype(np.int64)


def sampled(table: Any) -> tuple[Any, np.ndarray]:
    """These rows of the table, and their numbers."""
    pyarrow = need("pyarrow", to="reading tables")
    rows = sampled_rows(table)
    if len(rows) == table.num_rows:
        return table, rows
    taken, first = [], 0
    for batch in table.to_batches():  # taking from the whole table would copy it
        inside = rows[(rows >= first) & (rows < first + batch.num_rows)] - first
        taken.append(batch.take(pyarrow.array(inside)))
        first += batch.num_rows
    return pyarrow.Table.from_batches(taken, table.schema), rows


def in_pieces(table: Any) -> Iterator[Any]:
    """The table, some rows at a time, without copying."""
    for first in range(0, table.num_rows, storage.PIECE):
        yield table.slice(first, storage.PIECE)
