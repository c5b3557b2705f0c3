"""Decoded images kept on disk, keyed by the content of the files: each is decoded once.

CACHE/KEY/pixels      uint8 (N, C, H, W), mapped into memory
CACHE/KEY/meta.json   its shape, and which rows could not be decoded
CACHE/stats/KEY       path, size and time of the files -> KEY, so that unchanged files are not even opened

KEY is a hash over the bytes of all files in order, the wanted shape and the version of the image rules. An entry is
written aside and renamed, so a kill at any moment leaves either a whole entry or none.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from soseleto.data import optional
from soseleto.data.workers import Bad, decode_files
from soseleto.errors import DataError

_STALE = 24 * 3600  # seconds after which another process's unfinished entry is removed


class Decoded(NamedTuple):
    inputs: Tensor  # (N, C, H, W) uint8, mapped from the cache; writing to it does not change the cache
    bad: Bad  # (row, reason): those rows are zero


def cache_root(given: Path | str | None = None) -> Path:
    """The folder given, else SOSELETO_CACHE, else ~/.cache/soseleto/images."""
    chosen = given or os.environ.get("SOSELETO_CACHE") or Path.home() / ".cache" / "soseleto" / "images"
    return Path(chosen).expanduser()


def decoded(
    files: Sequence[str],
    shape: tuple[int, int, int],
    *,
    cache: Path | str | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoded:
    """All files as one array, from the cache when they are there."""
    root = cache_root(cache)
    rules = f"{optional.decoding().VERSION} {shape}"
    note = root / "stats" / _stat_key(files, rules)
    entry = _noted(root, note)
    if entry is None:
        entry = root / _content_key(files, rules)
        if not (entry / "meta.json").is_file():
            _make(entry, files, shape, workers=workers, progress=progress)
        _write_note(note, entry.name)
    return _open(entry, len(files), shape)


def _make(entry: Path, files: Sequence[str], shape: tuple[int, int, int], **options: Any) -> None:
    entry.parent.mkdir(parents=True, exist_ok=True)
    _sweep(entry.parent)
    _check_room(entry.parent, len(files) * int(np.prod(shape)))
    aside = Path(tempfile.mkdtemp(prefix="unfinished-", dir=entry.parent))
    try:
        bad = decode_files(files, aside / "pixels", shape, **options)
        meta = {"shape": [len(files), *shape], "bad": bad}
        (aside / "meta.json").write_text(json.dumps(meta))
        _rename(aside, entry)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _rename(aside: Path, entry: Path) -> None:
    try:
        os.rename(aside, entry)
    except OSError:
        if not (entry / "meta.json").is_file():  # else another process finished the same entry first
            raise


def _open(entry: Path, count: int, shape: tuple[int, int, int]) -> Decoded:
    meta = json.loads((entry / "meta.json").read_text())
    whole = count * int(np.prod(shape))
    if meta["shape"] != [count, *shape] or (entry / "pixels").stat().st_size != whole:
        raise DataError(f"the image cache entry {entry} is damaged: delete that folder and run again.")
    pixels = np.memmap(entry / "pixels", dtype=np.uint8, mode="c", shape=(count, *shape))
    return Decoded(torch.from_numpy(pixels), [(row, why) for row, why in meta["bad"]])


def _noted(root: Path, note: Path) -> Path | None:
    """The entry that these very files (by path, size and time) were decoded into, if it is still there."""
    try:
        entry = root / note.read_text()
    except OSError:
        return None
    return entry if (entry / "meta.json").is_file() else None


def _write_note(note: Path, key: str) -> None:
    note.parent.mkdir(parents=True, exist_ok=True)
    handle, aside = tempfile.mkstemp(dir=note.parent)
    with os.fdopen(handle, "w") as file:
        file.write(key)
    os.replace(aside, note)


def _stat_key(files: Sequence[str], rules: str) -> str:
    digest = hashlib.sha256(rules.encode())
    for path in files:
        try:
            stat = os.stat(path)
            digest.update(f"{os.path.abspath(path)}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        except OSError:
            digest.update(f"{path}\0missing\0".encode())
    return digest.hexdigest()


def _content_key(files: Sequence[str], rules: str) -> str:
    digest = hashlib.sha256(rules.encode())
    with ThreadPoolExecutor(max_workers=min(16, os.cpu_count() or 1)) as pool:
        for one in pool.map(_file_digest, files, chunksize=64):
            digest.update(one)
    return digest.hexdigest()


def _file_digest(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        return hashlib.sha256(f"missing {type(error).__name__}".encode()).digest()


def _sweep(root: Path) -> None:
    """Remove what killed processes left unfinished a day ago or longer."""
    for aside in root.glob("unfinished-*"):
        if time.time() - aside.stat().st_mtime > _STALE:
            shutil.rmtree(aside, ignore_errors=True)


def _check_room(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if needed > free:
        raise DataError(
            f"the decoded images need {needed / 2**30:.1f} GiB in {root} but {free / 2**30:.1f} GiB are free: "
            "give a smaller image_size, or another folder in SOSELETO_CACHE."
        )
