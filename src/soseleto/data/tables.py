"""Tables as pyarrow tables: CSV, TSV, Parquet and JSON-lines files, and data frames; one example per row.

With a path column the rows are images; else every column other than label, id and truth is a feature, which ``prepare``
turns into numbers. Columns that are not given are found by their usual names, ignoring case. All cells of a CSV file
are text, exactly as it has them, so that labels and ids ("007" is not "7") and numbers with missing values stay whole.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from soseleto.data import cells
from soseleto.data.images import outside
from soseleto.data.reading import Problem, Raw, Reading, labels_from, labels_of_words, names_of, some, text_of
from soseleto.data.structure import check_size
from soseleto.errors import DataError, UsageError, counted, did_you_mean, first_line, need

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")
ROLES = {  # with the usual names of their columns
    "label": ("label", "class", "target", "y", "category"),
    "path": ("path", "file", "filename", "file_name", "filepath", "image", "image_path"),
    "id": ("id", "uid", "uuid", "key"),
    "truth": (),
    "group": (),
    "before": (),
}
# Roles whose column a set may lack; other sets than these, such as inputs to predict on, may lack any.
MAY_LACK = {"source": ("group", "before"), "target": ("truth",), "test": ("truth", "before")}
_SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas"}
_NO_TEXT = {b"PK\x03\x04": "an archive or an Excel file", b"\x1f\x8b": "a gzip file", b"PAR1": "a Parquet file"}
_BLOCK = 1 << 26  # bytes of a CSV file that pyarrow parses at a time; a row must fit


# Files


def load(path: Path, reading: Reading | None = None) -> Any:
    """Read the file as a pyarrow table; any error becomes a DataError."""
    reading, suffix = reading or Reading(), path.suffix.lower()
    try:
        if suffix == ".parquet":
            return _load_parquet(path)
        text = _decoded(path, reading.encoding)
        table = _load_csv(text, path, reading) if suffix in (".csv", ".tsv") else _load_json(text, path)
        table.validate(full=True)
        return table
    except (DataError, MemoryError):
        raise
    except Exception as error:  # Arrow's errors, and OSErrors and ValueErrors from within it
        raise DataError(f"{path} cannot be read ({first_line(error)}): correct it, or save it as Parquet.") from error


def _decoded(path: Path, encoding: str | None) -> str:
    """The whole file; bytes that are not text raise an error with their line and the likely encoding."""
    content = path.read_bytes()
    if kind := next((kind for start, kind in _NO_TEXT.items() if content.startswith(start)), None):
        raise DataError(f"{path} is {kind} and no text: unpack it, or export the table as CSV or Parquet.")
    try:
        return content.decode(encoding or "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        likely = "utf-16" if content.startswith((b"\xff\xfe", b"\xfe\xff")) else "cp1252"  # cp1252 has all of latin-1
        raise DataError(
            f"byte 0x{content[error.start]:02x} in line {line} of {path} is not {encoding or 'UTF-8'}: read it "
            f"with encoding={likely!r}, if that is its encoding."
        ) from error


def _load_csv(text: str, path: Path, reading: Reading) -> Any:
    pyarrow, pyarrow_csv = cells.pyarrow(), need("pyarrow.csv", to="reading CSV")
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    header = next(filter(None, csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)), [])
    other = next((mark for mark in _SEPARATORS if len(header) == 1 and mark in header[0]), None)
    if other is not None:
        raise DataError(
            f"the columns of {path} are separated by {_SEPARATORS[other]} instead of {_SEPARATORS[delimiter]}: save it "
            f"again, such as by pandas.read_csv({path.name!r}, sep={other!r}).to_csv('new.csv', index=False), with "
            "decimal=',' where numbers have decimal commas."
        )
    if '"' in text:
        _check_quotes(text, delimiter, path)
    table = pyarrow_csv.read_csv(
        pyarrow.BufferReader(text.encode()),
        read_options=pyarrow_csv.ReadOptions(block_size=_BLOCK),
        parse_options=pyarrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pyarrow_csv.ConvertOptions(column_types=dict.fromkeys(header, pyarrow.string())),
    )
    label = reading.label_column or usual(table.column_names, ROLES["label"])
    for column in (label, reading.truth_column, reading.before_column):
        if column is not None and table.column_names.count(column) == 1:
            labels = labels_of_words(table[column].to_pylist())
            table = table.set_column(table.column_names.index(column), column, pyarrow.array(labels))
    return table


def _check_quotes(text: str, delimiter: str, path: Path) -> None:
    """Refuse what RFC 4180 does not allow: pyarrow reads all rows after a quote that is not closed as one field."""
    reader, line = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), 0
    limit = csv.field_size_limit(sys.maxsize)
    try:
        for _ in reader:
            line = reader.line_num
    except csv.Error as error:
        raise DataError(
            f"the row in line {line + 1} of {path} has a stray quote or a field that does not end ({error}): close the "
            'quote, write it twice inside a quoted field (""), or save the table as Parquet.'
        ) from error
    finally:
        csv.field_size_limit(limit)


def _load_json(text: str, path: Path) -> Any:
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        try:
            row = json.loads(line) if line.strip() else {}
        except (ValueError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is not valid JSON ({first_line(error)}): correct it.") from error
        if not isinstance(row, dict):
            raise DataError(f"line {number} of {path} is not an object: write one object with the same keys per line.")
        rows += [row] if line.strip() else []
    names = dict.fromkeys(name for row in rows for name in row)
    return column_table({name: [row.get(name) for row in rows] for name in names})


def _load_parquet(path: Path) -> Any:
    parquet = need("pyarrow.parquet", to="reading Parquet")
    with parquet.ParquetFile(str(path)) as file:
        # A few bytes of run lengths can encode billions of rows: check the size before reading.
        check_size(8 * file.metadata.num_rows * max(1, file.metadata.num_columns), what=str(path))
        table = file.read()
    table.validate(full=True)
    return table


# Data frames


def is_frame(data: Any) -> bool:
    return hasattr(data, "columns") and (hasattr(data, "to_numpy") or hasattr(data, "__arrow_c_stream__"))


def frame_table(data: Any) -> Any:
    """A data frame as a pyarrow table that keeps names and kinds; the index of pandas is left out."""
    if hasattr(data, "to_arrow"):  # polars
        return data.to_arrow()
    if not hasattr(data, "iloc"):  # a pyarrow table
        return need("pyarrow", to="reading a data frame").table(data)
    return column_table({str(name): data.iloc[:, at] for at, name in enumerate(data.columns)})


def column_table(columns: Mapping[str, Sequence[Any]]) -> Any:
    """A pyarrow table of named columns; values of several types become text."""
    pyarrow = need("pyarrow", to="reading a table")
    return pyarrow.table({name: _array(pyarrow, values) for name, values in columns.items()})


def _array(pyarrow: Any, values: Any) -> Any:
    try:
        return pyarrow.array(values, from_pandas=True)
    except (pyarrow.ArrowException, OverflowError):  # several types, or whole numbers of more than 64 bits
        return pyarrow.array([None if v is None or v != v else str(v) for v in values], pyarrow.string())


# Hugging Face data sets, recognised by their attributes, so that the library need not be imported


def is_huggingface(data: Any) -> bool:
    """One with a transform of its own, which may be random, is read item by item as any other Dataset."""
    if not all(hasattr(data, name) for name in ("column_names", "features", "__getitem__")):
        return False
    return dict(getattr(data, "format", {})).get("type") != "custom"


def from_huggingface(data: Any, *, name: str, reading: Reading) -> Raw:
    """An Image column or features, and a label column; a ClassLabel keeps its class order."""
    if isinstance(data.column_names, dict):
        raise UsageError(f"the {name} is a Hugging Face DatasetDict: choose a split, as in data[{next(iter(data))!r}].")
    data = data.with_format(None) if hasattr(data, "with_format") else data
    kinds = {column: type(feature).__name__ for column, feature in data.features.items()}
    image = reading.path_column or next((column for column, kind in kinds.items() if kind == "Image"), None)
    if image is not None and kinds.get(image) != "Image":
        raise DataError(f"column {image!r} of the {name} is not an Image feature: cast it with cast_column first.")
    label = reading.label_column or next((column for column, kind in kinds.items() if kind == "ClassLabel"), None)
    columns = {column: list(data[column]) for column in kinds if column != image}
    classes = None
    if label is not None and kinds.get(label) == "ClassLabel":
        classes = tuple(data.features[label].names)
        columns[label] = [None if index is None or index < 0 else classes[index] for index in columns[label]]
    reading = replace(reading, label_column=label, path_column=None)
    images = None if image is None else data[image]  # each decoded on access
    raw = from_table(column_table(columns), name=name, reading=reading, folder=None, what=f"the {name}", images=images)
    return replace(raw, classes=classes)


# Columns


def usual(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """The column that has the first of these names, ignoring case."""
    lower = {column.lower(): column for column in reversed(columns)}
    return next((lower[name.lower()] for name in names if name.lower() in lower), None)


def roles_of(table: Any, reading: Reading, *, what: str, name: str = "source") -> dict[str, str]:
    """The columns with a role, by role: as given, else by their usual names; the others are features.

    name: of the set, which may lack some of the given columns
    """
    roles, columns = {}, table.column_names
    for role, names in ROLES.items():
        named = getattr(reading, f"{role}_column")
        column = named if named in columns else None
        if named is None:
            column = _by_name(columns, role, names, what)
        elif column is None and role not in MAY_LACK.get(name, ROLES):
            hint = did_you_mean(named, columns) or f": choose from {some(columns)}"
            raise UsageError(f"{what} has no column {named!r} for {role}_column{hint}.")
        if column is not None:
            roles[role] = column
    if "path" in roles and reading.path_column is None and not _has_words(table[roles["path"]]):
        del roles["path"]
    if len(set(roles.values())) < len(roles):
        raise UsageError(f"{what}: one column is named for two roles among {some([*roles.values()])}: name another.")
    return roles


def _by_name(columns: Sequence[str], role: str, names: Sequence[str], what: str) -> str | None:
    column = usual(columns, names)
    alike = [other for other in columns if column is not None and other.lower() == column.lower()]
    if len(alike) > 1:
        example = f"{role}_column={column!r}"
        raise UsageError(f"{what} has the columns {some(alike)}: name the one to use, such as {example}.")
    return column


def _has_words(column: Any) -> bool:
    return cells.form_of(column) in ("text", "category") and bool(cells.numbers(column).is_word.any())


# Data sets


def from_table(
    table: Any,
    *,
    name: str,
    reading: Reading,
    folder: Path | None,
    what: str,
    images: Sequence[Any] | None = None,
    labelled: bool = True,
) -> Raw:
    """A pyarrow table as a data set; relative paths start from ``folder``.

    images: one for every row, in place of features
    labelled: else inputs alone, whose ids are their rows and whose labels are all 0
    """
    if table.num_rows == 0:
        raise DataError(f"{what} has no rows: give the {name} at least one example.")
    if len(set(table.column_names)) != len(table.column_names):
        raise DataError(f"{what} has two columns of one name: rename one of {some(table.column_names)}.")
    roles = roles_of(table, reading, what=what, name=name)
    values = {role: table[column].to_pylist() for role, column in roles.items()}
    raw = Raw(name, torch.zeros(table.num_rows, dtype=torch.int64), images=images)
    if labelled:
        if "label" not in roles:
            raise DataError(
                f"{what} has no label column among {some(table.column_names)}: "
                "type reading=Reading(label_column=...), or --label-column."
            )
        raw = replace(
            raw,
            labels=labels_from(values["label"], name=name, numeric=reading.numeric_labels),
            ids=_ids(values["id"], f"column {roles['id']!r} of {what}") if "id" in roles else None,
            truth=names_of(values["truth"]) if "truth" in roles else None,
            before=names_of(values["before"]) if "before" in roles and name == "target" else None,
            groups=_groups(cells.words(table[roles["group"]]).to_pylist()) if "group" in roles else None,
        )
    if images is not None:
        return raw
    if "path" in roles:
        return _with_images(raw, values["path"], reading, folder)
    features = table.drop_columns([*roles.values()])
    if not features.num_columns:
        raise DataError(f"{what} has a label but no features: add feature columns, or name the path_column.")
    return replace(raw, table=features)


def _ids(values: Sequence[Any], where: str) -> tuple[str, ...]:
    for row, value in enumerate(values):
        if value is None or value == "":
            raise DataError(f"row {row} has no id in {where}: give every row one.")
    return tuple(text_of(value, where=f"row {row}, {where}") for row, value in enumerate(values))


def _groups(names: Sequence[str | None]) -> torch.Tensor:
    """A number for each name, the same in every table; -1 without a name."""
    digests = (None if name is None else hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names)
    return torch.tensor([-1 if digest is None else int.from_bytes(digest) >> 1 for digest in digests])


def _with_images(raw: Raw, paths: Sequence[Any], reading: Reading, folder: Path | None) -> Raw:
    root = Path(reading.root).expanduser() if reading.root is not None else folder or Path()
    missing = {row: None for row, path in enumerate(paths) if not path or "\0" in str(path)}
    relative = ["." if row in missing else str(path) for row, path in enumerate(paths)]
    left = [] if reading.allow_outside else outside(root, relative)
    fix = "type reading=Reading(allow_outside=True), or root=..."
    problems = [
        *_rows(raw, "missing", list(missing), "without a path: give every row one, or leave it out"),
        *_rows(raw, "outside", left, f"with a path outside {root}: {fix}"),
    ]
    unread = {*missing, *left}  # an empty name is never opened
    files = tuple("" if row in unread else os.path.join(root, path) for row, path in enumerate(relative))
    return replace(raw, images=files, paths=files, problems=tuple(problems))


def _rows(raw: Raw, kind: str, rows: list[int], what: str) -> Iterator[Problem]:
    if rows:
        ids = tuple(raw.id_of(row) for row in rows)
        yield Problem(raw.name, kind, f"{counted(len(ids), 'row')} {what} ({some(ids)}).", ids)
