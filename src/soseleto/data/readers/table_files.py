"""CSV, TSV, Parquet and JSON-lines files as pyarrow tables; labels, ids and correct labels of text files stay text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.data.readers import csv_text
from soseleto.data.readers.labels import names_of
from soseleto.data.readers.large_tables import copied_csv, copied_parquet, is_large_text
from soseleto.data.readers.problems import some
from soseleto.data.readers.reading import Reading
from soseleto.data.storage import check_size, is_large
from soseleto.errors import DataError, need

SUFFIXES = (".csv", ".tsv", ".parquet", ".jsonl", ".ndjson")
LABELS = ("label", "class", "target", "y", "category")
PATHS = ("path", "file", "filename", "file_name", "filepath", "image", "image_path")
IDS = ("id", "uid", "uuid", "key")


def load(path: Path, name: str, reading: Reading | None = None, *, all_text: bool = False) -> Any:
    """Read the file as a pyarrow table; any error becomes a DataError.

    Text files have labels, ids and correct labels as text, exactly.

    all_text: also all other columns of a text file, but those of image paths
    """
    need("pyarrow", to=f"reading the table {path}")
    try:
        return _parsed(path, reading or Reading(), all_text)
    except DataError:
        raise
    except FileNotFoundError as error:
        raise DataError(f"the {name} table {path} is missing: check the path.") from error
    except Exception as error:  # Arrow's errors, and OSErrors and ValueErrors from within it
        reason = " ".join(str(error).split())[:300]
        raise DataError(f"the {name} table {path} cannot be read ({reason}): fix it or save it again.") from error


def _parsed(path: Path, reading: Reading, all_text: bool) -> Any:
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        return _load_parquet(path, reading)
    if suffix not in (".csv", ".tsv"):
        return _valid(_load_json(path, reading, all_text))
    delimiter = "\t" if suffix == ".tsv" else ","
    if all_text and _is_large(path, reading, delimiter):
        table = copied_csv(path, delimiter, reading, partial(_parse_text, delimiter, reading, True, str(path)))
    else:
        text = csv_text.read_text(path, reading.encoding, delimiter=delimiter)
        table = _parse_text(delimiter, reading, all_text, str(path), text, csv_text.Before())
    return _with_labels(table, reading)


def _is_large(path: Path, reading: Reading, delimiter: str) -> bool:
    """Whether a CSV file of features is read in pieces; a list of images, whose columns are not all text, is not."""
    if not is_large_text(path, reading.encoding) or reading.path_column is not None:
        return False
    with open(path, "rb") as file:
        header = csv_text.header_of(file.read(1 << 20).decode(reading.encoding or "utf-8", "replace"), delimiter)
    return not any(column.lower() in PATHS for column in header)


def parse_csv(text: str, delimiter: str, reading: Reading, *, all_text: bool = False, what: str) -> Any:
    """The text of a CSV file as a table."""
    return _with_labels(_parse_text(delimiter, reading, all_text, what, text, csv_text.Before()), reading)


def _parse_text(delimiter: str, reading: Reading, all_text: bool, what: str, text: str, before: csv_text.Before) -> Any:
    """A text file or a piece of it, which begins with the header; labels are text."""
    csv, pyarrow = (need(module, to="reading CSV") for module in ("pyarrow.csv", "pyarrow"))
    header = csv_text.header_of(text, delimiter)
    _check_separator(header, delimiter, text, what)
    rows = csv_text.check_rows(text, delimiter, what, before)
    exact = _exact_columns(header, reading, all_text)
    convert = csv.ConvertOptions(column_types=dict.fromkeys(exact, pyarrow.string()))
    table = csv.read_csv(
        pyarrow.BufferReader(text.encode()),
        parse_options=csv.ParseOptions(delimiter=delimiter, newlines_in_values=rows is not None),
        convert_options=convert,
    )
    if rows is not None and table.num_rows != rows:
        raise DataError(f"{what} has {rows} rows but {table.num_rows} were read: remove its quotes, or save it again.")
    _check_header_once(table, what, before)
    return _valid(table)


_SEPARATORS = {";": "semicolons", "\t": "tabs", ",": "commas"}


def _check_separator(header: Sequence[str], delimiter: str, text: str, what: str) -> None:
    """Refuse a header of one column whose name is a header by another separator."""
    other = next((one for one in _SEPARATORS if len(header) == 1 and one in header[0]), None)
    if other is None:
        return
    how = f"sep={other!r}" + (", decimal=','" if other == ";" and "," in text[: 1 << 12] else "")
    raise DataError(
        f"the columns of {what} are separated by {_SEPARATORS[other]} instead of {_SEPARATORS[delimiter]}: save it "
        f"again, such as by pandas.read_csv({Path(what).name!r}, {how}).to_csv('new.csv', index=False)."
    )


def _valid(table: Any) -> Any:
    table.validate(full=True)  # text that is not UTF-8, offsets out of range
    str(table.column_names)
    return table


def _check_header_once(table: Any, what: str, before: csv_text.Before) -> None:
    """Refuse a header among the rows, as joined files have: it would make words of every column of numbers."""
    pyarrow, compute = (need(module, to="reading CSV") for module in ("pyarrow", "pyarrow.compute"))
    if table.num_columns < 2 or not all(pyarrow.types.is_string(kind) for kind in table.schema.types):
        return
    rows = pyarrow.array(np.arange(table.num_rows))
    for column, name in zip(table.columns, table.column_names, strict=True):
        rows = rows.filter(compute.equal(column.take(rows), name).combine_chunks())
        if not len(rows):
            return
    found = some([str(before.rows + row) for row in rows.to_pylist()])
    raise DataError(f"row {found} of {what} repeats the header: delete that line.")


def _exact_columns(header: Sequence[str], reading: Reading, all_text: bool) -> list[str]:
    """The columns to read as text."""
    if all_text:
        return [column for column in header if column.lower() not in PATHS]
    label, truth = _label_columns(header, reading)
    identity = reading.id_column or usual(header, IDS)
    return [column for column in (label, truth, identity, reading.path_column) if column in header and column]


def _label_columns(header: Sequence[str], reading: Reading) -> tuple[str | None, str | None]:
    return reading.label_column or usual(header, LABELS), reading.truth_column


def _with_labels(table: Any, reading: Reading) -> Any:
    """The table with its text labels converted: class names, or numbers for a regression."""
    csv, pyarrow = (need(module, to="reading CSV") for module in ("pyarrow.csv", "pyarrow"))
    missing = csv.ConvertOptions().null_values
    for column in _label_columns(table.column_names, reading):
        if column is not None and table.column_names.count(column) == 1:
            found, codes = distinct(table[column])
            labels = pyarrow.array(csv_text.label_values(found, missing)).take(codes)
            table = table.set_column(table.column_names.index(column), column, labels)
    return table


def distinct(column: Any) -> tuple[list[Any], Any]:
    """The different values of a column, and the place of each row's value among them (null for a missing one)."""
    codes = column.dictionary_encode().unify_dictionaries().combine_chunks()
    return codes.dictionary.to_pylist(), codes.indices


def values_of(column: Any) -> list[Any]:
    """As ``to_pylist``, but equal values are one object, so that a row takes the memory of a reference."""
    try:
        found, codes = distinct(column)
    except need("pyarrow", to="reading tables").ArrowNotImplementedError:  # lists and structures
        return list(column.to_pylist())
    return [None if code is None else found[code] for code in codes.to_pylist()]


def _load_json(path: Path, reading: Reading, all_text: bool) -> Any:
    pyarrow, reader = (need(module, to="reading JSON lines") for module in ("pyarrow", "pyarrow.json"))
    text = csv_text.read_text(path, reading.encoding)
    _check_objects(text, path)
    table = reader.read_json(pyarrow.BufferReader(text.encode()))
    for column in _exact_columns(table.column_names, reading, all_text):
        # Arrow rounds integers beyond 64 bits.
        if pyarrow.types.is_floating(table[column].type):
            values = [json.loads(line).get(column) for line in text.split("\n") if line.strip()]
            if len(values) == table.num_rows and any(isinstance(v, int) and abs(v) >= 2**53 for v in values):
                names = pyarrow.array(names_of(values).names, pyarrow.string())
                table = table.set_column(table.column_names.index(column), column, names)
    return table


def _check_objects(text: str, path: Path) -> None:
    """Refuse lines that are not JSON objects: Arrow's reader crashes on some, such as ``null``."""
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            fault = None if isinstance(json.loads(line), dict) else "is not an object"
        except (ValueError, RecursionError) as error:
            fault = f"is not valid JSON ({error})"
        if fault is not None:
            raise DataError(f"line {number} of {path} {fault}: write one object with the same keys per line.")


def _load_parquet(path: Path, reading: Reading) -> Any:
    parquet = need("pyarrow.parquet", to="reading Parquet")
    with parquet.ParquetFile(str(path)) as file:
        # A few bytes of run lengths can encode billions of rows: check the size before reading.
        size = 8 * file.metadata.num_rows * max(1, file.metadata.num_columns)
        check_size(size, what=str(path))
        if is_large(max(size, _content(file.metadata))):
            return copied_parquet(file, path, reading)
        return _valid(file.read())


def _content(metadata: Any) -> int:
    """Bytes of a Parquet file before compression."""
    return sum(metadata.row_group(at).total_byte_size for at in range(metadata.num_row_groups))


def usual(columns: Sequence[str], names: tuple[str, ...]) -> str | None:
    """The column that has the first of these names, ignoring case."""
    lower = {column.lower(): column for column in reversed(columns)}
    return next((lower[name] for name in names if name in lower), None)
