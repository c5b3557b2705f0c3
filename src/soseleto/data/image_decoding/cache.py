"""On-disk cache of decoded images, keyed by file content, so that each file is decoded once.

CACHE/KEY/pixels      uint8 (N, C, H, W), memory-mapped
CACHE/KEY/meta.json   shape, and the rows that could not be decoded

KEY is the number of files and the shape, followed by a hash over the content of all files in order and the version of
the decoding rules. The files are hashed each time: their size and time do not show every change. Errors are not
remembered: rows that could not be decoded are tried again. An entry is written to a temporary folder and renamed, so
after a kill it is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from soseleto.data import optional
from soseleto.data.image_decoding.workers import Bad, Progress, Shape, Workers, worker_count
from soseleto.errors import DataError

_STALE = 24 * 3600  # seconds after which another process's unfinished entry is removed


class Decoded(NamedTuple):
    inputs: Tensor  # (N, C, H, W) uint8, mapped copy-on-write: writing to it does not change the cache
    bad: Bad  # those rows are zero


def cache_root(given: Path | str | None = None) -> Path:
    """``given``, else SOSELETO_CACHE, else ~/.cache/soseleto/images."""
    chosen = given or os.environ.get("SOSELETO_CACHE") or Path.home() / ".cache" / "soseleto" / "images"
    return Path(chosen).expanduser()


def decoded(
    files: Sequence[str],
    shape: Shape,
    *,
    cache: Path | str | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> Decoded:
    """All files decoded into one array, from the cache if possible."""
    root = cache_root(cache)
    root.mkdir(parents=True, exist_ok=True)
    with Workers(worker_count(workers, len(files))) as pool:
        entry = _by_content(root, files, shape, pool)
        if entry is not None:
            return _open(entry, files, shape)
        entry, bad = _make(root, files, shape, pool, progress)
    return _open(entry, files, shape, bad)


def _by_content(root: Path, files: Sequence[str], shape: Shape, pool: Workers) -> Path | None:
    """The entry with the same content, for files that have been moved, copied or touched."""
    if not any(root.glob(f"{_prefix(len(files), shape)}-*")):
        return None  # no entry can match: the files are hashed while decoding, and so read only once
    entry = root / _key(pool.digests(files), shape)
    return entry if (entry / "meta.json").is_file() else None


def _make(root: Path, files: Sequence[str], shape: Shape, pool: Workers, progress: Progress | None) -> tuple[Path, Bad]:
    sweep(root)
    _check_room(root, len(files) * int(np.prod(shape)))
    aside = Path(tempfile.mkdtemp(prefix="unfinished-", dir=root))
    try:
        output = pool.decode(files, aside / "pixels", shape, progress)
        meta = {"shape": [len(files), *shape], "bad": [row for row, _ in output.bad]}
        (aside / "meta.json").write_text(json.dumps(meta))
        entry = root / _key(output.digests, shape)
        _rename(aside, entry)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return entry, output.bad


def _rename(aside: Path, entry: Path) -> None:
    try:
        os.rename(aside, entry)
    except OSError:
        if not (entry / "meta.json").is_file():  # else another process completed the same entry first
            raise


def _open(entry: Path, files: Sequence[str], shape: Shape, bad: Bad | None = None) -> Decoded:
    """Map an entry; without ``bad``, the rows that could not be decoded when it was written are tried again."""
    meta = json.loads((entry / "meta.json").read_text())
    size = len(files) * int(np.prod(shape))
    if meta["shape"] != [len(files), *shape] or (entry / "pixels").stat().st_size != size:
        raise DataError(f"the image cache entry {entry} is damaged: delete that folder and run again.")
    pixels = np.memmap(entry / "pixels", dtype=np.uint8, mode="c", shape=(len(files), *shape))
    return Decoded(torch.from_numpy(pixels), _again(pixels, files, shape, meta["bad"]) if bad is None else bad)


def _again(pixels: Any, files: Sequence[str], shape: Shape, rows: Sequence[int]) -> Bad:
    """Decode these rows into the private mapping; those that fail again, and why."""
    rules = optional.decoding()
    bad: Bad = []
    for row in rows:
        image, why = rules.decode_file(files[row], shape)
        pixels[row] = np.frombuffer(image, np.uint8).reshape(shape)
        if why is not None:
            bad.append((row, why))
    return bad


def _prefix(count: int, shape: Shape) -> str:
    return f"{count}-{shape[0]}x{shape[1]}x{shape[2]}"


def _key(digests: Iterable[str], shape: Shape) -> str:
    content = list(digests)
    digest = hashlib.sha256("\n".join([str(optional.decoding().VERSION), *content]).encode()).hexdigest()
    return f"{_prefix(len(content), shape)}-{digest}"


def sweep(root: Path) -> None:
    """Remove what killed processes left unfinished more than a day ago."""
    for aside in root.glob("unfinished-*"):
        if time.time() - aside.stat().st_mtime <= _STALE:
            continue
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def _check_room(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if needed > free:
        raise DataError(
            f"the decoded images need {needed / 2**30:.1f} GiB in {root} but {free / 2**30:.1f} GiB are free: "
            "give a smaller image_size, or set SOSELETO_CACHE to a folder on another disk."
        )
