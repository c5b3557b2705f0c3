"""Corrected manifests: a copy of a run's source as a table that ``soseleto fit --source`` reads.

A table keeps its columns, an ``.npz`` file its arrays; a folder of images becomes a table of path, label and id.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from soseleto.data.readers import table_files
from soseleto.data.readers.file_names import escaped, existing
from soseleto.data.readers.image_folder import outside
from soseleto.data.readers.labels import names_of
from soseleto.data.readers.reading import Reading
from soseleto.data.readers.tables import columns_of
from soseleto.data.storage import is_large
from soseleto.errors import DataError, UsageError, need
from soseleto.run_folder import npz_source
from soseleto.run_folder.files import aside
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.image_files import existing_files, image_files
from soseleto.run_folder.outputs import require_writable
from soseleto.run_folder.plausible import readable
from soseleto.run_folder.ranking import feature_columns, shown_rows, suspect_rows
from soseleto.run_folder.source_rows import Rows, is_npz, is_table, match

SUFFIXES = (".csv", ".parquet")
OPTIONS = ("label_column", "path_column", "id_column", "truth_column", "encoding")
_need = partial(need, to="writing a manifest")


class Copies(NamedTuple):
    """Source examples that are left out because they are in the target: their ids, and the label there, if another."""

    ids: Sequence[str] = ()
    checked: Mapping[str, str] = MappingProxyType({})


NO_COPIES = Copies()


def remember(
    run: RunFolder,
    source: str | os.PathLike[str],
    reading: Reading,
    features: Sequence[str] | None = None,
    rows: Rows | None = None,
    texts: Sequence[str] = (),
    copies: Copies = NO_COPIES,
) -> None:
    """Record the source's path, its column options, the names of its features, the rows of a table, and the copies.

    rows: as they were when the source was read; by default they are read now
    texts: columns of text, which are added to the ranking's features as they are in the table
    """
    path = Path(os.path.abspath(Path(source).expanduser()))
    rows = rows or Rows.of(path, reading)
    if features is not None and rows is not None and texts:
        features = _with_texts(run, path, reading, rows, features, texts)
    names = {name: given for name in OPTIONS if (given := getattr(reading, name)) is not None}
    note = {"path": str(path), **names, "features": None if features is None else list(features)}
    if rows is not None:
        rows.save(run)
        note["columns"] = list(rows.columns)
        note |= {"copies": list(copies.ids), "checked": dict(copies.checked)} if copies.ids else {}
    run.write_source(note)


def _with_texts(
    run: RunFolder, path: Path, reading: Reading, rows: Rows, features: Sequence[str], texts: Sequence[str]
) -> list[str]:
    """Add the texts to the ranking, of a large table only in the rows that are shown; the names of its features
    afterwards."""
    table, ranking = table_files.load(path, "source", reading, all_text=True), run.ranking()
    shown = list(features[: len(feature_columns(ranking, {}))])
    if table.num_rows != len(rows.ids):  # the file has changed since it was read
        return shown
    wanted = set(ranking["id"][shown_rows(ranking)].tolist()) if is_large(table.nbytes) else None
    for place, name in enumerate(texts, start=len(shown)):
        cells = (cell for chunk in table.column(name).chunks for cell in chunk.to_pylist())
        by_id = {one: cell for one, cell in zip(rows.ids, cells, strict=True) if wanted is None or one in wanted}
        ranking[f"x{place}"] = np.array([by_id.get(str(one)) or "" for one in ranking["id"]], dtype=object)
    run.write_ranking(ranking)
    return [*shown, *texts]


def write(run: RunFolder, out: Path, *, drop: Collection[str], relabel: Mapping[str, str], force: bool = False) -> int:
    """Write the source without the ids in ``drop`` and with the labels in ``relabel``; return the number of rows.

    Image paths are written relative to the manifest, which must be in a folder at or above them: ``fit`` reads no
    images outside a manifest's folder.
    """
    known = run.source()
    source = Path(known.get("path", ""))
    _check_suffix(out, source)
    require_writable(out, run=run, force=force)
    if (is_table(source) or is_npz(source)) and not source.is_file():
        raise DataError(f"the source {source} no longer exists: restore it, since the export is a copy of it.")
    make = _corrected_npz if is_npz(source) else _corrected_table
    content, count = make(run, out, drop, relabel)
    if not count:
        raise UsageError("every example is dropped: keep at least one.")
    out.parent.mkdir(parents=True, exist_ok=True)
    with aside(out) as part:
        part.write_bytes(content)
    return count


def _check_suffix(out: Path, source: Path) -> None:
    if is_npz(source):
        if out.suffix.lower() != ".npz":
            raise UsageError(f"the source {source} is an .npz file: write {out.with_suffix('.npz')} instead of {out}.")
    elif out.suffix.lower() not in SUFFIXES:
        raise UsageError(f"{out} is neither .csv nor .parquet: give the manifest one of these endings.")


def _corrected_npz(run: RunFolder, out: Path, drop: Collection[str], relabel: Mapping[str, str]) -> tuple[bytes, int]:
    known = run.source()
    file, encoding = Path(known["path"]), known.get("encoding")
    table = npz_source.row_table(file, encoding)
    identity = "id" if "id" in table.column_names else None
    used = [str(name) for name in run.ranking()["id"]]
    ids = match(Rows.load(run), table, identity, file=file, used=used, corrected={*drop, *relabel})
    return npz_source.corrected(file, ids, drop=drop, relabel=relabel, encoding=encoding)


def _corrected_table(run: RunFolder, out: Path, drop: Collection[str], relabel: Mapping[str, str]) -> tuple[bytes, int]:
    table, label = _source_table(run, out, {*drop, *relabel}) or _ranking_table(run, out)
    table = _corrected(table, label, drop, relabel)
    content = _parquet(table) if out.suffix.lower() == ".parquet" else _csv(table, label, out)
    return content, int(table.num_rows)


def _corrected(table: Any, label: str, drop: Collection[str], relabel: Mapping[str, str]) -> Any:
    """Apply the corrections by the ids in ``_KEY``, and drop that column."""
    pyarrow = _need("pyarrow")
    ids = table.column(_KEY).to_pylist()
    if relabel:
        labels = names_of(table.column(label).to_pylist()).names
        corrected = [relabel.get(name, old) for name, old in zip(ids, labels, strict=True)]
        place = table.column_names.index(label)
        table = table.set_column(place, label, pyarrow.array(corrected, pyarrow.string()))
    return table.filter(pyarrow.array([name not in drop for name in ids])).drop_columns([_KEY])


_KEY = "\0id"  # cannot collide with a column of the file


def _source_table(run: RunFolder, out: Path, corrected: Collection[str]) -> tuple[Any, str] | None:
    """The table the run was trained on, with the ids of its rows in ``_KEY``; None where the source was not a table."""
    known = run.source()
    file = Path(known.get("path", ""))
    if not is_table(file):
        return None
    options: dict[str, Any] = {name: known.get(name) for name in OPTIONS}
    reading = Reading(**options)
    table = table_files.load(file, "source", reading, all_text=True)
    found = columns_of(table, reading, what=str(file))
    used = [str(name) for name in run.ranking()["id"]]
    ids = match(Rows.load(run), table, found.identity, file=file, used=used, corrected=corrected)
    if found.path is not None:
        place, values = table.column_names.index(found.path), table.column(found.path).to_pylist()
        beside = _beside(out, existing_files(os.path.join(file.parent, value or "") for value in values))
        table = table.set_column(place, found.path, _need("pyarrow").array(beside))
    return table.append_column(_KEY, _need("pyarrow").array(ids, _need("pyarrow").string())), found.label


def _ranking_table(run: RunFolder, out: Path) -> tuple[Any, str]:
    """The source as far as the ranking knows it, ordered by id."""
    pyarrow, ranking = _need("pyarrow"), run.ranking()
    columns: dict[str, Any] = {}
    if "path" in ranking:
        columns["path"] = _beside(out, image_files(run, map(str, ranking["path"])))
    columns["label"] = [str(label) for label in ranking["label"]]
    columns["id"] = [str(name) for name in ranking["id"]]
    columns |= {name: ranking[column] for column, name in feature_columns(ranking, run.source()).items()}
    if len(columns) == 2:
        raise UsageError(
            f"{run.path} was trained on data in memory, of which its folder has no copy: drop or relabel the ids that "
            f"`soseleto rank {run.path} --suspects` lists where you made that data."
        )
    return pyarrow.table({**columns, _KEY: columns["id"]}).sort_by("id"), "label"


def _beside(out: Path, files: list[str]) -> list[str]:
    """The absolute paths relative to the manifest's folder."""
    folder = Path(os.path.abspath(out)).parent
    files = [existing(file) for file in files]
    relative = [os.path.relpath(file, folder) for file in files]
    if outside(folder, relative):
        common = os.path.commonpath([os.path.dirname(file) for file in files])
        raise UsageError(
            f"the images are outside {folder}, and fit reads only images below a manifest's folder: "
            f"write it as {os.path.join(common, out.name)}."
        )
    return [escaped(Path(path).as_posix()) for path in relative]


def _csv(table: Any, label: str, out: Path) -> bytes:
    """CSV as bytes, after checking that the reader finds the same labels in it."""
    csv, pyarrow = _need("pyarrow.csv"), _need("pyarrow")
    sink = pyarrow.BufferOutputStream()
    try:
        csv.write_csv(_decoded(table), sink, csv.WriteOptions(quoting_style="needed"))
        content = bytes(sink.getvalue())
        back = table_files.parse_csv(content.decode(), ",", Reading(label_column=label), what=str(out))
        same = _labels(back, label) == _labels(table, label)
    except (pyarrow.ArrowException, DataError):  # lists, bytes, or text that the reader refuses
        same = False
    if not same:
        instead = out.with_suffix(".parquet")
        raise UsageError(f"some values of the source would change in a CSV file: write {instead} instead.")
    return content


def _labels(table: Any, label: str) -> tuple[str | None, ...]:
    return names_of(table.column(label).to_pylist()).names


def _decoded(table: Any) -> Any:
    """With the values of dictionary columns (pandas categories), which CSV cannot write by their codes."""
    types = _need("pyarrow").types
    for place, field in enumerate(table.schema):
        if types.is_dictionary(field.type):
            table = table.set_column(place, field.name, table.column(place).cast(field.type.value_type))
    return table


def _parquet(table: Any) -> bytes:
    sink = _need("pyarrow").BufferOutputStream()
    _need("pyarrow.parquet").write_table(table, sink)
    return bytes(sink.getvalue())


class Cleaned(NamedTuple):
    rows: int
    dropped: int
    relabelled: int
    copies: int = 0  # of target examples: dropped, or given the target's label


def write_clean(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    relabel: bool = False,
    force: bool = False,
    rows: np.ndarray | None = None,
) -> Cleaned:
    """Write the source without the suspects; with ``relabel``, keep them with their suggested labels.

    Copies of target examples, which a table may hold, are dropped too; with ``relabel`` they get the target's labels.
    ``force`` replaces an existing file; ``rows`` of the ranking are taken instead of the suspects.
    """
    folder = RunFolder.open(run)
    with readable(folder.path):
        return _write_clean(folder, Path(out), rows, relabel=relabel, force=force)


def _write_clean(folder: RunFolder, out: Path, rows: np.ndarray | None, *, relabel: bool, force: bool) -> Cleaned:
    ranking = folder.ranking()
    suspects = suspect_rows(ranking) if rows is None else rows
    names = [str(name) for name in ranking["id"][suspects]]
    copies, checked = folder.source().get("copies", []), folder.source().get("checked", {})
    if not relabel:
        drop = {*names, *copies}
        return Cleaned(write(folder, out, drop=drop, relabel={}, force=force), len(drop), 0, len(copies))
    if "suggested_label" not in ranking:
        raise UsageError(f"{folder.path} was trained without probes and has no suggested labels: leave out --relabel.")
    labels = [str(label) for label in ranking["suggested_label"][suspects]]
    corrected = {**dict(zip(names, labels, strict=True)), **checked}
    return Cleaned(write(folder, out, drop=set(), relabel=corrected, force=force), 0, len(corrected), len(checked))
