"""Files drawn from the readers' own grammar, whole and damaged.

Every outcome is a set with the rows, labels and values that were written, or one sentence: no other exception, no row
lost or changed, bounded time and memory. 4 files for each test and format; 200 with SOSELETO_LONG_CAMPAIGN=1.
"""

from __future__ import annotations

import csv
import io
import json
import os
import resource
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soseleto.data import Examples, ProblemsError, Reading, as_examples, check_pair
from soseleto.data.prepare import prepare
from soseleto.data.tables import from_table, load
from soseleto.errors import DataError, SoseletoError

EXAMPLES = 200 if "SOSELETO_LONG_CAMPAIGN" in os.environ else 4
SECONDS, BYTES = 20.0, 1 << 28
campaign = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


@dataclass(frozen=True)
class Table:
    """What a file should say."""

    ids: list[str]
    labels: list[str]
    values: list[list[float]]  # one list per row

    @property
    def columns(self) -> list[str]:
        return [f"x{at}" for at in range(len(self.values[0]))]

    @property
    def rows(self) -> list[list[Any]]:
        return [[name, *row, label] for name, row, label in zip(self.ids, self.values, self.labels, strict=True)]


# The grammar


def _number(name: str) -> bool:
    """Labels such as 1.5 make a regression, and 1.0 is the integer 1 if all labels end in .0."""
    try:
        float(name)
    except ValueError:
        return False
    return True


_MISSING = {"", "nan", "null", "na", "n/a", "none", "-nan", "nil", "#n/a", "#na", "<na>", "?", "-", "--", "."}
NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=12)
PLAIN = NAMES.filter(lambda name: name.strip() == name and name.lower() not in _MISSING and not _number(name))
INTEGERS = st.integers(-(10**30), 10**30).map(str)
SPELLINGS = st.sampled_from(["007", "7", "+7", "cat", "Cat ", "café", "cafe\u0301", "a,b", 'say "no"', "x\ty", "=1+1"])
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    rows = draw(st.integers(1, 12))
    labels = draw(st.lists(draw(st.sampled_from([PLAIN, INTEGERS, SPELLINGS])), min_size=rows, max_size=rows))
    ids = draw(st.lists(PLAIN, min_size=rows, max_size=rows, unique=True))
    width = draw(st.integers(1, 20))
    values = draw(st.lists(st.lists(FLOATS, min_size=width, max_size=width), min_size=rows, max_size=rows))
    return Table(ids, labels, values)


def as_csv(table: Table, delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, lineterminator="\n").writerows([["id", *table.columns, "label"], *table.rows])
    return text.getvalue().encode()


def as_json_lines(table: Table) -> bytes:
    names = ["id", *table.columns, "label"]
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in table.rows).encode()


def as_parquet(table: Table) -> bytes:
    columns = {name: [row[at] for row in table.values] for at, name in enumerate(table.columns)}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": table.ids, **columns, "label": table.labels}), file)
    return file.getvalue()


def as_npz(table: Table) -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.float32(table.values), y=np.array(table.labels), id=np.array(table.ids))
    return file.getvalue()


FORMATS: dict[str, Callable[[Table], bytes]] = {
    ".csv": as_csv,
    ".tsv": lambda table: as_csv(table, "\t"),
    ".jsonl": as_json_lines,
    ".parquet": as_parquet,
    ".npz": as_npz,
}


# Reading


def highest_memory() -> int:
    """Of this process so far. (tracemalloc does not count Arrow's memory, and crashes when its threads free memory.)"""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def as_numbers(path: Path, table: Table) -> Reading:
    """Every column as numbers: else a constant one is left out, and a word in a short one makes it one of words."""
    return Reading() if path.suffix == ".npz" else Reading(numeric_columns=table.columns)


def read(path: Path, reading: Reading | None = None) -> Examples | str:
    """The examples, or the sentence of the refusal; anything else fails."""
    begin, before, is_list = time.monotonic(), highest_memory(), False
    try:
        outcome: Examples | str = as_examples(path, name="source", reading=reading)
    except SoseletoError as error:
        outcome, is_list = str(error), isinstance(error, ProblemsError)
    assert is_list or not isinstance(outcome, str) or "\n" not in outcome, outcome  # problems have one line each
    assert highest_memory() - before < BYTES
    assert time.monotonic() - begin < SECONDS
    if isinstance(outcome, Examples) and outcome.inputs.is_floating_point() and not outcome.inputs.isfinite().all():
        (problem,) = [one for one in check_pair(path, path, mode="transfer", reading=reading) if one.kind == "nan"][:1]
        return str(problem)  # it stops a training
    return outcome


def contents(examples: Examples, path: Path, reading: Reading) -> dict[str, tuple[str, list[float]]]:
    """Label and values by id; missing values are NaN."""
    assert examples.classes is not None
    values = examples.inputs
    if path.suffix != ".npz":
        raw = from_table(load(path, reading), name="source", reading=reading, folder=None, what="the table")
        _, preparation = prepare([raw], reading)
        assert preparation is not None
        values = np.stack(list(preparation.values_of(examples.inputs).values()), axis=1)
    rows = zip(examples.labels.tolist(), values.tolist(), strict=True)
    names = map(examples.id_of, range(len(examples)))
    return {name: (examples.classes[label], row) for name, (label, row) in zip(names, rows, strict=True)}


def expected(table: Table) -> dict[str, tuple[str, list[float]]]:
    values = np.float32(table.values).tolist()
    return dict(zip(table.ids, zip(table.labels, values, strict=True), strict=True))


@pytest.mark.parametrize("suffix", FORMATS)
@campaign
@given(table=tables())
def test_whole_files_come_back_exactly(suffix: str, table: Table, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    path.write_bytes(FORMATS[suffix](table))
    outcome = read(path, as_numbers(path, table))
    assert not isinstance(outcome, str), outcome
    assert contents(outcome, path, as_numbers(path, table)) == expected(table)


# Damage to text


def bom(content: bytes, draw: Any) -> bytes:
    return b"\xef\xbb\xbf" + content


def line_ends(content: bytes, draw: Any) -> bytes:
    return content.replace(b"\n", b"\r\n")


def empty_lines(content: bytes, draw: Any) -> bytes:
    return content + b"\n" * draw(st.integers(1, 5))


HARMLESS = {one.__name__: one for one in (bom, line_ends, empty_lines)}


def cut(content: bytes, draw: Any) -> bytes:
    return content[: draw(st.integers(0, len(content)))]


def doubled_header(content: bytes, draw: Any) -> bytes:
    return content.split(b"\n", 1)[0] + b"\n" + content


def ragged(content: bytes, draw: Any) -> bytes:
    """One row has a field more or less."""
    lines = content.rstrip(b"\n").split(b"\n")
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = lines[at] + b",9" if draw(st.booleans()) else lines[at].rpartition(b",")[0]
    return b"\n".join(lines) + b"\n"


def inserted(content: bytes, draw: Any) -> bytes:
    """Zeros, bytes that are not UTF-8, or a huge field; not in the header, since other names make another table."""
    at = draw(st.integers(content.find(b"\n") + 1, len(content)))
    some = draw(st.sampled_from([bytes(3), b"\xff", b"\xc3", b"\xed\xa0\x80", b"7" * 500, b"7" * 200_000]))
    return content[:at] + some + content[at:]


def stray_quote(content: bytes, draw: Any) -> bytes:
    at = draw(st.integers(0, len(content)))
    return content[:at] + b'"' + content[at:]


def empty(content: bytes, draw: Any) -> bytes:
    return draw(st.sampled_from([b"", b"\n", b"\xef\xbb\xbf", b" ", content.split(b"\n", 1)[0]]))


def non_finite(content: bytes, draw: Any) -> bytes:
    """A number becomes NaN, an infinity, or something missing."""
    at = content.find(b".")
    word = draw(st.sampled_from([b"nan", b"inf", b"-inf", b"NaN", b"1e999", b"", b"Infinity", b"null"]))
    start = max(content.rfind(b",", 0, at), content.rfind(b" ", 0, at)) + 1
    return content[:start] + word + content[at + 2 :] if at > 0 else content + word


def any_text(content: bytes, draw: Any) -> bytes:
    return draw(st.text(alphabet=st.sampled_from('ab1.-,;\t"\n\r\\ é€\0naNilbe{}:'), max_size=200)).encode()


LOSING = (cut, empty, any_text, stray_quote)  # RFC 4180 lets a quote begin a field of several lines
DAMAGE = {one.__name__: one for one in (doubled_header, ragged, inserted, non_finite, *LOSING)}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
@campaign
@given(table=tables(), how=st.sampled_from(sorted(HARMLESS)), data=st.data())
def test_other_line_ends_and_marks_change_nothing(
    suffix: str, table: Table, how: str, data: st.DataObject, tmp_path: Path
) -> None:
    path = tmp_path / f"t{suffix}"
    path.write_bytes(HARMLESS[how](FORMATS[suffix](table), data.draw))
    outcome = read(path, as_numbers(path, table))
    assert not isinstance(outcome, str), outcome
    assert contents(outcome, path, as_numbers(path, table)) == expected(table)


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
@campaign
@given(table=tables(), how=st.sampled_from(sorted(DAMAGE)), data=st.data())
def test_damaged_text_is_refused_or_keeps_the_other_rows(
    suffix: str, table: Table, how: str, data: st.DataObject, tmp_path: Path
) -> None:
    """At most the damaged row, and those behind a cut, may differ."""
    path = tmp_path / f"t{suffix}"
    path.write_bytes(DAMAGE[how](FORMATS[suffix](table), data.draw))
    read(path)  # also with the kinds of columns that the damage suggests
    reading = as_numbers(path, table)
    outcome = read(path, reading)
    if isinstance(outcome, str) or how == "any_text":
        return
    got, want = contents(outcome, path, reading), expected(table)
    same = [name for name in got if name in want and got[name] == want[name]]
    assert len(got) - len(same) <= 1, (how, got, want)
    assert DAMAGE[how] in LOSING or len(same) >= len(want) - 1


# Damage to binary files


def flipped(content: bytes, draw: Any) -> bytes:
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        changed[draw(st.integers(0, len(changed) - 1))] ^= draw(st.integers(1, 255))
    return bytes(changed)


def replaced(content: bytes, draw: Any) -> bytes:
    known = [b"", b"PK\x03\x04", b"PAR1", b"PAR1" * 3, b"\x93NUMPY", bytes(100), b"id,label\n1,2\n"]
    return draw(st.sampled_from(known) | st.binary(max_size=400))


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
@campaign
@given(table=tables(), how=st.sampled_from([cut, flipped, replaced]), data=st.data())
def test_damaged_binary_files_are_refused_or_equal_in_shape(
    suffix: str, table: Table, how: Any, data: st.DataObject, tmp_path: Path
) -> None:
    """A zip archive has checksums; a Parquet page has none unless it was asked for, so values may differ there."""
    path = tmp_path / f"t{suffix}"
    path.write_bytes(how(FORMATS[suffix](table), data.draw))
    outcome = read(path, as_numbers(path, table))
    if isinstance(outcome, str):
        return
    if how is flipped and suffix == ".parquet":
        assert len(outcome) <= len(table.ids)
    else:
        assert contents(outcome, path, as_numbers(path, table)) == expected(table)


@dataclass(frozen=True)
class Opens:
    """A pickle that makes a file when it is loaded."""

    trace: Path

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


X, Y = np.float32([[1, 2], [3, 4]]), np.array(["x", "y"])
WRONG_NPZ: dict[str, dict[str, Any]] = {
    "other lengths": {"x": X, "y": np.array(["x", "y", "z"])},
    "other kinds": {"x": Y, "y": Y},
    "complex values": {"x": X.astype(np.complex64), "y": Y},
    "no labels": {"x": X},
    "no rows": {"x": X[:0], "y": Y[:0]},
    "scalars": {"x": np.float32(1), "y": np.int64(1)},
    "repeated ids": {"x": X, "y": Y, "id": np.array(["same", "same"])},
    "objects": {"x": X, "y": np.array([Opens(Path("loaded"))] * 2, dtype=object)},
}


@pytest.mark.parametrize("kind", WRONG_NPZ)
def test_npz_files_of_a_wrong_kind_are_refused(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "t.npz", **WRONG_NPZ[kind])
    assert isinstance(read(tmp_path / "t.npz"), str)
    assert not (tmp_path / "loaded").exists()


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f8', 'fortran_order': False, 'shape': (1099511627776,), }\n",  # 8 TiB
        "{'descr': '<i8', 'shape\xff\x7f2,), }",  # NumPy tokenises it without finding its end
        "{'descr': " + "(" * 9000,  # nested deeper than Python parses
        "{'descr': '<i8'}",
    ],
)
def test_a_wrong_array_header_is_refused_in_one_sentence(tmp_path: Path, header: str) -> None:
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin1")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", member)
        archive.writestr("y.npy", member)
    with pytest.raises(DataError, match=r"a\.npz cannot be read"):
        as_examples(tmp_path / "a.npz", name="source")


# Labels and ids that cannot be used


@campaign
@given(table=tables(), data=st.data(), suffix=st.sampled_from(sorted(FORMATS)))
def test_repeated_ids_and_missing_labels_are_refused(
    table: Table, data: st.DataObject, suffix: str, tmp_path: Path
) -> None:
    at = data.draw(st.integers(0, len(table.ids) - 1))
    labels = [*table.labels]
    labels[at] = data.draw(st.sampled_from(["", " ", "\u00a0"]))
    path = tmp_path / f"t{suffix}"
    path.write_bytes(FORMATS[suffix](Table(table.ids, labels, table.values)))
    said = read(path, as_numbers(path, table))
    assert isinstance(said, str)
    assert "no label" in said or "can be used" in said
    twice = Table([*table.ids, table.ids[at]], [*table.labels, "z"], [*table.values, table.values[0]])
    path.write_bytes(FORMATS[suffix](twice))
    said = read(path, as_numbers(path, table))
    assert isinstance(said, str)
    assert "is used for two examples" in said
