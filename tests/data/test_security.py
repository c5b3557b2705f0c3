"""No code runs from data, nothing is written or read outside its folder, bombs are refused."""

import os
import struct
import subprocess
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import EpsImagePlugin, Image, PngImagePlugin

import soseleto
from fabricated import Hostile
from soseleto.data import ProblemsError, Reading, as_examples, check_pair, images
from soseleto.errors import DataError
from soseleto.run_folder.source import image_from_file

HUGE = f"{{'descr': '<f8', 'fortran_order': False, 'shape': ({1 << 40},), }}"


@pytest.mark.parametrize(
    "header", ["{'descr': '<i8', 'shape\xff\x7f2,), }", "{'descr': " + "(" * 9000, "{'descr': '<i8'}", HUGE]
)
def test_a_damaged_array_header_is_refused_in_one_sentence(tmp_path: Path, header: str) -> None:
    """NumPy tokenises the first without finding its end; the second is nested deeper than Python parses."""
    member = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode("latin1")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", member)
    with pytest.raises(DataError, match=r"a.npz cannot be read"):
        as_examples(tmp_path / "a.npz", name="source")


def test_object_arrays_in_npz_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.array([Hostile(tmp_path / "m")], dtype=object), y=np.array([1]))
    with pytest.raises(DataError, match="not objects"):
        as_examples(tmp_path / "a.npz", name="source")
    assert not (tmp_path / "m").exists()


def test_manifests_cannot_read_outside_their_root(tmp_path, image_folder):
    image_folder("images", {"a": [1, 2]})
    image_folder("secret", {"a": [3]})
    secret = tmp_path / "secret" / "a" / "0003.png"
    os.symlink(secret, tmp_path / "images" / "a" / "link.png")
    os.symlink(tmp_path / "secret", tmp_path / "images" / "folder")
    table = tmp_path / "images" / "t.csv"
    rows = ["a/0001.png", "../secret/a/0003.png", str(secret), "a/link.png", "folder/a/0003.png", "a/../a/0002.png"]
    table.write_text("path,label\n" + "".join(f"{row},x\n" for row in rows))
    with pytest.raises(ProblemsError, match="4 rows with a path outside"):
        as_examples(table, name="source")
    (problem,) = check_pair(table, (np.zeros((1, 3, 32, 32), np.uint8), ["x"]), mode="noisy")
    assert problem.ids == ("1", "2", "3", "4")
    allowed = as_examples(table, name="source", reading=Reading(allow_outside=True))
    assert len(allowed) == 6
    assert torch.equal(allowed.inputs[1], allowed.inputs[4])


def test_image_folders_cannot_read_outside_either(tmp_path, image_folder):
    root = image_folder("images", {"a": [1]})
    secret = image_folder("secret", {"b": [3]})
    os.symlink(secret / "b" / "0003.png", root / "a" / "link.png")
    with pytest.raises(ProblemsError, match=r"a/link.png lead outside"):
        as_examples(root, name="source")
    assert len(as_examples(root, name="source", reading=Reading(allow_outside=True))) == 2
    (root / "a" / "link.png").unlink()
    os.symlink(secret / "b", root / "b")  # a class folder that is a link
    with pytest.raises(ProblemsError, match=r"b/0003\.png lead outside"):
        as_examples(root, name="source")
    assert len(as_examples(root, name="source", reading=Reading(allow_outside=True))) == 2
    (root / "b").unlink()
    os.symlink(secret, root / "a" / "deeper")
    assert as_examples(root, name="source").ids == ("a/0001.png",)


def bad_ones(folder, *names):
    _, bad = images.decoded([str(folder / name) for name in names], (3, 8, 8))
    return sorted((row, why) for why, rows in bad.items() for row in rows)


def png_claiming(width, height):
    """A PNG whose header claims a size its data do not have."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(9))) + chunk(b"IEND", b"")


def test_image_bombs_are_refused_before_a_pixel_is_decoded(tmp_path):
    for name, size in (("a", (60000, 60000)), ("b", (9000, 9000)), ("c", (4, 4000000))):
        (tmp_path / name).write_bytes(png_claiming(*size))
    bad = bad_ones(tmp_path, "a", "b", "c")
    assert [row for row, _ in bad] == [0, 1, 2]
    assert "more than the" in bad[1][1] or "more pixels" in bad[1][1]
    assert "absurd size" in bad[2][1]


def test_pipes_and_folders_named_like_images_do_not_hang(tmp_path):
    os.mkfifo(tmp_path / "a.png")
    (tmp_path / "b.png").mkdir()
    assert bad_ones(tmp_path, "a.png", "b.png") == [(0, "is not a file"), (1, "is not a file")]


def test_large_text_chunks_in_images_are_refused(tmp_path):
    info = PngImagePlugin.PngInfo()
    info.add_text("k", "x" * (1 << 21), zip=True)
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", pnginfo=info)
    (bad,) = bad_ones(tmp_path, "a.png")
    assert "Decompressed data too large" in bad[1]


def test_a_table_that_stands_for_billions_of_rows_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("soseleto.data.structure.MAX_BYTES", 1 << 20)
    table = pa.table({"a": np.zeros(1 << 18), "label": np.zeros(1 << 18, np.int8)})
    pa.parquet.write_table(table, tmp_path / "a.parquet")
    assert (tmp_path / "a.parquet").stat().st_size < 10000
    with pytest.raises(DataError, match="more than the"):
        as_examples(tmp_path / "a.parquet", name="source")


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\n(x) print\n%%EOF\n"


def test_no_image_starts_another_program(tmp_path, image_folder, monkeypatch):
    """Pillow runs Ghostscript for EPS, whatever the name of the file."""

    def started(*args, **options):
        raise AssertionError("another program was started")

    root = image_folder("source", {"a": [1, 2]})
    (root / "a" / "evil.png").write_bytes(EPS)
    for name in ("run", "Popen", "check_call"):
        monkeypatch.setattr(subprocess, name, started)
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", started)
    with pytest.raises(ProblemsError, match=r"evil\.png is not an image of a known kind"):
        as_examples(root, name="source")
    assert image_from_file(str(root / "a" / "evil.png"), 96) is None
    assert image_from_file(str(root / "a" / "0001.png"), 96) is not None


def test_images_are_opened_in_one_place():
    """Every other place would have to list the formats again."""
    source = Path(soseleto.__file__).parent
    opening = [path for path in source.rglob("*.py") if "Image.open(" in path.read_text("utf-8")]
    assert [path.relative_to(source).as_posix() for path in opening] == ["data/images.py"]
