"""Writing the files of a run: atomic replacement, flushed to disk, one writer at a time."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from soseleto.errors import DataError, DiskError, UsageError

if TYPE_CHECKING:
    from torch import Tensor


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


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A temporary path to write to; it atomically replaces ``path`` when the block ends without an error."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with writing(path):
            yield part
            sync(part)
            part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    if os.name == "posix":  # a rename is durable once its folder is flushed
        with writing(path):
            sync(path.parent)


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
    """Strict JSON: NaN and infinities become null."""
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    """``value`` in JSON types: tensors as lists, classes and functions by name, NaN and infinities as null."""
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


def untie(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Copies of the distinct tensors of a state dict, and alias -> name for tensors that appear under two names.

    safetensors refuses tensors that share storage.
    """
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        if not hasattr(tensor, "untyped_storage"):
            raise DataError(f"the model's state {name!r} is not a tensor: model.safetensors can only hold tensors.")
        storage = tensor.untyped_storage().data_ptr()
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, aliases
