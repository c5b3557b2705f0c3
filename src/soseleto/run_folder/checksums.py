"""``SHA256SUMS``: the checksum of every file of a finished run, in the format of ``sha256sum --check``.

The list is written when the training ends. A file that is replaced later is taken off the list, replaced, and listed
again, so that a kill at any moment leaves no file that differs from its line. A file without a line is not checked.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from soseleto.errors import DataError
from soseleto.run_folder.files import MOST_JSON, aside, bounded, regular, write_text

CHECKSUMS = "SHA256SUMS"
_LINE = re.compile(r"([0-9a-f]{64})  ([\w.]+)")


def create(run: Path, names: Iterable[str]) -> None:
    """List those of the files that exist."""
    _write(run, {name: sha256(run / name) for name in names if regular(run / name)})


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(run: Path) -> dict[str, str] | None:
    """The checksum of every listed file; None where the run has no list."""
    path = regular(run / CHECKSUMS)
    if path is None:
        return None
    lines = [_LINE.fullmatch(line) for line in bounded(path, MOST_JSON).decode("utf-8", "replace").splitlines()]
    if not all(lines):
        raise DataError(f"{path} is damaged: restore it from a copy, or delete it to read the run unchecked.")
    return {line[2]: line[1] for line in lines if line}


def verified(run: Path, name: str) -> Path | None:
    """The path of a file of the run after its checksum was compared; None where there is no such file."""
    path, listed = regular(run / name), read(run) or {}
    if name not in listed or (path and sha256(path) == listed[name]):
        return path
    what = f"{path} is damaged (its checksum is not that in {CHECKSUMS})" if path else f"{run / name} is missing"
    raise DataError(f"{what}: restore it from a copy, or delete its line from {CHECKSUMS} to read the run as it is.")


@contextlib.contextmanager
def changing(path: Path) -> Iterator[None]:
    """Around every change of a file of a run."""
    listed = read(path.parent)
    if listed is not None and path.name in listed:
        _write(path.parent, {name: listed[name] for name in listed if name != path.name})
    yield
    if listed is not None:
        _write(path.parent, {**listed, path.name: sha256(path)})


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """``aside`` for a file of a run, with its checksum updated."""
    with changing(path), aside(path) as part:
        yield part


def _write(run: Path, listed: dict[str, str]) -> None:
    write_text(run / CHECKSUMS, "".join(f"{listed[name]}  {name}\n" for name in sorted(listed)))
