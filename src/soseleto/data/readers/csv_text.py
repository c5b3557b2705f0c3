"""The text of CSV, TSV and JSON-lines files: its encoding, and rows that span lines.

Labels, ids and correct labels are read as text, exactly as the file has them ("007" is not "7").

A quoted field may contain line breaks. But a stray quote also makes one field of many rows, so such a field is
accepted only if quotes are used strictly (they open at the start of a field and close at its end) and the lines do not
look like rows of their own: the first line up to the row's last column, or the last line from its first column on,
must lack columns.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soseleto.errors import DataError

_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
_POINT_ZERO = re.compile(r"-?(0|[1-9][0-9]*)\.0")  # how pandas writes integers of a column with missing values
_SAVE = "or save it as UTF-8"


@dataclass(frozen=True)
class Before:
    """The rows and lines of a file that come before a piece of it, without the header, and the header's content."""

    rows: int = 0
    lines: int = 0
    header: bytes = b""


def read_text(path: Path, encoding: str | None, *, delimiter: str | None = None) -> str:
    """The whole file; bytes that are not text raise an error with their place and the likely encoding."""
    return decoded(path.read_bytes(), path, encoding, delimiter=delimiter)


def decoded(
    content: bytes, path: Path, encoding: str | None, *, delimiter: str | None = None, before: Before | None = None
) -> str:
    """The text of a file or of a piece of it."""
    try:
        return content.decode(encoding or "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        place = _place(content, error.start, delimiter, before or Before())
        byte = f"byte 0x{content[error.start]:02x} in {place} of {path}"
        if encoding is not None:
            raise DataError(f"{byte} is not {encoding}: give another encoding, {_SAVE}.") from error
        likely = _likely(content)
        raise DataError(
            f"{byte} is not UTF-8, and the file is probably {likely}: type reading=Reading(encoding={likely!r}), "
            f"or --encoding {likely}, {_SAVE}."
        ) from error


def _likely(content: bytes) -> str:
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "utf-16"
    # Windows uses these codes for quotes, dashes and the euro; in latin-1 they are control characters.
    return "cp1252" if re.search(rb"[\x80-\x9f]", content) and _decodes(content, "cp1252") else "latin-1"


def _decodes(content: bytes, encoding: str) -> bool:
    try:
        content.decode(encoding)
    except UnicodeDecodeError:
        return False
    return True


def _place(content: bytes, at: int, delimiter: str | None, before: Before) -> str:
    """Row and column of a byte, as far as the file can be split without knowing its encoding."""
    above = content[:at].decode("latin-1").splitlines()
    if not content[:at] or content[at - 1 : at] in b"\r\n":
        above.append("")
    line = before.lines + len(above) + bool(before.header)
    if delimiter is None:
        return f"line {line}"
    if line == 1:
        return "the header"
    first = before.header or content[: content.index(b"\n") if b"\n" in content else at]
    header = _fields(first.decode("latin-1"), delimiter)
    column = len(_fields(above[-1], delimiter)) - 1
    name = f"column {header[column]!r}" if 0 <= column < len(header) else f"column {column}"
    return f"row {line - 2} (line {line}), {name}"


def _fields(line: str, delimiter: str) -> list[str]:
    try:
        return next(csv.reader([line.rstrip("\r\n")], delimiter=delimiter), [""]) or [""]
    except csv.Error:
        return line.split(delimiter)


def header_of(text: str, delimiter: str) -> list[str]:
    with io.StringIO(text[: 1 << 22], newline="") as lines:
        return next((row for row in csv.reader(lines, delimiter=delimiter) if row), [])


def check_rows(text: str, delimiter: str, what: str, before: Before | None = None) -> int | None:
    """Refuse rows that a stray quote has merged; the number of rows, or None if there are no quotes to check.

    before: what the file has between its header and this text, which begins with the header
    """
    before = before or Before()
    if '"' not in text:
        return None
    rows, line, width = -1, 0, 0
    with io.StringIO(text, newline="") as lines:
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        try:
            for row in reader:
                width = width or len(row)
                if reader.line_num > line + 1 and (rows < 0 or _merged(row, width, delimiter)):
                    raise csv.Error("the quoted field spans lines that are rows of their own")
                rows, line = rows + bool(row), reader.line_num
        except csv.Error as error:
            where = "the header" if rows < 0 else f"row {before.rows + rows} (line {before.lines + line + 1})"
            raise DataError(
                f"{where} of {what} has a stray quote or a field that does not end ({error}): close the quote, write "
                'it twice inside a quoted field (""), or remove it.'
            ) from error
    return rows


def _merged(row: Sequence[str], width: int, delimiter: str) -> bool:
    """Whether the lines of a multi-line field look like rows of their own."""
    if len(row) != width:
        return True
    for at, value in enumerate(row):
        first, *others = re.split(r"\r\n|\r|\n", value)
        if others and first.count(delimiter) == width - 1 - at and others[-1].count(delimiter) == at:
            return True
    return False


def label_values(values: Sequence[str | None], missing: Sequence[str]) -> list[Any]:
    """Labels of a text file: numbers that are not all integers as float, all others as the exact text.

    In a column of numbers the spellings in ``missing`` mean no label. If all numbers end in ".0", which is how pandas
    writes integers beside missing values, the ending is left out.
    """
    gone = set(missing)
    found = {value for value in values if value is not None}
    numbers = {value for value in found if value.strip() not in gone}
    if not numbers or not all(_NUMBER.fullmatch(value.strip()) for value in numbers):
        return list(values)
    named: dict[str | None, Any] = {value: value for value in numbers}
    if all(_POINT_ZERO.fullmatch(value) for value in numbers):
        named = {value: value.partition(".")[0] for value in numbers}
    elif not all(_is_integer(float(value)) for value in numbers):
        named = {value: float(value) for value in numbers}
    return [named.get(value) for value in values]


def _is_integer(value: float) -> bool:
    return value.is_integer() or value in (float("inf"), float("-inf"))
