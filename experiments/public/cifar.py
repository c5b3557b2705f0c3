"""CIFAR-10 in its python and binary versions, and the human labels of CIFAR-10N."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from experiments.public.unpickle import load_pickle
from soseleto.errors import DataError

_PIXELS = 3 * 32 * 32
_LARGEST = 1 << 28  # bytes: the official files have 30 million

LABEL_SETS = ("clean_label", "aggre_label", "random_label1", "random_label2", "random_label3", "worse_label")


def read_binary(path: Path) -> tuple[Any, Any]:
    """One .bin file: records of 1 label byte and 3072 pixel bytes."""
    size = _size(path)
    if size == 0 or size % (1 + _PIXELS):
        raise DataError(f"{path} has {size} bytes, not a multiple of {1 + _PIXELS}: fetch it again.")
    records = np.fromfile(path, dtype=np.uint8).reshape(-1, 1 + _PIXELS)
    return _checked(records[:, 1:], records[:, 0], path)


def read_python(path: Path) -> tuple[Any, Any]:
    """One pickled batch, read without Python's unpickler."""
    _size(path)
    batch = {_text(key): value for key, value in load_pickle(path).items()}
    data, labels = batch.get("data"), batch.get("labels")
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or not isinstance(labels, list | np.ndarray):
        raise DataError(f"{path} is not a CIFAR-10 batch: it needs bytes in 'data' and a list in 'labels'.")
    if data.ndim != 2 or data.shape[1] != _PIXELS or len(data) == 0:
        raise DataError(f"{path} has images of shape {data.shape}, not (N, {_PIXELS}): fetch it again.")
    return _checked(data, _whole_numbers(labels, path), path)


def read_human(path: Path) -> dict[str, Any]:
    """The six label sets of CIFAR-10N, each (50000,) int64."""
    _size(path)
    found = load_pickle(path)
    for name in LABEL_SETS:
        labels = found.get(name)
        if not isinstance(labels, np.ndarray) or labels.shape != (50000,) or labels.dtype.kind not in "iu":
            raise DataError(f"{path} has no {name!r} of 50000 labels: it is not the CIFAR-10N file.")
        if labels.min() < 0 or labels.max() > 9:
            raise DataError(f"{name} of {path} has labels outside 0 to 9: it is not the CIFAR-10N file.")
    return {name: found[name].astype(np.int64) for name in LABEL_SETS}


def _checked(pixels: Any, labels: Any, path: Path) -> tuple[Any, Any]:
    labels = np.asarray(labels).astype(np.int64)
    if labels.shape != (len(pixels),) or labels.min() < 0 or labels.max() > 9:
        raise DataError(f"{path} has {len(pixels)} images but not one label from 0 to 9 for each: fetch it again.")
    return pixels.reshape(-1, 3, 32, 32), labels


def _whole_numbers(labels: Any, path: Path) -> Any:
    values = labels.tolist() if isinstance(labels, np.ndarray) else labels
    if not all(type(value) is int and 0 <= value <= 9 for value in values):
        raise DataError(f"{path} has labels outside 0 to 9: fetch it again.")
    return np.asarray(values, dtype=np.int64)


def _size(path: Path) -> int:
    try:
        size = path.stat().st_size
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing: type soseleto data cifar10.") from error
    if size > _LARGEST:
        raise DataError(f"{path} has {size} bytes, more than any CIFAR file: fetch it again.")
    return size


def _text(key: Any) -> Any:
    return key.decode("ascii", "replace") if isinstance(key, bytes) else key
