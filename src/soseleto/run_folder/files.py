"""Files of a run: written atomically, and read on the assumption that they may be damaged or hostile.

A file is written to a temporary name, flushed to disk and renamed, so that a kill at any moment leaves the previous
one. Before a file is read its kind and size are checked, so that no folder can make a command hang or fill the memory.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import math
import os
import platform
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

import numpy as np

from soseleto.data.storage import check_expansion
from soseleto.errors import DataError, DiskError, SoseletoError, UsageError, first_line, need

if TYPE_CHECKING:
    from torch import Tensor

MOST_JSON = 1 << 24  # bytes; parsed, JSON can need thirty times as much
MOST_TOKENIZER = 1 << 27  # bytes of a file that is nearly all one string
MOST_LINES = 1 << 28  # bytes of a file with one record per line
MOST_CELLS = 1 << 22  # of a Parquet file, or ...
CELLS_PER_BYTE = 32  # ... this many times its size
RESTORE = "restore it from a copy, or train again"

T = TypeVar("T")


# Writing


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it atomically replaces ``path`` when the block ends without an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with writing(path):
            yield part
            sync(part)
            part.replace(path)
            if os.name == "posix":  # a rename is durable once its folder is flushed
                sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a text file atomically."""
    with aside(path) as part:
        part.write_text(text, "utf-8")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an OSError inside (disk full, read-only or broken) into a DiskError of one sentence."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        sentence = f"{path} cannot be written ({why}): fix that and run again; the previous file is kept."
        raise DiskError(sentence) from error


def sync(path: Path) -> None:
    """Flush a file or folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def locked(path: Path, refusal: str) -> Iterator[None]:
    """Hold an exclusive lock on a file (created where missing) or a folder; UsageError(refusal) if it is taken.

    The lock ends with the process, also when it is killed. No effect on Windows, or on file systems without locks.
    """
    if os.name != "posix":
        yield
        return
    import fcntl

    flags = os.O_RDONLY if path.is_dir() else os.O_RDWR | os.O_CREAT  # NFS locks only files open for writing
    with writing(path):
        handle = os.open(path, flags, 0o644)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(refusal) from error
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(handle)


def as_json(value: object, indent: int | None = None) -> str:
    """Strict JSON: tensors as lists, classes and functions by name, NaN and infinities as null."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # a tensor, a NumPy array or a NumPy scalar
        return _plain(value.tolist())
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)


def append_line(path: Path, record: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one record to a file with a JSON object per line. ``durable`` returns only after an fsync.

    A record counts once its newline is written: what a killed process wrote of one is removed before the next. A
    failed write is undone, so that either the whole record is in the file or nothing of it.
    """
    line = as_json(record).encode() + b"\n"
    with writing(path), path.open("a+b", buffering=0) as file:
        before = _remove_incomplete_line(file)
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(before)
            raise


def _remove_incomplete_line(file: BinaryIO) -> int:
    """The size of the file afterwards."""
    size = file.seek(0, os.SEEK_END)
    if size == 0:
        return 0
    file.seek(size - 1)
    if file.read(1) == b"\n":
        return size
    file.seek(0)
    return file.truncate(file.read().rfind(b"\n") + 1)


# Reading


def regular(path: Path) -> Path | None:
    """The path of a file; None where there is none. Links out of the folder, pipes and devices are refused."""
    if not os.path.lexists(path):
        return None
    if path.is_symlink() and Path(os.path.realpath(path)).parent != Path(os.path.realpath(path.parent)):
        raise DataError(f"{path} is a link out of the run folder: replace it by the file itself.")
    try:
        is_file = stat.S_ISREG(path.stat().st_mode)
    except OSError as error:  # a link to itself, or a folder that may not be entered
        raise DataError(f"{path} cannot be read ({error.strerror}): {RESTORE}.") from error
    if not is_file:
        raise DataError(f"{path} is not an ordinary file: {RESTORE}.")
    return path


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn the errors of values of another type, size or length than any run has into one sentence."""
    try:
        yield
    except SoseletoError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, MemoryError) as error:
        what = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(
            f"{path} has content that no run writes ({what}): restore it from a copy, or train again."
        ) from error


def bounded(path: Path, most: int) -> bytes:
    """The bytes of a file of at most ``most`` bytes."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise DataError(f"{path} has more than {most:,} bytes, which no run writes: {RESTORE}.")
    return content


def json_of(path: Path, *, most: int = MOST_JSON) -> dict[str, Any]:
    """The JSON object in a file."""
    try:
        value = json.loads(bounded(path, most))
    except (ValueError, RecursionError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not valid JSON ({first_line(error)}): {RESTORE}.") from error
    if not isinstance(value, dict):
        raise DataError(f"{path} is not a JSON object: {RESTORE}.")
    return value


def lines_of(path: Path, parse: Callable[[dict[str, Any]], T], *, what: str) -> list[T]:
    """Every complete record of a file of JSON lines, in order, through ``parse``; none where the file does not exist.

    A line that is not a JSON object, or that ``parse`` rejects, raises: "line 2 of FILE is not ``what``".
    """
    if regular(path) is None:
        return []
    *lines, _incomplete = bounded(path, MOST_LINES).split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError(f"a {type(record).__name__}")
            records.append(parse(record))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is not {what}: delete that line, or restore the file.") from error
    return records


def parquet_columns(path: Path) -> dict[str, np.ndarray]:
    """The columns of a Parquet file. Of equal texts one object is made, since one can stand for many rows."""
    pyarrow, parquet = (need(name, to="reading a run") for name in ("pyarrow", "pyarrow.parquet"))
    types = pyarrow.types
    try:
        with parquet.ParquetFile(path, memory_map=False) as file:
            _check_cells(path, file.metadata)
            fields = [
                field for field in file.schema_arrow if types.is_string(field.type) or types.is_binary(field.type)
            ]
        with parquet.ParquetFile(path, memory_map=False, read_dictionary=[field.name for field in fields]) as file:
            table = file.read()
        return {name: _as_numpy(column) for name, column in zip(table.column_names, table.columns, strict=True)}
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is not a valid Parquet file ({first_line(error)}): {RESTORE}.") from error


def _check_cells(path: Path, metadata: Any) -> None:
    groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
    cells = sum(group.column(at).num_values for group in groups for at in range(group.num_columns))
    cells = max(cells, metadata.num_rows)
    size = path.stat().st_size
    if not 0 <= cells <= max(MOST_CELLS, CELLS_PER_BYTE * size):
        raise DataError(f"{path} declares {cells:,} cells in {size:,} bytes, which no run writes: {RESTORE}.")
    check_expansion(size, sum(group.total_byte_size for group in groups), what=str(path))


def _as_numpy(column: Any) -> np.ndarray:
    pyarrow = need("pyarrow", to="reading a run")
    if not pyarrow.types.is_dictionary(column.type):
        return np.asarray(column.to_numpy())
    chunks = []
    for chunk in column.chunks:
        values = np.array([*chunk.dictionary.to_pylist(), None], dtype=object)
        chunks.append(values[chunk.indices.fill_null(len(values) - 1).to_numpy(zero_copy_only=False)])
    return np.concatenate(chunks) if chunks else np.array([], dtype=object)


def tensors_of(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, and its metadata; the package compares sizes with the file's."""
    safetensors, load = need("safetensors", to="loading a model"), need("safetensors.torch", to="loading a model")
    try:
        with safetensors.safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
        return load.load_file(path), metadata
    except (safetensors.SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise DataError(f"{path} is not a valid safetensors file ({first_line(error)}): {RESTORE}.") from error


# What a run was made with


def versions() -> dict[str, str]:
    """Versions of soseleto, torch and Python."""
    import torch

    try:
        own = importlib.metadata.version("soseleto")
    except importlib.metadata.PackageNotFoundError:  # imported from a source tree that is not installed
        own = "unknown"
    return {"soseleto": own, "torch": str(torch.__version__), "python": platform.python_version()}


def device_name(device: str) -> str:
    """The GPU's name, or the CPU and its number of cores."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"
