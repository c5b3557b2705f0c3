"""Image folders: one subfolder per class; the path below the folder is the id."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from soseleto.data.readers.file_names import escaped
from soseleto.data.readers.labels import Names
from soseleto.data.readers.problems import Problem, some
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.reading import Reading
from soseleto.errors import DataError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm", ".pbm")


def read_folder(folder: Path, *, name: str, reading: Reading) -> Raw:
    """All images at any depth below the class folders, sorted by path; hidden files are skipped."""
    classes = sorted(entry.name for entry in os.scandir(folder) if _is_class(entry))
    if not classes:
        raise DataError(
            f"the {name} folder {folder} has no subfolders: make one for each class, with its images inside."
        )
    found = {c: sorted(_images(folder, c, allow_outside=reading.allow_outside)) for c in classes}
    ids = [path for c in classes for path, _ in found[c]]
    if not ids:
        raise DataError(
            f"no images below {folder} of the {name}: put {', '.join(SUFFIXES[:3])} ... files into "
            f"its subfolders ({some(classes)})."
        )
    labels = Names(tuple(escaped(c) for c in classes for _ in found[c]))
    files = tuple(f"{folder}{os.sep}{path}" for path in ids)
    # Only links can lead outside: linked files, and all files below a linked class folder.
    links = [path for c in classes for path, link in found[c] if link or os.path.islink(folder / c)]
    problems = _empty(name, [escaped(c) for c in classes if not found[c]])
    problems += () if reading.allow_outside else _outside(folder, links, name=name)
    return Raw(
        name,
        labels,
        files=files,
        ids=tuple(map(escaped, ids)),
        paths=tuple(map(escaped, files)),
        problems=problems,
    )


def read_any_folder(folder: Path, *, name: str, reading: Reading) -> Raw:
    """All images at any depth, in class folders or not, sorted by path; every label is 0."""
    allow = reading.allow_outside
    linked = [] if allow else [one.name for one in os.scandir(folder) if _is_class(one) and one.is_symlink()]
    found = [(path.removeprefix("./"), link) for path, link in _images(folder, ".", allow_outside=allow)]
    found += [(path, True) for c in linked for path, _ in _images(folder, c, allow_outside=allow)]
    ids = sorted(path for path, _ in found)
    if not ids:
        raise DataError(f"no images below {folder} of the {name}: put {', '.join(SUFFIXES[:3])} ... files there.")
    files = tuple(f"{folder}{os.sep}{path}" for path in ids)
    problems = () if allow else _outside(folder, sorted(path for path, link in found if link), name=name)
    return Raw(
        name,
        torch.zeros(len(ids), dtype=torch.int64),
        files=files,
        ids=tuple(map(escaped, ids)),
        paths=tuple(map(escaped, files)),
        problems=problems,
    )


def _is_class(entry: os.DirEntry[str]) -> bool:
    return not entry.name.startswith(".") and entry.is_dir()


def _images(folder: Path, c: str, *, allow_outside: bool) -> Iterator[tuple[str, bool]]:
    """Posix paths relative to the folder, and whether the file is a link; linked folders only if ``allow_outside``."""
    below = [c]
    while below:
        here = below.pop()
        with os.scandir(folder / here) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=allow_outside):
                    below.append(f"{here}/{entry.name}")
                elif entry.name.lower().endswith(SUFFIXES):
                    yield f"{here}/{entry.name}", entry.is_symlink()


def _empty(name: str, empty: list[str]) -> tuple[Problem, ...]:
    if not empty:
        return ()
    which = f"the class {empty[0]} has" if len(empty) == 1 else f"the classes {some(empty)} have"
    text = f"{which} no images: put images there, or remove the empty subfolders."
    return (Problem(name, "empty class", text),)


def _outside(folder: Path, links: list[str], *, name: str) -> tuple[Problem, ...]:
    bad = [escaped(links[row]) for row in outside(folder, links)]
    if not bad:
        return ()
    text = f"{some(bad)} lead outside {folder}: type reading=Reading(allow_outside=True) if that is intended."
    return (Problem(name, "outside", text, tuple(bad)),)


def outside(root: Path, paths: list[str]) -> list[int]:
    """The rows whose path, with links resolved, is not below the root."""
    real_root = os.path.realpath(root)
    real_folder: dict[str, str] = {}  # links are resolved once per folder, not once per file
    rows = []
    for row, path in enumerate(paths):
        full = os.path.join(root, path)
        folder, name = os.path.split(full)
        if folder not in real_folder:
            real_folder[folder] = os.path.realpath(folder)
        special = name in ("", ".", "..") or os.path.islink(full)
        real = os.path.realpath(full) if special else os.path.join(real_folder[folder], name)
        if os.path.commonpath([real_root, real]) != real_root:
            rows.append(row)
    return rows
