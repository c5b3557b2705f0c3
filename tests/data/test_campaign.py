"""Small table files of every format, whole and damaged at every few bytes.

Every outcome is a set with the rows, labels and values that were written, or one sentence: no other exception, no row
lost or changed, bounded memory. Damage that no reader can notice (a cut between two rows) may lose the rows behind it,
and no others.
"""

from __future__ import annotations

import csv
import io
import json
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from soseleto.data import Examples, Reading, as_examples, check_pair
from soseleto.data.preparation import prepare
from soseleto.data.reading import ProblemsError
from soseleto.data.tables import from_table, load
from soseleto.errors import SoseletoError

BYTES = 1 << 28
POSITIONS = 40  # at which each damage is done
IDS = ["p", "007", "7", "é,\u3042", 'q "r"']
LABELS = {
    "blanks": ["b", "b ", " b", "B", "7.0"],
    "spellings": ["007", "7", "+7", "cat", "Cat "],
    "unicode": ["café", "cafe\u0301", "a,b", 'say "no"', "=1+1"],
    "integers": ["9007199254740992", "9007199254740993", "-5", "18446744073709551617", "0"],
}
VALUES = [[0.5, -1.25], [3.0, 2.0**100], [-(2.0**-20), 7.0], [1e-30, 0.1], [12345.678, -0.0]]
COLUMNS = ["x0", "x1"]
READING = Reading(numeric_columns=COLUMNS)


def rows(labels: list[str], ids: list[str] = IDS) -> list[list[Any]]:
    return [[name, *values, label] for name, values, label in zip(ids, VALUES, labels, strict=True)]


def as_csv(labels: list[str], ids: list[str] = IDS, delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows(
        [["id", *COLUMNS, "label"], *rows(labels, ids)]
    )
    return text.getvalue().encode()


def as_json_lines(labels: list[str], ids: list[str] = IDS) -> bytes:
    names = ["id", *COLUMNS, "label"]
    lines = (json.dumps(dict(zip(names, row, strict=True)), ensure_ascii=False) + "\n" for row in rows(labels, ids))
    return "".join(lines).encode()


def as_parquet(labels: list[str], ids: list[str] = IDS) -> bytes:
    columns = {name: [row[at] for row in VALUES] for at, name in enumerate(COLUMNS)}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": ids, **columns, "label": labels}), file)
    return file.getvalue()


def as_npz(labels: list[str], ids: list[str] = IDS) -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.float32(VALUES), y=np.array(labels), id=np.array(ids))
    return file.getvalue()


FORMATS: dict[str, Callable[..., bytes]] = {
    ".csv": as_csv,
    ".tsv": lambda labels, ids=IDS: as_csv(labels, ids, "\t"),
    ".jsonl": as_json_lines,
    ".parquet": as_parquet,
    ".npz": as_npz,
}


def read(path: Path, reading: Reading | None) -> Examples | str:
    """The examples, or the sentence of the refusal; anything else fails."""
    before, listed = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, False
    try:
        found: Examples | str = as_examples(path, name="source", reading=reading)
    except SoseletoError as error:
        found, listed = str(error), isinstance(error, ProblemsError)  # a list of problems has one line each
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < BYTES
    if isinstance(found, str):
        assert len(found) < 5000
        assert listed or "\n" not in found
    elif found.inputs.is_floating_point() and not found.inputs.isfinite().all():
        (problem,) = [one for one in check_pair(path, path, mode="transfer", reading=reading) if one.kind == "nan"][:1]
        return str(problem)  # it stops a training
    return found


def contents(found: Examples, path: Path) -> dict[str, tuple[str, list[float]]]:
    """Label and values by id; missing values are NaN."""
    values = found.inputs
    if path.suffix != ".npz":
        table = load(path, READING)
        raw = from_table(table, name="source", reading=READING, folder=None, what="the table")
        _, preparation = prepare([raw], READING)
        by_name = preparation.values_of(found.inputs)
        values = np.stack([by_name[name] for name in COLUMNS], axis=1)  # a key of another spelling is one column more
    read = zip(found.labels.tolist(), values.tolist(), strict=True)
    return {found.id_of(row): (found.classes[label], its) for row, (label, its) in enumerate(read)}


def reading_of(suffix: str) -> Reading | None:
    """Every column as numbers: else a constant one is left out, and a word in a short one makes it one of words."""
    return None if suffix == ".npz" else READING


@pytest.mark.parametrize("suffix", FORMATS)
@pytest.mark.parametrize("kind", LABELS)
def test_whole_files_come_back_exactly(suffix: str, kind: str, tmp_path: Path) -> None:
    path, labels = tmp_path / f"t{suffix}", LABELS[kind]
    path.write_bytes(FORMATS[suffix](labels))
    found = read(path, reading_of(suffix))
    assert not isinstance(found, str), found
    assert contents(found, path) == dict(zip(IDS, zip(labels, np.float32(VALUES).tolist(), strict=True), strict=True))


def spread(content: bytes, start: int = 0) -> Iterator[int]:
    yield from sorted({round(at) for at in np.linspace(start, len(content), POSITIONS)})


def inserted(content: bytes, *words: bytes, start: int = 0) -> list[bytes]:
    return [content[:at] + word + content[at:] for word in words for at in spread(content, start)]


def harmless(content: bytes) -> list[bytes]:
    windows = content.replace(b"\n", b"\r\n")
    return [b"\xef\xbb\xbf" + content, windows, windows.replace(b"\r", b"", 2), content + b"\n\n", content[:-1]]


def cut(content: bytes) -> list[bytes]:
    return [content[:at] for at in spread(content)]


def ragged(content: bytes) -> list[bytes]:
    """One row has a field more or less."""
    lines = content.splitlines(keepends=True)
    shorter = [line.rpartition(b",")[0] + b"\n" for line in lines]
    longer = [line[:-1] + b",9\n" for line in lines]
    return [
        b"".join([*lines[:at], row, *lines[at + 1 :]]) for other in (shorter, longer) for at, row in enumerate(other)
    ]


def words_in_text(content: bytes) -> list[bytes]:
    """Bytes that are not UTF-8, and a huge field; behind the first line: no reader can tell that a column's name is
    another."""
    words = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"7" * 500, b"7" * 200_000)
    return inserted(content, *words, start=content.find(b"\n") + 1)


def no_numbers(content: bytes) -> list[bytes]:
    words = (b"nan", b"inf", b"-inf", b"1e999", b"", b"Infinity", b"null", b"large")
    return [content.replace(b"12345.678", word) for word in words]


def flipped(content: bytes) -> list[bytes]:
    """Before the directory of a zip archive: the names there have no checksum."""
    places = spread(content[: content.find(b"PK\x01\x02") - 1])
    return [content[:at] + bytes([content[at] ^ bit]) + content[at + 1 :] for at in places for bit in (1, 255)]


def replaced(content: bytes) -> list[bytes]:
    return [b"", b"PK\x03\x04", b"PAR1", b"PAR1" * 3, b"\x93NUMPY", bytes(100), b"id,label\n1,2\n"]


TEXT = (".csv", ".tsv", ".jsonl")
# The formats, the damage, and which rows may then differ unless the file is refused.
DAMAGE = [
    (TEXT, harmless, "none"),
    (TEXT, ragged, "one"),
    (TEXT, words_in_text, "one"),
    (TEXT, no_numbers, "one"),
    (TEXT, cut, "lost"),
    # a quote at the start of a field may end at another one: RFC 4180 allows a field of several lines
    (TEXT, lambda content: inserted(content, b'"'), "lost"),
    ((".parquet", ".npz"), lambda content: cut(content)[:-1] + replaced(content), "all"),
    ((".npz",), flipped, "none"),
    ((".parquet",), flipped, "values"),  # a page has no checksum unless it was asked for
]


@pytest.mark.parametrize(
    ("suffix", "damage", "differ"), [(suffix, how, differ) for formats, how, differ in DAMAGE for suffix in formats]
)
def test_damaged_files_are_refused_or_keep_the_other_rows(
    suffix: str, damage: Any, differ: str, tmp_path: Path
) -> None:
    path, labels = tmp_path / f"t{suffix}", LABELS["unicode"]
    want = dict(zip(IDS, zip(labels, np.float32(VALUES).tolist(), strict=True), strict=True))
    for content in damage(FORMATS[suffix](labels)):
        path.write_bytes(content)
        read(path, None)  # also with the kinds of columns that the damage suggests
        found = read(path, reading_of(suffix))
        if isinstance(found, str):
            continue
        assert differ != "all", content
        if differ == "values":
            assert len(found) <= len(IDS)
            continue
        got = contents(found, path)
        same = [name for name in got if name in want and got[name] == want[name]]
        assert len(got) - len(same) <= (differ != "none"), (content, got)
        assert differ == "lost" or len(same) >= len(want) - (differ == "one"), (content, got)


@pytest.mark.parametrize("suffix", FORMATS)
def test_repeated_ids_and_missing_labels_are_refused(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    for blank in ("", " ", "\u00a0"):
        path.write_bytes(FORMATS[suffix]([blank, *LABELS["spellings"][1:]]))
        assert "no label" in str(read(path, reading_of(suffix)))
    path.write_bytes(FORMATS[suffix](LABELS["spellings"], [*IDS[:4], IDS[0]]))
    assert "is used for two examples" in str(read(path, reading_of(suffix)))
