"""Which files a command may write its output to: never its own input, never a file of a run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from soseleto.data.readers.image_folder import SUFFIXES as IMAGES
from soseleto.errors import UsageError
from soseleto.run_folder.folder import RANKING, RunFolder


def require_writable(out: Path, *, run: RunFolder, force: bool, reads: Sequence[Path] = ()) -> None:
    """Raise where ``out`` is inside a run folder or is data of ``run`` or ``reads``; any other file needs ``force``.

    Files are compared by identity, so that links, relative paths and the case of a name make no difference.
    """
    if around := _run_around(out):
        raise UsageError(f"{out} is inside the run folder {around}: write it elsewhere.")
    if not os.path.lexists(out):
        return
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give the name of a file.")
    source = run.source().get("path")
    if (source and _is_part_of(out, Path(source))) or _is_image_of(out, run):
        raise UsageError(f"{out} belongs to the source of {run.path}: write to another file.")
    if read := next((path for path in reads if _is_part_of(out, path)), None):
        raise UsageError(f"{out} belongs to {read}, which this command reads: write to another file.")
    if linked := next((path for path in _files(run.path) if _same(out, path)), None):
        raise UsageError(f"{out} is a link to {linked} of a run: write to another file.")
    if not force:
        raise UsageError(
            f"{out} exists already: add --force (in Python force=True) to replace it, or write to another file."
        )


def _run_around(out: Path) -> Path | None:
    """The run folder that holds ``out``, or what it links to."""
    link = Path(os.path.realpath(out.parent), out.name)
    above = [*link.parents, *Path(os.path.realpath(out)).parents]
    return next((folder for folder in above if RunFolder(folder).is_run()), None)


def _is_part_of(out: Path, data: Path) -> bool:
    """Whether ``out`` is the file ``data``, or an image in the folder ``data``."""
    if not data.is_dir():
        return _same(out, data)
    real = Path(os.path.realpath(out))
    inside = any(_same(folder, data) for folder in real.parents)
    return inside and real.name.lower().endswith(IMAGES)


def _is_image_of(out: Path, run: RunFolder) -> bool:
    """Whether ``out`` is an image that the run was trained on."""
    if not run.has(RANKING):
        return False
    paths: Iterable[str] = map(str, run.ranking().get("path", ()))
    names = {out.name.lower(), os.path.basename(os.path.realpath(out)).lower()}
    return any(_same(out, Path(path)) for path in paths if os.path.basename(path).lower() in names)


def _files(folder: Path) -> Iterable[Path]:
    return (path for path in folder.rglob("*") if path.is_file())


def _same(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except OSError:  # one of them does not exist
        return False
