"""Features of frozen networks, kept between runs: to make them takes nearly all the time of a first answer.

They lie in ``$SOSELETO_CACHE``, by default ``~/.cache/soseleto/features``; where that is set to nothing, none are kept.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from soseleto.errors import DiskError
from soseleto.run_folder.files import aside

CHECKED = 8  # rows that are made again and compared: another version of a library may make other features
LARGEST = 4 << 30  # bytes, beyond which those that were used longest ago go
Array = np.ndarray


def kept_features(key: str, make: Callable[[], Array], first: Callable[[], Array]) -> Array:
    """The features kept by this key, or made and kept; ``first`` makes the first CHECKED rows alone."""
    named = os.environ.get("SOSELETO_CACHE", "~/.cache/soseleto/features")
    if not named:
        return make()
    path = Path(named).expanduser() / f"{key}.npy"
    with contextlib.suppress(OSError, ValueError):  # not kept yet, or not readable
        features: Array = np.load(path)
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
