"""Read files of a run folder that may be damaged or hostile: limits are checked before memory is allocated."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from soseleto.data.storage import check_expansion
from soseleto.errors import DataError, first_line, need

if TYPE_CHECKING:
    from torch import Tensor

MOST_JSON = 1 << 24  # bytes; parsed, JSON can need thirty times as much
MOST_TOKENIZER = 1 << 27  # bytes of a file that is nearly all one string
MOST_LINES = 1 << 28  # bytes of a file with one record per line
MOST_VALUES = 1 << 22  # cells of a Parquet file, or ...
VALUES_PER_BYTE = 32  # ... this many times its size
_RESTORE = "restore it from a copy, or train again"


def regular(path: Path) -> Path | None:
    """The path of a file; None where there is none. Links out of the folder, pipes and devices are refused."""
    if not os.path.lexists(path):
        return None
    if path.is_symlink() and Path(os.path.realpath(path)).parent != Path(os.path.realpath(path.parent)):
        raise DataError(f"{path} is a link out of the run folder: replace it by the file itself.")
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:  # a link to itself, or a folder that may not be entered
        raise DataError(f"{path} cannot be read ({error.strerror}): {_RESTORE}.") from error
    if not is_file:
        raise DataError(f"{path} is not an ordinary file: {_RESTORE}.")
    return path


def bounded(path: Path, most: int) -> bytes:
    """The bytes of a file of at most ``most`` bytes."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DataError(f"{path} has more than {most:,} bytes, which no run writes: {_RESTORE}.")
    return content


def complete_lines(path: Path) -> bytes:
    """The bytes up to the last newline; empty where there is no file."""
    content = bounded(path, MOST_LINES) if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def json_of(path: Path, *, fix: str = _RESTORE, most: int = MOST_JSON) -> Any:
    try:
        return json.loads(bounded(path, most))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not valid JSON ({first_line(error)}): {fix}.") from error


def table_of(path: Path) -> Any:
    """A Parquet file as a table. Texts are read as a dictionary first, since one of them can stand for many rows."""
    pyarrow, parquet = (need(name, to="reading a run") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with parquet.ParquetFile(path, memory_map=False) as file:
            _check_cells(path, file.metadata)
            kinds = pyarrow.types
            texts = [one.name for one in file.schema_arrow if kinds.is_string(one.type) or kinds.is_binary(one.type)]
        with parquet.ParquetFile(path, memory_map=False, read_dictionary=texts) as file:
            table = file.read()
        return _decoded(path, table)
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not a valid Parquet file ({first_line(error)}): {_RESTORE}.") from error


def _check_cells(path: Path, metadata: Any) -> None:
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    cells = sum(group.column(at).num_values for group in groups for at in range(group.num_columns))
    cells = max(cells, metadata.num_rows)
    size = path.stat().st_size
    if not 0 <= cells <= max(MOST_VALUES, VALUES_PER_BYTE * size):
        raise DataError(f"{path} declares {cells:,} cells in {size:,} bytes, which no run writes: {_RESTORE}.")
    check_expansion(size, sum(group.total_byte_size for group in groups), what=str(path))


def _decoded(path: Path, table: Any) -> Any:
    pyarrow, compute = need("pyarrow", to="reading a run"), need("pyarrow.compute", to="reading a run")
    for at, column in enumerate(table.columns):
        if not pyarrow.types.is_dictionary(column.type):
            continue
        lengths = (compute.binary_length(chunk.dictionary).take(chunk.indices) for chunk in column.chunks)
        unpacked = sum(compute.sum(compute.cast(one, pyarrow.int64())).as_py() or 0 for one in lengths)
        check_expansion(path.stat().st_size, unpacked, what=str(path))
        table = table.set_column(at, table.column_names[at], column.cast(column.type.value_type))
    return table


def tensors_of(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, and its metadata; the package compares sizes with the file's."""
    safetensors, load = need("safetensors", to="loading a model"), need("safetensors.torch", to="loading a model")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
        return load.load_file(path), metadata
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise DataError(f"{path} is not a valid safetensors file ({first_line(error)}): {_RESTORE}.") from error
