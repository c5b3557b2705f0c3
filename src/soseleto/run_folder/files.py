"""Files of a run: written whole or not at all, flushed to the disk."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

from soseleto.errors import DiskError


def versions() -> dict[str, str]:
    """Versions of what a result depends on."""
    import torch

    try:
        own = importlib.metadata.version("soseleto")
    except importlib.metadata.PackageNotFoundError:  # imported from a source tree that was never installed
        own = "unknown"
    return {"soseleto": own, "torch": str(torch.__version__), "python": platform.python_version()}


def device_name(device: str) -> str:
    """The machine part in words: a graphics card's name, or the processor and its number of cores."""
    import torch

    if device.startswith("cuda") and torch.cuda.is_available():
        return str(torch.cuda.get_device_name(torch.device(device)))
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores"


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path to write to; it takes the place of ``path`` in one move once the block ends well."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with writing(path):
            yield part
            sync(part)
            part.replace(path)
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    if os.name == "posix":  # the rename itself is durable once the folder is
        sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file in one move."""
    with aside(path) as part:
        part.write_text(text, "utf-8")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, a disk that is full, read-only or broken gives one sentence."""
    try:
        yield
    except DiskError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        sentence = f"{path} cannot be written ({why}): mend that and run again; what was there is kept."
        raise DiskError(sentence) from error


def sync(path: Path) -> None:
    """Return once the file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def as_json(value: object, indent: int | None = None) -> str:
    return json.dumps(_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _plain(value: object) -> object:
    """``value`` in JSON's own types: tensors as lists, classes and functions by name, NaN as null."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # a tensor, a NumPy array or one of their numbers
        return _plain(value.tolist())
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)
