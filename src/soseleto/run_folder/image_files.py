"""Where the images of a run's ranking are, whose paths may be relative to the folder in which ``fit`` ran."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from soseleto.data.readers.file_names import escaped, existing
from soseleto.errors import UsageError
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.source_rows import is_table


def image_files(run: RunFolder, paths: Iterable[str]) -> list[str]:
    """Absolute paths of the images, ``escaped``; raises if one is missing."""
    source = run.source().get("path")
    if source is None:
        return existing_files(paths)
    base = Path(source).parent if is_table(Path(source)) else Path(source)
    return existing_files(_found(path, base) for path in paths)


def existing_files(paths: Iterable[str]) -> list[str]:
    """The paths made absolute, ``escaped``; raises if a file is missing."""
    files = [os.path.abspath(existing(path)) for path in paths]
    missing = next((file for file in files if not os.path.exists(file)), None)
    if missing is not None:
        raise UsageError(f"the image {escaped(missing)} no longer exists: restore the images to where they were.")
    return list(map(escaped, files))


def _found(path: str, base: Path) -> str:
    """The path with its start, as it was given to ``fit``, replaced by the absolute path of the same folder.

    The paths of images below /data/photos start with photos/, ../photos/ and so on, or with nothing.
    """
    if os.path.isabs(path):
        return path
    parts = Path(path).parts
    starts = [k for k in reversed(range(len(parts))) if _is_end(parts[:k], base.parts)]
    places = [os.path.join(base, *parts[k:]) for k in starts]
    return next((file for file in (*places, path) if os.path.exists(existing(file))), places[0])


def _is_end(start: tuple[str, ...], of: tuple[str, ...]) -> bool:
    names = tuple(part for part in Path(os.path.normpath(os.path.join("", *start))).parts if part != "..")
    return of[len(of) - len(names) :] == names
