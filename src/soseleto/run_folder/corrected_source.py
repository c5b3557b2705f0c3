"""A corrected copy of a run's source, for the next training: ``soseleto fit --source`` reads it.

A table keeps its columns, an ``.npz`` file its arrays; a folder of images becomes a table of path, label and id.
"""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.data.readers import table_files
from soseleto.data.readers.file_names import escaped, existing
from soseleto.data.readers.image_folder import outside
from soseleto.data.readers.labels import names_of, text_of
from soseleto.data.readers.npz import load_arrays
from soseleto.data.readers.reading import Reading
from soseleto.data.readers.tables import columns_of
from soseleto.errors import UsageError, need
from soseleto.run_folder.files import aside
from soseleto.run_folder.folder import RunFolder, require_writable
from soseleto.run_folder.ranking import feature_columns
from soseleto.run_folder.source import OPTIONS, existing_files, image_files, is_npz, row_ids, source_file

SUFFIXES = (".csv", ".parquet")
_need = partial(need, to="writing a corrected source")


def write(run: RunFolder, out: Path, *, drop: Collection[str], relabel: Mapping[str, str], force: bool = False) -> int:
    """Write the source without the ids in ``drop`` and with the labels in ``relabel``; return the number of rows.

    Image paths are written relative to ``out``, which must be in a folder at or above them: ``fit`` reads no images
    outside a table's folder.
    """
    _check_suffix(out, Path(run.source().get("path", "")))
    require_writable(out, run=run, force=force)
    file = source_file(run)
    if file is not None and is_npz(file):
        content, count = _npz(file, drop, relabel, run.source().get("encoding"))
    else:
        content, count = _table(run, file, out, drop, relabel)
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
        raise UsageError(f"{out} is neither .csv nor .parquet: give the file one of these endings.")


# Tables


def _table(
    run: RunFolder, file: Path | None, out: Path, drop: Collection[str], relabel: Mapping[str, str]
) -> tuple[bytes, int]:
    pyarrow = _need("pyarrow")
    table, label, ids = _from_ranking(run, out) if file is None else _from_file(run, file, out)
    if relabel:
        labels = names_of(table.column(label).to_pylist()).names
        corrected = [relabel.get(key, old) for key, old in zip(ids, labels, strict=True)]
        place = table.column_names.index(label)
        table = table.set_column(place, label, pyarrow.array(corrected, pyarrow.string()))
    table = table.filter(pyarrow.array([key not in drop for key in ids]))
    return _parquet(table) if out.suffix.lower() == ".parquet" else _csv(table, out), int(table.num_rows)


def _from_file(run: RunFolder, file: Path, out: Path) -> tuple[Any, str, list[str]]:
    """The table the run was trained on, the name of its label column, and the ids of its rows."""
    source = run.source()
    options: dict[str, Any] = {name: source.get(name) for name in OPTIONS}
    reading = Reading(**options)
    table = table_files.load(file, "source", reading, all_text=True)
    columns = columns_of(table, reading, what=str(file))
    if columns.path is not None:
        place, values = table.column_names.index(columns.path), table.column(columns.path).to_pylist()
        beside = _beside(out, existing_files(os.path.join(file.parent, value or "") for value in values))
        table = table.set_column(place, columns.path, _need("pyarrow").array(beside))
    return table, columns.label, row_ids(table, columns.identity)


def _from_ranking(run: RunFolder, out: Path) -> tuple[Any, str, list[str]]:
    """The source as far as the ranking knows it, ordered by id."""
    ranking = run.ranking()
    columns: dict[str, Any] = {}
    if "path" in ranking:
        columns["path"] = _beside(out, image_files(run, map(str, ranking["path"])))
    columns["label"] = [str(label) for label in ranking["label"]]
    columns["id"] = [str(key) for key in ranking["id"]]
    columns |= {name: ranking[column] for column, name in feature_columns(ranking, run.source()).items()}
    if len(columns) == 2:
        raise UsageError(
            f"{run.path} was trained on data in memory, of which its folder has no copy: drop or relabel the ids that "
            f"`soseleto rank {run.path} --suspects` lists where you made that data."
        )
    table = _need("pyarrow").table(columns).sort_by("id")
    return table, "label", table.column("id").to_pylist()


def _beside(out: Path, files: list[str]) -> list[str]:
    """The absolute paths relative to the folder of ``out``."""
    folder = Path(os.path.abspath(out)).parent
    files = [existing(file) for file in files]
    relative = [os.path.relpath(file, folder) for file in files]
    if outside(folder, relative):
        common = os.path.commonpath([os.path.dirname(file) for file in files])
        raise UsageError(
            f"the images are outside {folder}, and fit reads only images below a table's folder: "
            f"write it as {os.path.join(common, out.name)}."
        )
    return [escaped(Path(path).as_posix()) for path in relative]


def _csv(table: Any, out: Path) -> bytes:
    csv, pyarrow = _need("pyarrow.csv"), _need("pyarrow")
    sink = pyarrow.BufferOutputStream()
    try:
        for place, field in enumerate(table.schema):
            if pyarrow.types.is_dictionary(field.type):  # pandas categories, which CSV cannot write by their codes
                table = table.set_column(place, field.name, table.column(place).cast(field.type.value_type))
        csv.write_csv(table, sink, csv.WriteOptions(quoting_style="needed"))
    except pyarrow.ArrowException as error:  # lists, or bytes
        instead = out.with_suffix(".parquet")
        raise UsageError(f"some values of the source cannot be written as CSV: write {instead} instead.") from error
    return bytes(sink.getvalue())


def _parquet(table: Any) -> bytes:
    sink = _need("pyarrow").BufferOutputStream()
    _need("pyarrow.parquet").write_table(table, sink)
    return bytes(sink.getvalue())


# .npz files


def _npz(file: Path, drop: Collection[str], relabel: Mapping[str, str], encoding: str | None) -> tuple[bytes, int]:
    """Arrays with one entry per example lose the entries in ``drop``; other arrays are copied."""
    arrays = load_arrays(file, every=True)
    ids = [str(row) for row in range(len(arrays["y"]))]
    if "id" in arrays:
        ids = [text_of(value, where=f"an id in {file}", encoding=encoding) for value in arrays["id"].tolist()]
    if relabel:
        arrays["y"] = _relabelled(arrays["y"], ids, relabel, encoding)
    keep = np.array([key not in drop for key in ids])
    kept = {name: array[keep] if array.shape[:1] == keep.shape else array for name, array in arrays.items()}
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:  # np.savez refuses some names of arrays
        for name, array in kept.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return content.getvalue(), int(keep.sum())


def _relabelled(labels: Any, ids: Sequence[str], relabel: Mapping[str, str], encoding: str | None) -> Any:
    """Numbers stay numbers where the new labels are numbers; all labels become text otherwise."""
    names = names_of(labels.reshape(-1).tolist(), encoding=encoding).names
    new = [relabel.get(key, old) for key, old in zip(ids, names, strict=True)]
    if labels.dtype.kind in "iuf" and all(name is None or name.isdecimal() for name in new):
        return np.array([float("nan") if name is None else int(name) for name in new])
    return np.array(["" if name is None else name for name in new])
