"""A CSV file in pieces of whole rows, for files that do not fit in memory."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from soseleto.data.readers.csv_text import Before, decoded

SIZE = 1 << 23  # bytes of a piece


class Piece(NamedTuple):
    text: str  # the header and some rows
    before: Before


def can_be_cut(encoding: str | None) -> bool:
    """Whether line ends are single bytes in this encoding, so that a file can be cut at them."""
    return '\n"'.encode(encoding or "utf-8") == b'\n"'


def csv_pieces(path: Path, encoding: str | None, delimiter: str) -> Iterator[Piece]:
    """The rows of the file, each once and in order; every piece begins with the file's header."""
    header, rest, tail = "", "", b""
    before = Before()
    given = False
    with open(path, "rb") as file:
        while True:
            content = file.read(SIZE)
            at_end = not content
            content = tail + content
            cut = len(content) if at_end else content.rfind(b"\n") + 1
            tail = content[cut:]
            above = Before(before.rows, before.lines + rest.count("\n"), before.header)
            text = rest + decoded(content[:cut], path, encoding, delimiter=delimiter, before=above)
            if not header:
                end = len(text) if at_end else _end_of_rows(text, delimiter, first=True)
                header, text = text[:end], text[end:]
                if not header and not at_end:
                    rest = text
                    continue
                before = Before(header=header.rstrip("\r\n").encode())
            end = len(text) if at_end else _end_of_rows(text, delimiter)
            text, rest = text[:end], text[end:]
            if text or (at_end and not given):  # a file without rows is its header
                yield Piece(header + text, before)
                given = True
                before = Before(before.rows + _count(text, delimiter), before.lines + text.count("\n"), before.header)
            if at_end:
                return


def _end_of_rows(text: str, delimiter: str, *, first: bool = False) -> int:
    """Characters up to the end of the last whole row, or of the first one; ``text`` ends at the end of a line."""
    if '"' not in text and not first:
        return len(text)
    read = whole = 0

    def lines() -> Iterator[str]:
        nonlocal read
        for line in io.StringIO(text, newline=""):
            read += len(line)
            yield line

    try:
        for row in csv.reader(lines(), delimiter=delimiter, strict=True):
            whole = read
            if first and row:
                return whole
    except csv.Error as error:  # the piece ends inside a quoted field, or has a stray quote, which check_rows finds
        return whole if "unexpected end" in str(error) else len(text)
    return 0 if first else whole


def _count(text: str, delimiter: str) -> int:
    """The number of rows."""
    with io.StringIO(text, newline="") as lines:
        rows = csv.reader(lines, delimiter=delimiter) if '"' in text else (line.strip("\r\n") for line in lines)
        return sum(1 for row in rows if row)
