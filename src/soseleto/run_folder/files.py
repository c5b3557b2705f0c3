"""Files of a run: written atomically, and compared with ``SHA256SUMS`` before they are read.

A file is written to a temporary name, flushed to disk and renamed, so that a kill at any moment leaves the previous
one. ``SHA256SUMS``, in the format of ``sha256sum --check``, is written when the training ends. A file that is replaced
later is taken off the list, replaced, and listed again, so that a kill leaves no file that differs from its line.
A file without a line is not checked.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import json
import math
import os
import platform
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from soseleto.errors import DataError, DiskError, SoseletoError, UsageError, first_line, need

if TYPE_CHECKING:
    from torch import Tensor

CHECKSUMS = "SHA256SUMS"
RESTORE = "restore it from a copy, or train again"
CHECKED = 8  # rows of kept features that are made again and compared: another version of a library may make others
LARGEST = 4 << 30  # bytes of kept features, beyond which those that were used longest ago go
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.]+)")

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
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
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
    failed write is undone.
    """
    line = as_json(record).encode() + b"\n"
    with writing(path), path.open("a+b", buffering=0) as file:
        size = file.seek(0, os.SEEK_END)
        if size:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                file.seek(0)
                size = file.truncate(file.read().rfind(b"\n") + 1)
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(file.fileno())
        except OSError:
            os.truncate(path, size)
            raise


# Checksums


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(folder: Path, names: Iterable[str]) -> None:
    _write_checksums(folder, {name: sha256(folder / name) for name in names if regular(folder / name)})


def _write_checksums(folder: Path, checksums: Mapping[str, str]) -> None:
    write_text(folder / CHECKSUMS, "".join(f"{checksums[name]}  {name}\n" for name in sorted(checksums)))


def checksums_of(folder: Path) -> dict[str, str] | None:
    """The checksum of every listed file; None where the folder has no list."""
    path = regular(folder / CHECKSUMS)
    if path is None:
        return None
    lines = [_LINE.fullmatch(line) for line in path.read_text("utf-8", "replace").splitlines()]
    if not all(lines):
        raise DataError(f"{path} is damaged: restore it from a copy, or delete it to read the run unchecked.")
    return {line[2]: line[1] for line in lines if line}


def verified(path: Path) -> Path | None:
    """The path of a file after its checksum was compared; None where there is no such file."""
    existing, checksums = regular(path), checksums_of(path.parent) or {}
    if path.name not in checksums or (existing and sha256(path) == checksums[path.name]):
        return existing
    what = f"is damaged (its checksum is not that in {CHECKSUMS})" if existing else "is missing"
    raise DataError(
        f"{path} {what}: restore it from a copy, or delete its line from {CHECKSUMS} to read the run as it is."
    )


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """Around every change of a file of a run: keeps its line in the list current."""
    checksums = checksums_of(path.parent)
    if checksums is not None and path.name in checksums:
        del checksums[path.name]
        _write_checksums(path.parent, checksums)
    yield
    if checksums is not None:
        _write_checksums(path.parent, {**checksums, path.name: sha256(path)})


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """``aside`` for a file of a run, with its checksum updated."""
    with changing(path), aside(path) as part:
        yield part


# Reading


def regular(path: Path) -> Path | None:
    """The path of a file; None where there is none. Links out of the folder, pipes and devices are refused."""
    if not os.path.lexists(path):
        return None
    if path.is_symlink() and Path(os.path.realpath(path)).parent != Path(os.path.realpath(path.parent)):
        raise DataError(f"{path} is a link out of the run folder: replace it by the file itself.")
    with readable(path):
        if stat.S_ISREG(path.stat().st_mode):
            return path
    raise DataError(f"{path} is not an ordinary file: {RESTORE}.")


@contextlib.contextmanager
def readable(path: Path) -> Iterator[None]:
    """Turn any error while a file of a run is read or used into one sentence."""
    try:
        yield
    except SoseletoError:
        raise
    except Exception as error:  # pyarrow and safetensors have their own kinds
        what = f"{type(error).__name__}: {first_line(error)}"
        raise DataError(f"{path} cannot be read, it may be damaged ({what}): {RESTORE}.") from error


def json_of(path: Path) -> dict[str, Any]:
    with readable(path):
        return json_object(path.read_bytes())


def json_object(text: bytes) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError("not a JSON object")
    return value


def lines_of(path: Path, parse: Callable[[dict[str, Any]], T], *, what: str) -> list[T]:
    """Every complete record of a file of JSON lines, in order, through ``parse``; none where the file does not exist.

    A line that is not a JSON object, or that ``parse`` rejects, raises: "line 2 of FILE is not ``what``".
    """
    if regular(path) is None:
        return []
    *lines, _incomplete = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(parse(json_object(line)))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is not {what}: delete that line, or restore the file.") from error
    return records


def parquet_columns(path: Path) -> dict[str, np.ndarray]:
    parquet = need("pyarrow.parquet", to="reading a run")
    with readable(path):
        table = parquet.read_table(path, memory_map=False)
        return {name: np.asarray(table.column(name).to_numpy()) for name in table.column_names}


def tensors_of(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, on the CPU, and its metadata."""
    safetensors, load = need("safetensors", to="loading a model"), need("safetensors.torch", to="loading a model")
    with readable(path):
        with safetensors.safe_open(path, "pt") as file:
            metadata = dict(file.metadata() or {})
        return load.load_file(path), metadata


# What a run was made with


def versions() -> dict[str, str]:
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


# Features of frozen networks, kept between runs: to make them takes nearly all the time of a first answer


def kept_features(key: str, make: Callable[[], np.ndarray], first: Callable[[], np.ndarray]) -> np.ndarray:
    """The features kept by this key, or made and kept; ``first`` makes the first CHECKED rows alone.

    They lie in ``$SOSELETO_CACHE``, by default ``~/.cache/soseleto/features``; an empty value keeps none.
    """
    named = os.environ.get("SOSELETO_CACHE", "~/.cache/soseleto/features")
    if not named:
        return make()
    path = Path(named).expanduser() / f"{key}.npy"
    with contextlib.suppress(OSError, ValueError):  # not kept yet, or not readable
        features: np.ndarray = np.load(path)
        now = first()
        if np.allclose(features[: len(now)], now, rtol=1e-3, atol=1e-3 * np.abs(now).max()):
            path.touch()
            return features
    features = make()
    with contextlib.suppress(OSError, DiskError):  # a home that is full or cannot be written is no reason to fail
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside(path) as part, part.open("wb") as file:
            np.save(file, features)
        _make_room(path.parent)
    return features


def _make_room(folder: Path) -> None:
    files = sorted(folder.glob("*.npy"), key=lambda file: file.stat().st_mtime, reverse=True)
    sizes = np.cumsum([file.stat().st_size for file in files])
    for file, size in zip(files[1:], sizes[1:], strict=True):
        if size > LARGEST:
            file.unlink()
