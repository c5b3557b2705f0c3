"""Image folders: one subfolder per class; the path below the folder is the id."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import torch

from soseleto.data.labels import Names
from soseleto.data.readers.raw import Raw
from soseleto.data.reading import Problem, Reading, escaped, some
from soseleto.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm")


def read_folder(folder: Path, *, name: str, reading: Reading) -> Raw:
    """All images at any depth below the class folders, sorted by path; hidden files are skipped."""
    classes = _classes(folder)
    if not classes:
        raise DataError(
            f"the {name} folder {folder} has no subfolders: make one for each class, with its images inside."
        )
    paths = {c: sorted(_images(folder, c, allow_outside=reading.allow_outside)) for c in classes}
    ids = [path for c in classes for path in paths[c]]
    if not ids:
        raise DataError(
            f"no images below {folder} of the {name}: put {', '.join(SUFFIXES[:3])} ... files into "
            f"its subfolders ({some(classes)})."
        )
    labels = Names(tuple(escaped(c) for c in classes for _ in paths[c]))
    return _raw(folder, ids, labels, name, reading, _empty(name, [escaped(c) for c in classes if not paths[c]]))


def read_any_folder(folder: Path, *, name: str, reading: Reading) -> Raw:
    """All images at any depth, in class folders or not, sorted by path; every label is 0."""
    paths = [path for c in _classes(folder) for path in _images(folder, c, allow_outside=reading.allow_outside)]
    ids = sorted([*paths, *(entry.name for entry in os.scandir(folder) if entry.is_file() and _is_image(entry.name))])
    if not ids:
        raise DataError(f"no images below {folder} of the {name}: put {', '.join(SUFFIXES[:3])} ... files there.")
    return _raw(folder, ids, torch.zeros(len(ids), dtype=torch.int64), name, reading)


def _raw(
    folder: Path,
    ids: Sequence[str],
    labels: Names | torch.Tensor,
    name: str,
    reading: Reading,
    problems: tuple[Problem, ...] = (),
) -> Raw:
    outside_ids = [] if reading.allow_outside else [escaped(ids[row]) for row in outside(folder, ids)]
    if outside_ids:
        text = f"{some(outside_ids)} lead outside {folder}: type reading=Reading(allow_outside=True) if intended."
        problems += (Problem(name, "outside", text, tuple(outside_ids)),)
    files = tuple(f"{folder}{os.sep}{path}" for path in ids)
    return Raw(
        name,
        labels,
        files=files,
        ids=tuple(map(escaped, ids)),
        paths=tuple(map(escaped, files)),
        problems=problems,
    )


def _classes(folder: Path) -> list[str]:
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")


def _images(folder: Path, c: str, *, allow_outside: bool) -> Iterator[str]:
    """Posix paths relative to the folder; linked folders below the class only if ``allow_outside``."""

    def fail(error: OSError) -> None:
        raise DataError(f"the folder {error.filename} cannot be read ({error.strerror}): check its permissions.")

    for here, folders, names in os.walk(folder / c, onerror=fail, followlinks=allow_outside):
        folders[:] = [below for below in folders if not below.startswith(".")]
        yield from (Path(here, name).relative_to(folder).as_posix() for name in names if _is_image(name))


def _empty(name: str, empty: list[str]) -> tuple[Problem, ...]:
    if not empty:
        return ()
    which = f"the class {empty[0]} has" if len(empty) == 1 else f"the classes {some(empty)} have"
    return (Problem(name, "empty class", f"{which} no images: put images there, or remove the empty subfolders."),)


def outside(root: Path, paths: Sequence[str]) -> list[int]:
    """The rows whose path, with links resolved, is not below the root."""
    real_folder = cache(os.path.realpath)  # once per folder, not once per file
    real_root = os.path.realpath(root)
    rows = []
    for row, path in enumerate(paths):
        folder, name = os.path.split(os.path.join(root, path))
        full = os.path.join(real_folder(folder), name)
        real = os.path.realpath(full) if name in ("", ".", "..") or os.path.islink(full) else full
        if os.path.commonpath([real_root, real]) != real_root:
            rows.append(row)
    return rows
