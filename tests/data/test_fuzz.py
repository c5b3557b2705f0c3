"""Corrupt files raise SoseletoError: no other exception, no hang, no excessive memory."""

import contextlib
import io
import resource
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from soseleto.data import as_examples
from soseleto.errors import SoseletoError

quick = settings(
    deadline=5000,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MAX_MEMORY = 1 << 28


def npz_file() -> bytes:
    file = io.BytesIO()
    np.savez(file, x=np.zeros((2, 3)), y=np.array([0, 1]))
    return file.getvalue()


def parquet_file() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet

    file = io.BytesIO()
    pyarrow.parquet.write_table(pa.table({"a": [1.0, 2.0], "label": ["x", "y"]}), file)
    return file.getvalue()


CSV = b"id,a,b,label\n1,2.5,3,x\n2,4.5,nan,y\n"
JSON = b'{"a": 1, "label": "x"}\n{"a": 2, "label": "y"}\n'


@st.composite
def damaged(draw, whole: bytes):
    """A good file with bytes changed, cut, doubled or replaced."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, max(0, len(content) - 1)))
        how = draw(st.sampled_from(["set", "cut", "insert", "huge", "zero"]))
        if how == "set" and content:
            content[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del content[at : at + draw(st.integers(1, 64))]
        elif how == "insert":
            content[at:at] = draw(st.binary(max_size=16))
        elif how == "huge":
            content[at : at + 4] = b"\xff\xff\xff\x7f"
        else:
            content[at : at + 8] = bytes(8)
    return bytes(content)


def read_or_refuse(read, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    before = highest_memory()
    with contextlib.suppress(SoseletoError):
        read(path)
    assert highest_memory() - before < MAX_MEMORY


def highest_memory() -> int:
    """Of this process so far. (tracemalloc does not count Arrow's memory, and crashes when its threads free memory.)"""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


READERS = {
    "npz": (npz_file, "a.npz", lambda path: as_examples(path, name="source")),
    "csv": (lambda: CSV, "a.csv", lambda path: as_examples(path, name="source")),
    "tsv": (lambda: CSV.replace(b",", b"\t"), "a.tsv", lambda path: as_examples(path, name="source")),
    "json": (lambda: JSON, "a.jsonl", lambda path: as_examples(path, name="source")),
    "parquet": (parquet_file, "a.parquet", lambda path: as_examples(path, name="source")),
}


@pytest.mark.parametrize("name", READERS)
def test_the_undamaged_file_is_read(name, tmp_path):
    make, file, read = READERS[name]
    (tmp_path / file).write_bytes(make())
    read(tmp_path / file)


@pytest.mark.parametrize("name", READERS)
@quick
@given(data=st.data())
def test_damaged_files_are_read_or_refused(name, tmp_path, data):
    make, file, read = READERS[name]
    read_or_refuse(read, tmp_path / file, data.draw(damaged(make())))


@pytest.mark.parametrize("name", READERS)
@settings(quick, max_examples=60)
@given(content=st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(name, tmp_path, content):
    _, file, read = READERS[name]
    read_or_refuse(read, tmp_path / file, content)


@quick
@given(text=st.text(alphabet=st.sampled_from('ab1.-,;\t"\n\r\\ é€\0naNilbe'), max_size=200))
def test_any_text_as_a_table(tmp_path, text):
    read_or_refuse(lambda p: as_examples(p, name="source"), tmp_path / "a.csv", b"a,label\n" + text.encode())


def test_an_array_that_claims_to_be_huge(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
        archive.writestr("y.npy", header.getvalue())
    with pytest.raises(SoseletoError, match=r"a.npz cannot be read"):
        as_examples(tmp_path / "a.npz", name="source")


@pytest.mark.parametrize(
    "header", ["{'descr': '<i8', 'shape\xff\x7f2,), }", "{'descr': " + "(" * 9000, "{'descr': '<i8'}"]
)
def test_a_damaged_array_header_is_refused_in_one_sentence(tmp_path: Path, header: str) -> None:
    """NumPy tokenises the first without finding its end; the second is nested deeper than Python parses."""
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin1")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(SoseletoError, match=r"a.npz cannot be read"):
        as_examples(tmp_path / "a.npz", name="source")
