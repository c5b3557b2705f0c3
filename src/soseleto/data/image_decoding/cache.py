"""On-disk cache of decoded images, keyed by file content, so that each file is decoded once.

CACHE/KEY/pixels      uint8 (N, C, H, W), memory-mapped
CACHE/KEY/digests     sha256 of every file, 32 bytes each
CACHE/KEY/meta.json   shape, and the rows that could not be decoded

KEY is the number of files and the shape, followed by a hash over the content of all files in order and the version of
the decoding rules. Files of small sets are hashed each time; of large ones those that ``known_files`` does not know. A
new entry takes the images that another entry of its shape has from there, so that only new files are decoded. Errors
are not remembered: rows that could not be decoded are tried again. An entry is written to a temporary folder and
renamed, so after a kill it is complete or absent.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from soseleto.data import optional
from soseleto.data.image_decoding import known_files
from soseleto.data.image_decoding.workers import Bad, Output, Progress, Shape, Workers, worker_count
from soseleto.data.storage import cache_root, sweep
from soseleto.errors import DataError

_STALE = 24 * 3600  # seconds after which another process's unfinished entry is removed


class Decoded(NamedTuple):
    inputs: Tensor  # (N, C, H, W) uint8, mapped copy-on-write: writing to it does not change the cache
    bad: Bad  # those rows are zero


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
    stamps = known_files.stamps_of(files)
    with Workers(worker_count(workers, len(files))) as pool:
        digests = None
        if any(root.glob(f"*-{_shape(shape)}-*")):  # else no entry can help: the files are hashed while decoding
            digests = known_files.digests_of(root, files, stamps, pool.digests)
            entry = root / _key(digests, shape)
            if (entry / "meta.json").is_file():
                return _open(entry, files, shape)
        entry, output = _make(root, files, shape, pool, digests, progress)
    if digests is None:
        known_files.remember(root, files, stamps, output.digests)
    return _open(entry, files, shape, output.bad)


def _make(
    root: Path,
    files: Sequence[str],
    shape: Shape,
    pool: Workers,
    digests: list[str] | None,
    progress: Progress | None,
) -> tuple[Path, Output]:
    sweep(root)
    _check_room(root, len(files) * int(np.prod(shape)))
    aside = Path(tempfile.mkdtemp(prefix="unfinished-", dir=root))
    try:
        if digests is None:
            output = pool.decode(files, aside / "pixels", shape, progress)
        else:
            output = _add(root, aside, files, shape, pool, digests, progress)
        (aside / "digests").write_bytes(b"".join(map(_as_bytes, output.digests)))
        version = optional.decoding().VERSION
        meta = {"shape": [len(files), *shape], "bad": [row for row, _ in output.bad], "version": version}
        (aside / "meta.json").write_text(json.dumps(meta))
        entry = root / _key(output.digests, shape)
        _rename(aside, entry)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return entry, output


def _add(
    root: Path,
    aside: Path,
    files: Sequence[str],
    shape: Shape,
    pool: Workers,
    digests: list[str],
    progress: Progress | None,
) -> Output:
    """Copy the images that other entries have, and decode the others."""
    left = dict(enumerate(map(_as_bytes, digests)))
    pixels = np.memmap(aside / "pixels", dtype=np.uint8, mode="w+", shape=(len(files), *shape))
    for entry in root.glob(f"*-{_shape(shape)}-*"):
        if not left:
            break
        place, source = _content(entry, shape)
        found = {row: place[digest] for row, digest in left.items() if digest in place}
        for row, at in found.items():
            pixels[row] = source[at]
            del left[row]
    rows = list(left)
    output = pool.decode([files[row] for row in rows], aside / "new", shape, progress)
    if rows:
        pixels[rows] = np.memmap(aside / "new", dtype=np.uint8, mode="r", shape=(len(rows), *shape))
    pixels.flush()
    (aside / "new").unlink()
    read = {**dict(enumerate(digests)), **dict(zip(rows, output.digests, strict=True))}  # as they were when decoded
    return Output(list(read.values()), [(rows[at], why) for at, why in output.bad])


def _content(entry: Path, shape: Shape) -> tuple[dict[bytes, int], Any]:
    """The places of the images of an entry by their digest, without those that could not be decoded; its pixels."""
    try:
        meta = json.loads((entry / "meta.json").read_text())
        joined, pixels = (entry / "digests").read_bytes(), entry / "pixels"
        bad, count, version = set(meta["bad"]), meta["shape"][0], meta.get("version")
        whole = len(joined) == 32 * count and pixels.stat().st_size == count * int(np.prod(shape))
    except (OSError, ValueError, KeyError):  # of an older version, or being deleted
        return {}, None
    if not whole or version != optional.decoding().VERSION:
        return {}, None
    place = {joined[32 * at : 32 * at + 32]: at for at in range(count) if at not in bad}
    return place, np.memmap(pixels, dtype=np.uint8, mode="r", shape=(count, *shape))


def _as_bytes(digest: str) -> bytes:
    """32 bytes; zeros for a file that could not be read, whose digest is the name of the error."""
    return bytes.fromhex(digest) if len(digest) == 64 else bytes(32)


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
    bad = _again(pixels, files, shape, meta["bad"]) if bad is None else bad
    inputs = torch.from_numpy(pixels)
    return Decoded(inputs, bad)


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


def _shape(shape: Shape) -> str:
    return f"{shape[0]}x{shape[1]}x{shape[2]}"


def _key(digests: Iterable[str], shape: Shape) -> str:
    content = list(digests)
    digest = hashlib.sha256("\n".join([str(optional.decoding().VERSION), *content]).encode()).hexdigest()
    return f"{len(content)}-{_shape(shape)}-{digest}"


def _check_room(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if needed > free:
        raise DataError(
            f"the decoded images need {needed / 2**30:.1f} GiB in {root} but {free / 2**30:.1f} GiB are free: "
            "give a smaller image_size, or set SOSELETO_CACHE to a folder on another disk."
        )
