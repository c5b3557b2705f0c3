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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from soseleto.data import tables
from soseleto.data.images import outside
from soseleto.data.labels import names_of
from soseleto.data.reading import Reading
from soseleto.data.tables import roles_of
from soseleto.errors import DataError, UsageError, need
from soseleto.run_folder.files import aside, parquet_columns, readable, sha256, verified
from soseleto.run_folder.folder import PICTURES, REVIEW, SOURCE, RunFolder, require_writable
from soseleto.run_folder.ranking import MOST_TABLE_COLUMNS, feature_columns, shown_rows

if TYPE_CHECKING:
    from soseleto.data import ExampleSet
    from soseleto.data.preparation import Preparation

OPTIONS = ("label_column", "path_column", "id_column", "truth_column", "encoding")
MOST_BESIDE = 8  # columns of texts, and those that the training left out
LARGEST = 96  # longer side of a thumbnail, in pixels
_need = partial(need, to="writing a corrected source")


def digest(source: str | os.PathLike[str]) -> str | None:
    """The sha256 of a file; None for a folder."""
    path = Path(source).expanduser()
    return sha256(path) if path.is_file() else None


class WasRead(Protocol):
    """What is known of data after reading; ``checked`` are the target's labels, by id, of source examples that were
    left out because they are also in the target."""

    @property
    def columns(self) -> Sequence[str] | None: ...
    @property
    def preparation(self) -> Preparation | None: ...
    @property
    def checked(self) -> Mapping[str, str]: ...


def remember(
    run: RunFolder,
    source: str | os.PathLike[str],
    data: WasRead,
    digest_read: str | None = None,
    reading: Reading | None = None,
) -> None:
    """Record where the source is, the options that it was read with, and the names of its features.

    digest_read: the ``digest`` of a file when it was read

    Columns that the model does not get as they are in the table are put before the ranking's features.
    """
    reading = reading or Reading()
    path, table = Path(os.path.abspath(Path(source).expanduser())), data.preparation
    features, beside = (data.columns, ()) if table is None else (table.shown, table.beside)
    if features is not None and beside and path.suffix.lower() in tables.SUFFIXES and digest(path) == digest_read:
        features = _with_columns(run, path, reading, features, beside)
    options = {name: value for name in OPTIONS if (value := getattr(reading, name)) is not None}
    note = {"path": str(path), "folder": os.getcwd(), "sha256": digest_read, **options, "checked": dict(data.checked)}
    run.write_json(SOURCE, {**note, "features": None if features is None else list(features)})


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
    numbers = list(own.values())[
        max(0, len(own) - len(own_names)) :
    ]  # without those that were added before an interruption
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
    if not path.is_file():
        raise DataError(f"the source {path} no longer exists: restore it, since the export is a copy of it.")
    if digest(path) != source.get("sha256"):
        raise DataError(f"{path} has changed since the training: restore it, or train again.")
    return path


def existing_files(paths: Iterable[str]) -> list[str]:
    """The paths made absolute; raises if a file is missing."""
    files = [os.path.abspath(path) for path in paths]
    missing = next((file for file in files if not os.path.exists(file)), None)
    if missing is not None:
        raise UsageError(f"the image {missing} no longer exists: restore the images to where they were.")
    return files


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
        files = existing_files(os.path.join(file.parent, value or "") for value in table[roles["path"]].to_pylist())
        table = _with_column(table, roles["path"], _need("pyarrow").array(_relative_to(out, files)))
    return table, roles["label"], row_ids(table, roles.get("id"))


def _from_ranking(run: RunFolder, out: Path) -> tuple[Any, str, list[str]]:
    ranking = run.ranking()
    if "path" not in ranking:
        raise UsageError(
            f"{run.path} was trained on arrays, of which its folder has no copy: drop or relabel the ids that "
            f"`soseleto rank {run.path} --suspects` lists, or those in {run.path / REVIEW}, where you made that data."
        )
    folder = run.source().get("folder", "")
    columns = {
        "path": _relative_to(out, existing_files(os.path.join(folder, str(path)) for path in ranking["path"])),
        "label": [str(label) for label in ranking["label"]],
        "id": [str(key) for key in ranking["id"]],
    }
    table = _need("pyarrow").table(columns).sort_by("id")
    return table, "label", table.column("id").to_pylist()


def _with_column(table: Any, name: str, values: Any) -> Any:
    return table.set_column(table.column_names.index(name), name, values)


def _relative_to(out: Path, files: list[str]) -> list[str]:
    """The absolute paths relative to the folder of ``out``."""
    folder = Path(os.path.abspath(out)).parent
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

    if not _is_images(source.take(torch.tensor([0]))[0]):
        return
    ranking = folder.ranking()
    names = ranking["id"][shown_rows(ranking, also)].tolist()
    place = {source.id_of(at): at for at in range(len(source))}
    pictures = [_encode(pixels) for pixels in _pixels(source, [place[name] for name in names])]
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


def _is_images(inputs: Any) -> bool:
    """Whether inputs (N, C, H, W) can be shown as images."""
    import torch

    if not isinstance(inputs, torch.Tensor) or inputs.ndim != 4:
        return False
    return inputs.shape[1] in (1, 3, 4) and min(inputs.shape[2:]) > 1


def _shrink(image: Any, largest: int = LARGEST) -> bytes:
    """A Pillow image as a JPEG of at most ``largest`` pixels per side."""
    stream, image = io.BytesIO(), image.convert("RGB")
    image.thumbnail((largest, largest))
    image.save(stream, "JPEG", quality=90, subsampling=0)  # colours of small images would blur
    return stream.getvalue()


def _pixels(source: ExampleSet, places: list[int]) -> Iterator[np.ndarray]:
    import torch

    for piece in torch.tensor(places).split(64):
        yield from source.take(piece)[0].detach().cpu().numpy()


def _encode(array: np.ndarray) -> bytes:
    """One image (C, H, W); values other than uint8 are scaled from [min, max] to [0, 255]."""
    image = need("PIL.Image", to="writing thumbnails")
    if array.dtype != np.uint8:
        low, high = float(array.min()), float(array.max())
        array = np.rint((array - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)
    array = np.ascontiguousarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))
    return _shrink(image.fromarray(array))
