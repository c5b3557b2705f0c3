"""Where the source of a run was read from: ``source.json``, by which its examples are found again after the training.

A table or an ``.npz`` file is recognised by its sha256, and its rows then by their ids or numbers; the images of a
folder by their paths, which may be relative to the folder in which ``fit`` ran.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from soseleto.data.readers import table_files
from soseleto.data.readers.file_names import escaped, existing
from soseleto.data.readers.reading import Reading
from soseleto.data.readers.tables import columns_of
from soseleto.data.storage import is_large
from soseleto.errors import DataError, UsageError
from soseleto.run_folder import checksums
from soseleto.run_folder.folder import SOURCE, RunFolder
from soseleto.run_folder.ranking import feature_columns, shown_rows

OPTIONS = ("label_column", "path_column", "id_column", "truth_column", "encoding")


def is_table(source: Path) -> bool:
    return source.suffix.lower() in table_files.SUFFIXES


def is_npz(source: Path) -> bool:
    return source.suffix.lower() == ".npz"


def digest(source: str | os.PathLike[str]) -> str | None:
    """The sha256 of a file; None for a folder."""
    path = Path(source).expanduser()
    return checksums.sha256(path) if path.is_file() else None


@contextmanager
def unchanged(source: Path) -> Iterator[None]:
    """DataError if the file is replaced or written to inside the block."""
    before = _stamp(source)
    yield
    if _stamp(source) != before:
        raise DataError(f"{source} changed while it was read: wait until it is complete and start again.")


def _stamp(path: Path) -> tuple[int, ...] | None:
    try:
        stamp = path.stat()
    except OSError:  # the reader reports it
        return None
    return None if path.is_dir() else (stamp.st_ino, stamp.st_size, stamp.st_mtime_ns)


def remember(
    run: RunFolder,
    source: str | os.PathLike[str],
    reading: Reading,
    features: Sequence[str] | None = None,
    sha256: str | None = None,
    texts: Sequence[str] = (),
    checked: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Record where the source is, the options that it was read with, and the names of its features.

    sha256: the ``digest`` of a file when it was read
    texts: columns of text, which are added to the ranking's features as they are in the table
    checked: the target's labels, by id, of source examples that were left out because they are also in the target
    """
    path = Path(os.path.abspath(Path(source).expanduser()))
    if features is not None and texts and is_table(path) and digest(path) == sha256:
        features = _with_texts(run, path, reading, features, texts)
    options = {name: value for name in OPTIONS if (value := getattr(reading, name)) is not None}
    note = {"path": str(path), "sha256": sha256, **options, "checked": dict(checked)}
    run.write_json(SOURCE, {**note, "features": None if features is None else list(features)})


def _with_texts(
    run: RunFolder, path: Path, reading: Reading, features: Sequence[str], texts: Sequence[str]
) -> list[str]:
    """Add the texts to the ranking, of a large table only in the rows that are shown; the names of all features."""
    table, ranking = table_files.load(path, "source", reading, all_text=True), run.ranking()
    shown = list(features[: len(feature_columns(ranking, {}))])
    wanted = set(ranking["id"][shown_rows(ranking)].tolist()) if is_large(table.nbytes) else None
    ids = row_ids(table, columns_of(table, reading, what=str(path)).identity)
    for place, name in enumerate(texts, start=len(shown)):
        cells = (cell for chunk in table.column(name).chunks for cell in chunk.to_pylist())
        by_id = {key: cell for key, cell in zip(ids, cells, strict=True) if wanted is None or key in wanted}
        ranking[f"x{place}"] = np.array([by_id.get(str(key)) or "" for key in ranking["id"]], dtype=object)
    run.write_ranking(ranking)
    return [*shown, *texts]


def row_ids(table: Any, identity: str | None) -> list[str]:
    """The ids as the reader gives them: the id column, else the row number."""
    if identity is None:
        return list(map(str, range(table.num_rows)))
    return [str(value) for value in table.column(identity).to_pylist()]


def source_file(run: RunFolder) -> Path | None:
    """The table or ``.npz`` file the run was trained on, if it still has the same bytes; None for other sources."""
    source = run.source()
    path = Path(source.get("path", ""))
    if not (is_table(path) or is_npz(path)):
        return None
    if not path.is_file():
        raise DataError(f"the source {path} no longer exists: restore it, since the export is a copy of it.")
    if digest(path) != source.get("sha256"):
        raise DataError(f"{path} has changed since the training: restore it, or train again.")
    return path


def image_files(run: RunFolder, paths: Iterable[str]) -> list[str]:
    """Absolute paths of the images of a ranking, ``escaped``; raises if one is missing."""
    source = run.source().get("path")
    if source is None:
        return existing_files(paths)
    base = Path(source).parent if is_table(Path(source)) else Path(source)
    return existing_files(_below(path, base) for path in paths)


def existing_files(paths: Iterable[str]) -> list[str]:
    """The paths made absolute, ``escaped``; raises if a file is missing."""
    files = [os.path.abspath(existing(path)) for path in paths]
    missing = next((file for file in files if not os.path.exists(file)), None)
    if missing is not None:
        raise UsageError(f"the image {escaped(missing)} no longer exists: restore the images to where they were.")
    return list(map(escaped, files))


def _below(path: str, base: Path) -> str:
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
