"""Corrupt files raise SoseletoError: no other exception, no hang, no excessive memory."""

import contextlib
import gzip
import io
import pickle
import resource
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from experiments.public.cifar import read_binary, read_python
from experiments.public.idx import read_idx
from experiments.public.mat import read_mat
from experiments.public.unpickle import load_pickle
from soseleto.data import as_examples
from soseleto.errors import SoseletoError

quick = settings(
    deadline=5000,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
MAX_MEMORY = 1 << 28


def idx_file() -> bytes:
    return struct.pack(">BBBBII", 0, 0, 8, 2, 3, 4) + bytes(range(12))


def pickle_file() -> bytes:
    return pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [0, 1]}, protocol=2)


def mat_file(packed: bool) -> bytes:
    import scipy.io as scipy_io

    file = io.BytesIO()
    images = np.zeros((4, 4, 3, 2), np.uint8)
    scipy_io.savemat(file, {"X": images, "y": np.ones((2, 1), np.uint8)}, do_compression=packed)
    return file.getvalue()


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
    "idx": (idx_file, "a", read_idx),
    "idx.gz": (lambda: gzip.compress(idx_file()), "a.gz", read_idx),
    "cifar python": (pickle_file, "a", read_python),
    "pickle": (pickle_file, "a", load_pickle),
    "cifar binary": (lambda: bytes(2 * 3073), "a.bin", read_binary),
    "mat": (lambda: mat_file(False), "a.mat", lambda path: read_mat(path, ("X", "y"))),
    "mat packed": (lambda: mat_file(True), "a.mat", lambda path: read_mat(path, ("X", "y"))),
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


_TAGS = (14, 1 << 30, 6, 8, 9, 0, 5, 8, 1 << 29, 2, 1, 1, b"X", 2, 1 << 30)  # a matrix of 2 GiB
HUGE_MAT = b" " * 124 + b"\0\1IM" + struct.pack("<IIIIIIIIiiHHcxxxII", *_TAGS)

HUGE = {
    "idx": ("a", struct.pack(">BBBBIII", 0, 0, 8, 3, 4000000, 2000, 3000), read_idx),
    "idx.gz": ("a.gz", gzip.compress(struct.pack(">BBBBII", 0, 0, 8, 2, 60000, 784000)), read_idx),
    "pickle memo": ("a", b"\x80\x02]r\xff\xff\xff\x7f.", load_pickle),
    "pickle bytes": ("a", b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b"x.", load_pickle),
    "pickle text": ("a", b"\x80\x02X\xff\xff\xff\x7fabc.", load_pickle),
    "mat": ("a.mat", HUGE_MAT, lambda path: read_mat(path, ("X",))),
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_claims_cost_nothing(name, tmp_path):
    file, content, read = HUGE[name]
    (tmp_path / file).write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(SoseletoError):
        read(tmp_path / file)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_an_array_that_claims_to_be_huge(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue())
        archive.writestr("y.npy", header.getvalue())
    with pytest.raises(SoseletoError, match=r"x.npy in .* holds 8796093022208 bytes"):
        as_examples(tmp_path / "a.npz", name="source")


@pytest.mark.parametrize(
    "header", ["{'descr': '<i8', 'shape\xff\x7f2,), }", "{'descr': " + "(" * 9000, "{'descr': '<i8'}"]
)
def test_a_damaged_array_header_is_refused_in_one_sentence(tmp_path: Path, header: str) -> None:
    """NumPy tokenises the first without finding its end; the second is nested deeper than Python parses."""
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin1")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(SoseletoError, match=r"x\.npy in .* is not a NumPy array"):
        as_examples(tmp_path / "a.npz", name="source")
