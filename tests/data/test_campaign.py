"""Files drawn from the readers' own grammar, whole and damaged.

Every outcome is a set with the rows, labels and values that were written, or one sentence: no other exception, no row
lost or changed, bounded time and memory. 4 files for each test and format; 200 with SOSELETO_LONG_CAMPAIGN=1.

Damage that keeps the meaning of a file (BOM, line ends, empty lines) must be read or refused as a whole. Damage that a
reader cannot notice (a cut between two rows) may lose the rows behind the cut, and no others.
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
from PIL import Image

from soseleto.data import Examples, Reading, as_examples, check_pair
from soseleto.data.preparation import prepare
from soseleto.data.reading import ProblemsError
from soseleto.data.tables import from_table, load
from soseleto.errors import SoseletoError

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


# The grammar

NAMES = st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S", "Zs")), min_size=1, max_size=12)
PLAIN = NAMES.filter(lambda name: name.strip() == name and name.lower() not in _MEANING_NOTHING and not _number(name))
_MEANING_NOTHING = {"", "nan", "null", "na", "n/a", "none", "-nan", "nil", "#n/a", "#na", "1.#ind", "1.#qnan"}
INTEGERS = st.integers(-(10**30), 10**30).map(str)
SPELLINGS = st.sampled_from(["007", "7", "+7", "cat", "Cat ", "café", "cafe\u0301", "a,b", 'say "no"', "x\ty", "=1+1"])
FLOATS = st.floats(-(2.0**100), 2.0**100, width=32)


def _number(name: str) -> bool:
    """Labels such as 1.5 make a regression, and 1.0 is the integer 1 if all labels end in .0."""
    try:
        float(name)
    except ValueError:
        return False
    return True


@st.composite
def tables(draw: st.DrawFn) -> Table:
    rows = draw(st.integers(1, 12))
    kind = draw(st.sampled_from([PLAIN, INTEGERS, SPELLINGS]))
    labels = draw(st.lists(kind, min_size=rows, max_size=rows))
    ids = draw(st.lists(PLAIN, min_size=rows, max_size=rows, unique=True))
    width = draw(st.integers(1, 20))
    values = draw(st.lists(st.lists(FLOATS, min_size=width, max_size=width), min_size=rows, max_size=rows))
    return Table(ids, labels, values)


def as_csv(table: Table, delimiter: str = ",", end: str = "\n") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=end)
    writer.writerow(["id", *table.columns, "label"])
    for row in _rows(table):
        writer.writerow(row)
    return text.getvalue().encode()


def as_json_lines(table: Table) -> bytes:
    names = ["id", *table.columns, "label"]
    return "".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in _rows(table)).encode()


def as_parquet(table: Table) -> bytes:
    columns = {name: [row[at] for row in table.values] for at, name in enumerate(table.columns)}
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"id": table.ids, **columns, "label": table.labels}), file)
    return file.getvalue()


def as_npz(table: Table) -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.float32(table.values), y=np.array(table.labels), id=np.array(table.ids))
    return file.getvalue()


def _rows(table: Table) -> list[list[Any]]:
    return [[name, *row, label] for name, row, label in zip(table.ids, table.values, table.labels, strict=True)]


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
    begin, before = time.monotonic(), highest_memory()
    try:
        found: Examples | str = as_examples(path, name="source", reading=reading)
    except SoseletoError as error:
        found = str(error)
        listed = isinstance(error, ProblemsError)
        assert "\n" not in found or listed, found  # a list of problems has one line each
        assert found[0] != found[0].upper() or not found[0].isalpha() or str(path.parent) in found, found
        assert len(found) < 5000
    assert highest_memory() - before < BYTES
    assert time.monotonic() - begin < SECONDS
    if isinstance(found, Examples) and found.inputs.is_floating_point() and not found.inputs.isfinite().all():
        (problem,) = [one for one in check_pair(path, path, mode="transfer", reading=reading) if one.kind == "nan"][:1]
        return str(problem)  # it stops a training
    return found


def contents(found: Examples, path: Path, reading: Reading) -> dict[str, tuple[str, list[float]]]:
    """Label and values by id; missing values are NaN."""
    assert found.classes is not None
    ids = [found.id_of(row) for row in range(len(found))]
    values = found.inputs
    if path.suffix != ".npz":
        table = load(path, reading)
        raw = from_table(table, name="source", reading=reading, folder=None, what="the table")
        _, preparation = prepare([raw], reading)
        assert preparation is not None
        values = np.stack(list(preparation.values_of(found.inputs).values()), axis=1)
    rows = zip(found.labels.tolist(), values.tolist(), strict=True)
    return dict(zip(ids, [(found.classes[label], values) for label, values in rows], strict=True))


def expected(table: Table) -> dict[str, tuple[str, list[float]]]:
    values = np.float32(table.values).tolist()
    return dict(zip(table.ids, zip(table.labels, values, strict=True), strict=True))


def agrees(found: Examples, table: Table, path: Path) -> bool:
    """Whether the rows that were read are those that were written."""
    return contents(found, path, as_numbers(path, table)) == expected(table)


@pytest.mark.parametrize("suffix", FORMATS)
@campaign
@given(table=tables())
def test_whole_files_come_back_exactly(suffix: str, table: Table, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    path.write_bytes(FORMATS[suffix](table))
    found = read(path, as_numbers(path, table))
    assert not isinstance(found, str), found
    assert agrees(found, table, path)


# Damage to text


def bom(content: bytes, draw: Any) -> bytes:
    return b"\xef\xbb\xbf" + content


def line_ends(content: bytes, draw: Any) -> bytes:
    """Windows line ends, at every line or at some."""
    lines = content.split(b"\n")
    return b"".join(
        line + (draw(st.sampled_from([b"\n", b"\r\n"])) if at else b"\r\n") for at, line in enumerate(lines)
    )


def empty_lines(content: bytes, draw: Any) -> bytes:
    return content + b"\n" * draw(st.integers(1, 5))


HARMLESS = {"bom": bom, "line ends": line_ends, "empty lines": empty_lines, "nothing": lambda content, draw: content}


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
@campaign
@given(table=tables(), how=st.sampled_from(sorted(HARMLESS)), data=st.data())
def test_other_line_ends_and_marks_change_nothing(
    suffix: str, table: Table, how: str, data: st.DataObject, tmp_path: Path
) -> None:
    path = tmp_path / f"t{suffix}"
    path.write_bytes(HARMLESS[how](FORMATS[suffix](table), data.draw))
    found = read(path, as_numbers(path, table))
    assert isinstance(found, str) or agrees(found, table, path)


def cut(content: bytes, draw: Any) -> bytes:
    return content[: draw(st.integers(0, len(content)))]


def ragged(content: bytes, draw: Any) -> bytes:
    """One row has a field more or less."""
    lines = content.rstrip(b"\n").split(b"\n")
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = lines[at] + b",9" if draw(st.booleans()) else lines[at].rpartition(b",")[0]
    return b"\n".join(lines) + b"\n"


def stray_quote(content: bytes, draw: Any) -> bytes:
    at = draw(st.integers(0, len(content)))
    return content[:at] + b'"' + content[at:]


def huge_field(content: bytes, draw: Any) -> bytes:
    """Not in the first line: a column of another name makes another table, and no reader can tell."""
    at = draw(st.integers(content.find(b"\n") + 1, len(content)))
    return content[:at] + b"7" * draw(st.sampled_from([500, 200_000])) + content[at:]


def not_utf8(content: bytes, draw: Any) -> bytes:
    at = draw(st.integers(0, len(content)))
    return content[:at] + draw(st.sampled_from([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x80"])) + content[at:]


def non_finite(content: bytes, draw: Any) -> bytes:
    """A number becomes NaN, an infinity, or something missing."""
    at = content.find(b".")
    word = draw(st.sampled_from([b"nan", b"inf", b"-inf", b"NaN", b"1e999", b"", b"Infinity", b"null"]))
    start = max(content.rfind(b",", 0, at), content.rfind(b" ", 0, at)) + 1
    return content[:start] + word + content[at + 2 :] if at > 0 else content + word


DAMAGE = {one.__name__: one for one in (cut, ragged, stray_quote, huge_field, not_utf8, non_finite)}


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
    found = read(path, reading)
    if isinstance(found, str):
        return
    got, want = contents(found, path, reading), expected(table)
    same = [name for name in got if name in want and got[name] == want[name]]
    assert len(got) - len(same) <= 1, (how, got, want)
    # a quote at the start of a field may end at another one: RFC 4180 allows a field of several lines
    assert how in ("cut", "stray_quote") or len(same) >= len(want) - 1


# Damage to binary files


def flipped(content: bytes, draw: Any) -> bytes:
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        changed[draw(st.integers(0, len(changed) - 1))] ^= draw(st.integers(1, 255))
    return bytes(changed)


def replaced(content: bytes, draw: Any) -> bytes:
    return draw(
        st.sampled_from([b"", b"PK\x03\x04", b"PAR1", b"PAR1" * 3, b"\x93NUMPY", bytes(100), b"id,label\n1,2\n"])
    )


@pytest.mark.parametrize("suffix", [".parquet", ".npz"])
@campaign
@given(table=tables(), how=st.sampled_from([cut, flipped, replaced]), data=st.data())
def test_damaged_binary_files_are_refused_or_equal_in_shape(
    suffix: str, table: Table, how: Any, data: st.DataObject, tmp_path: Path
) -> None:
    """A zip archive has checksums; a Parquet page has none unless it was asked for, so values may differ there."""
    path = tmp_path / f"t{suffix}"
    content = FORMATS[suffix](table)
    path.write_bytes(how(content, data.draw))
    found = read(path, as_numbers(path, table))
    if isinstance(found, str):
        return
    if how is flipped and suffix == ".parquet":
        assert len(found) <= len(table.ids)
    else:
        assert agrees(found, table, path)


@dataclass(frozen=True)
class Opens:
    """A pickle that makes a file when it is loaded."""

    trace: Path

    def __reduce__(self) -> Any:
        return Path.touch, (self.trace,)


def with_objects(path: Path, table: Table) -> None:
    opens = Opens(path.with_suffix(".loaded"))
    np.savez(path, x=np.float32(table.values), y=np.array([opens] * len(table.ids), dtype=object))


def bomb(path: Path, table: Table) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 23, 1)})
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", header.getvalue() + bytes(1 << 25))
        archive.writestr("y.npy", as_npz(table))


def other_lengths(path: Path, table: Table) -> None:
    np.savez(path, x=np.float32(table.values), y=np.array([*table.labels, "more"]))


WRONG_NPZ = (with_objects, bomb, other_lengths)


@pytest.mark.parametrize("make", WRONG_NPZ, ids=lambda make: make.__name__)
def test_npz_files_of_a_wrong_kind_are_refused(make: Any, tmp_path: Path) -> None:
    table = Table(["a", "b"], ["x", "y"], [[1.0, 2.0], [3.0, 4.0]])
    make(tmp_path / "t.npz", table)
    assert isinstance(read(tmp_path / "t.npz"), str)
    assert not (tmp_path / "t.loaded").exists()


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


# Folders and lists of images


@st.composite
def images(draw: st.DrawFn) -> list[tuple[str, str, str, int]]:
    """Class, ending, damage and seed of each image."""
    classes = draw(st.lists(PLAIN.filter(_is_file_name), min_size=1, max_size=3, unique=True))
    how = st.sampled_from(["whole", "whole", "whole", "cut", "wrong ending", "empty", "text", "flipped"])
    one = st.tuples(
        st.sampled_from(classes), st.sampled_from([".png", ".jpg", ".bmp", ".PNG"]), how, st.integers(0, 99)
    )
    return draw(st.lists(one, min_size=1, max_size=8))


def _is_file_name(name: str) -> bool:
    return "/" not in name and not name.startswith(".") and "\\" not in name and len(name.encode()) < 200


def picture(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (9, 7, 3), dtype=np.uint8)


def encoded(ending: str, how: str, seed: int) -> bytes:
    kind = {".png": "PNG", ".jpg": "JPEG", ".bmp": "BMP"}[ending.lower()]
    if how == "wrong ending":
        kind = {"PNG": "BMP", "JPEG": "PNG", "BMP": "PNG"}[kind]
    file = io.BytesIO()
    Image.fromarray(picture(seed)).save(file, kind)
    content = file.getvalue()
    if how == "cut":
        return content[: len(content) * seed // 100]
    if how == "flipped":
        at = len(content) * seed // 100
        return content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :]
    return {"empty": b"", "text": b"not an image"}.get(how, content)


def write_images(folder: Path, drawn: list[tuple[str, str, str, int]]) -> list[str]:
    """The images as files, and a list of them; the damage of each."""
    lines = [["path", "label"]]
    for at, (label, ending, how, seed) in enumerate(drawn):
        file = folder / label / f"{at}{ending}"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(encoded(ending, how, seed))
        lines.append([f"{label}/{at}{ending}", label])
    with open(folder / "list.csv", "w", newline="") as opened:
        csv.writer(opened).writerows(lines)
    return [how for _, _, how, _ in drawn]


@pytest.mark.parametrize("form", ["folder", "list"])
@campaign
@given(drawn=images(), data=st.data())
def test_images_are_read_exactly_or_the_bad_ones_are_named(
    form: str, drawn: list[tuple[str, str, str, int]], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("images")
    damage = write_images(folder, drawn)
    found = read(folder if form == "folder" else folder / "list.csv")
    whole = {"whole", "wrong ending"}
    if isinstance(found, str):
        assert not set(damage) <= whole, found
        return
    assert set(damage) <= {*whole, "flipped", "cut"}, damage  # a BMP has no checksum
    assert found.classes is not None
    names = sorted(f"{label}/{at}{ending}" for at, (label, ending, _, _) in enumerate(drawn))
    given_ids = [found.id_of(row) for row in range(len(found))]
    assert given_ids == (names if form == "folder" else [str(at) for at in range(len(drawn))])
    for row, name in enumerate(given_ids):
        at = int(name) if form == "list" else int(Path(name).stem)
        label, ending, how, seed = drawn[at]
        assert found.classes[int(found.labels[row])] == label
        if ending.lower() in (".png", ".bmp") and how == "whole":  # read without loss
            assert (found.inputs[row].permute(1, 2, 0).numpy() == picture(seed)).all()
