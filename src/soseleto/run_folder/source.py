"""The source that a run was trained on: ``source.json``, by which it is found again, and a corrected copy of it.

A table is recognised by its sha256, and its rows then by their ids or numbers; images by their paths, which may be
relative to the folder in which ``fit`` ran. In the copy a table keeps its columns; a folder of images becomes a table
of path, label and id.

Thumbnails of selected examples are in the run folder, so that report and review do not need the data:
``pictures.parquet`` has the columns ``id`` and ``picture`` (the bytes of a JPEG).
"""

from __future__ import annotations

import io
import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soseleto.data import tables
from soseleto.data.cells import left_out
from soseleto.data.images import outside
from soseleto.data.reading import Reading, names_of
from soseleto.data.tables import roles_of
from soseleto.errors import DataError, UsageError, need
from soseleto.run_folder.files import aside, parquet_columns, readable, sha256, verified
from soseleto.run_folder.folder import PICTURES, REVIEW, SOURCE, RunFolder, require_writable
from soseleto.run_folder.ranking import MOST_TABLE_COLUMNS, feature_columns, shown_rows

if TYPE_CHECKING:
    from soseleto.data import ExampleSet

OPTIONS = ("label_column", "path_column", "id_column", "truth_column", "encoding")
MOST_BESIDE = 8  # columns of texts, and those that the training left out
LARGEST = 96  # longer side of a thumbnail, in pixels
_need = partial(need, to="writing a corrected source")


def digest(source: str | os.PathLike[str]) -> str | None:
    """The sha256 of a file; None for a folder."""
    path = Path(source).expanduser()
    return sha256(path) if path.is_file() else None


def remember(
    run: RunFolder,
    source: str | os.PathLike[str],
    data: Any,
    digest_read: str | None = None,
    reading: Reading | None = None,
) -> None:
    """Record where the source is, the options that it was read with, and the names of its features.

    data: what was read, such as a ``Pair``; digest_read: the ``digest`` of a file when it was read

    Columns that the model does not get as they are in the table are put before the ranking's features.
    """
    reading = reading or Reading()
    path, table = Path(os.path.abspath(Path(source).expanduser())), data.preparation
    features: list[str] | None = None
    if table is not None:
        features = [name for name in table.used if name not in table.texts]
        beside = [*table.texts, *left_out(table.seen)]
        if beside and path.suffix.lower() in tables.SUFFIXES and digest(path) == digest_read:
            features = _with_columns(run, path, reading, features, beside)
    options = {name: value for name in OPTIONS if (value := getattr(reading, name)) is not None}
    note = {"path": str(path), "folder": os.getcwd(), "sha256": digest_read, **options, "checked": dict(data.checked)}
    run.write_json(SOURCE, {**note, "features": features})


def _with_columns(
    run: RunFolder, path: Path, reading: Reading, features: Sequence[str], beside: Sequence[str]
) -> list[str]:
    """Put columns of the table before the ranking's features.

    At most ``MOST_BESIDE``, and none that is constant, or repeats the label, the id or another one. Returns the names
    of all features.
    """
    table, ranking = tables.load(path, reading), run.ranking()
    columns, labels = list(feature_columns(ranking, {})), ranking["label"].astype(str).tolist()
    own = {name: ranking.pop(name) for name in columns}
    own_names = list(features[:MOST_TABLE_COLUMNS])
    row_of = {key: row for row, key in enumerate(row_ids(table, roles_of(table, reading, what=str(path)).get("id")))}
    rows = [row_of.get(str(key)) for key in ranking["id"]]
    added: dict[str, list[str]] = {}
    for name in beside:
        cells = table.column(name).take(_need("pyarrow").array(rows, "int64")).to_pylist()
        values = ["" if cell is None else str(cell) for cell in cells]
        different, pairs = len(set(values)), len(set(zip(values, labels, strict=True)))
        repeats = values in [ranking["id"].tolist(), *added.values()] or different == pairs == len(set(labels))
        if different > 1 and not repeats and len(added) < MOST_BESIDE:
            added[name] = values
    texts = [np.array(values, dtype=object) for values in added.values()]
    numbers = list(own.values())[max(0, len(own) - len(own_names)) :]  # not those added before an interruption
    run.write_ranking(ranking | {f"x{place}": values for place, values in enumerate([*texts, *numbers])})
    return [*added, *own_names]


def row_ids(table: Any, identity: str | None) -> list[str]:
    """The ids as the reader gives them: the id column, else the row number."""
    if identity is None:
        return list(map(str, range(table.num_rows)))
    return [str(value) for value in table.column(identity).to_pylist()]


def source_file(run: RunFolder) -> Path | None:
    """The table the run was trained on, if it still has the same bytes; None for other sources."""
    source = run.source()
    path = Path(source.get("path", ""))
    if path.suffix.lower() not in tables.SUFFIXES:
        return None
    if digest(path) != source.get("sha256"):
        raise DataError(f"{path} has changed since the training or is gone: restore it, or train again.")
    return path


# The corrected copy


def write_corrected(
    run: RunFolder, out: Path, *, drop: Collection[str], relabel: Mapping[str, str], force: bool = False
) -> int:
    """Write the source without the ids in ``drop`` and with the labels in ``relabel``; return the number of rows.

    Image paths are written relative to ``out``, which must be in a folder at or above them: ``fit`` reads no images
    outside a table's folder.
    """
    if out.suffix.lower() not in (".csv", ".parquet"):
        raise UsageError(f"this source cannot be written as {out}: write {out.with_suffix('.csv')} instead.")
    require_writable(out, run=run, force=force)
    file, pyarrow = source_file(run), _need("pyarrow")
    table, label, ids = _from_ranking(run, out) if file is None else _from_file(run, file, out)
    if relabel:
        labels = names_of(table.column(label).to_pylist())
        corrected = [relabel.get(key, old) for key, old in zip(ids, labels, strict=True)]
        table = _with_column(table, label, pyarrow.array(corrected, pyarrow.string()))
    table = table.filter(pyarrow.array([key not in drop for key in ids]))
    if not table.num_rows:
        raise UsageError("every example is dropped: keep at least one.")
    sink = pyarrow.BufferOutputStream()
    if out.suffix.lower() == ".parquet":
        _need("pyarrow.parquet").write_table(table, sink)
    else:
        _write_csv(table, sink, out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with aside(out) as part:
        part.write_bytes(sink.getvalue())
    return int(table.num_rows)


def _from_file(run: RunFolder, file: Path, out: Path) -> tuple[Any, str, list[str]]:
    """The table the run was trained on, the name of its label column, and the ids of its rows."""
    source = run.source()
    options: dict[str, Any] = {name: source.get(name) for name in OPTIONS}
    reading = Reading(**options)
    table = tables.load(file, reading)
    roles = roles_of(table, reading, what=str(file))
    if "path" in roles:
        paths = _relative_to(out, str(file.parent), table[roles["path"]].to_pylist())
        table = _with_column(table, roles["path"], _need("pyarrow").array(paths))
    return table, roles["label"], row_ids(table, roles.get("id"))


def _from_ranking(run: RunFolder, out: Path) -> tuple[Any, str, list[str]]:
    ranking = run.ranking()
    if "path" not in ranking:
        raise UsageError(
            f"{run.path} was trained on arrays, of which its folder has no copy: drop or relabel the ids that "
            f"`soseleto rank {run.path} --suspects` lists, or those in {run.path / REVIEW}, where you made that data."
        )
    columns = {
        "path": _relative_to(out, run.source().get("folder", ""), ranking["path"].tolist()),
        "label": [str(label) for label in ranking["label"]],
        "id": [str(key) for key in ranking["id"]],
    }
    table = _need("pyarrow").table(columns).sort_by("id")
    return table, "label", table.column("id").to_pylist()


def _with_column(table: Any, name: str, values: Any) -> Any:
    return table.set_column(table.column_names.index(name), name, values)


def _relative_to(out: Path, start: str, paths: list[str]) -> list[str]:
    """Paths that were relative to ``start``, relative to the folder of ``out``."""
    folder = Path(os.path.abspath(out)).parent
    files = [os.path.abspath(os.path.join(start, path or "")) for path in paths]
    relative = [os.path.relpath(file, folder) for file in files]
    if outside(folder, relative):
        common = os.path.commonpath([os.path.dirname(file) for file in files])
        raise UsageError(
            f"the images are outside {folder}, and fit reads only images below a table's folder: "
            f"write it as {os.path.join(common, out.name)}."
        )
    return [Path(path).as_posix() for path in relative]


def _write_csv(table: Any, sink: Any, out: Path) -> None:
    csv, pyarrow = _need("pyarrow.csv"), _need("pyarrow")
    for field in table.schema:
        if pyarrow.types.is_dictionary(field.type):  # pandas categories, which pyarrow does not write as CSV
            table = _with_column(table, field.name, table.column(field.name).cast(field.type.value_type))
    try:
        csv.write_csv(table, sink, csv.WriteOptions(quoting_style="needed"))
    except pyarrow.ArrowException as error:  # lists, or bytes
        instead = out.with_suffix(".parquet")
        raise UsageError(f"some values of the source cannot be written as CSV: write {instead} instead.") from error


# Thumbnails


def save_thumbnails(folder: RunFolder, source: ExampleSet, also: Sequence[int] = ()) -> None:
    """Write thumbnails of the best, the worst, the suspects and the rows ``also``; nothing for other inputs."""
    import torch

    inputs = source.take(torch.tensor([0]))[0]
    if not isinstance(inputs, torch.Tensor) or inputs.ndim != 4:
        return
    if inputs.shape[1] not in (1, 3, 4) or min(inputs.shape[2:]) < 2:
        return
    ranking = folder.ranking()
    names = ranking["id"][shown_rows(ranking, also)].tolist()
    place = {source.id_of(at): at for at in range(len(source))}
    parts = torch.tensor([place[name] for name in names]).split(64)
    pictures = [_encode(pixels) for part in parts for pixels in source.take(part)[0].detach().cpu().numpy()]
    folder.write_parquet(PICTURES, {"id": names, "picture": pictures}, compression="none")


def load_thumbnails(folder: RunFolder) -> dict[str, bytes]:
    """Thumbnails by id; empty where the run has none."""
    path = verified(folder.path / PICTURES)
    if path is None:
        return {}
    with readable(path):
        columns = parquet_columns(path)
        ids, pictures = columns["id"].tolist(), columns["picture"].tolist()
        return dict(zip(ids, pictures, strict=True))


def image_from_file(path: str, largest: int) -> bytes | None:
    """An image file decoded and encoded again, so that only image data is served; None where it cannot be read.

    It is opened as for training: only in formats that need no other program, and after a check of its size.
    """
    from soseleto.data.images import open_image

    try:
        return _shrink(open_image(path), largest)
    except Exception:  # Pillow raises many kinds
        return None


def _shrink(image: Any, largest: int = LARGEST) -> bytes:
    """A Pillow image as a JPEG of at most ``largest`` pixels per side."""
    stream, image = io.BytesIO(), image.convert("RGB")
    image.thumbnail((largest, largest))
    image.save(stream, "JPEG", quality=90, subsampling=0)  # colours of small images would blur
    return stream.getvalue()


def _encode(array: np.ndarray) -> bytes:
    """One image (C, H, W); values other than uint8 are scaled from [min, max] to [0, 255]."""
    image = need("PIL.Image", to="writing thumbnails")
    if array.dtype != np.uint8:
        low, high = float(array.min()), float(array.max())
        array = np.rint((array - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)
    array = np.ascontiguousarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))
    return _shrink(image.fromarray(array))
