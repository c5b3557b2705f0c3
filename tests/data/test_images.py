"""The decoding rules one by one, and the cache that decodes each file once."""

import hashlib
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

import soseleto
from soseleto.data import Reading, as_examples
from soseleto.data.image_decoding import cache, known_files, rules, workers
from soseleto.errors import DataError, UsageError


def read(image: Image.Image, path: Path, height=8, width=8, channels=3, **save):
    image.save(path, **save)
    made = rules.decode(path.read_bytes(), (channels, height, width))
    return np.frombuffer(made, np.uint8).reshape(channels, height, width)


def test_modes(tmp_path):
    red = (255, 0, 0)
    flat = {
        "palette": (Image.new("RGB", (8, 8), red).convert("P", palette=Image.Palette.ADAPTIVE), "a.png"),
        "clear": (Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "b.png"),
        "half": (Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "c.png"),
        "grey and alpha": (Image.new("LA", (8, 8), (10, 255)), "d.png"),
        "cmyk": (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "e.tif"),
        "one bit": (Image.new("1", (8, 8), 1), "f.png"),
        "16 bit": (Image.fromarray(np.full((8, 8), 257 * 100, np.uint16)), "g.png"),
        "float": (Image.fromarray(np.full((8, 8), 0.5, np.float32)), "h.tif"),
        "float to 255": (Image.fromarray(np.full((8, 8), 77.0, np.float32)), "i.tif"),
    }
    got = {name: read(image, tmp_path / file)[:, 4, 4].tolist() for name, (image, file) in flat.items()}
    assert got == {
        "palette": [255, 0, 0],
        "clear": [255, 255, 255],
        "half": [127, 127, 127],
        "grey and alpha": [10, 10, 10],
        "cmyk": [255, 0, 0],
        "one bit": [255, 255, 255],
        "16 bit": [100, 100, 100],
        "float": [128, 128, 128],
        "float to 255": [77, 77, 77],
    }


def test_transparent_palette_lies_on_white(tmp_path):
    image = Image.new("P", (8, 8), 0)
    image.putpalette([10, 20, 30] * 256)
    assert read(image, tmp_path / "a.png", transparency=0)[:, 4, 4].tolist() == [255, 255, 255]


def test_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (16, 8))
    image.paste((255, 255, 255), (0, 0, 8, 8))  # the left half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: shown a quarter clockwise, left becomes top
    made = read(image, tmp_path / "a.png", height=16, width=8, exif=exif.tobytes())
    assert made[0, 2, 4] == 255
    assert made[0, 13, 4] == 0
    assert rules.probe(str(tmp_path / "a.png")) == (16, 8, True)


def test_resizing_takes_the_centred_window(tmp_path):
    image = Image.new("L", (40, 10), 0)
    image.paste(200, (15, 0, 25, 10))
    made = read(image, tmp_path / "a.png", channels=1)
    assert made.shape == (1, 8, 8)
    assert made.min() > 180  # the filter reaches a little over the edge; all else would be dark


def test_large_jpegs_are_decoded_at_reduced_size(tmp_path):
    random = np.random.default_rng(0).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    large = Image.fromarray(random).resize((1024, 1024), Image.Resampling.BICUBIC)
    quick = read(large, tmp_path / "a.jpg", 32, 32, quality=95)
    exact = read(large, tmp_path / "a.png", 32, 32)
    assert np.abs(quick.astype(int) - exact.astype(int)).mean() < 2


def test_sizes_and_colours_come_from_the_source(image_folder, tmp_path):
    assert as_examples(image_folder("a", {"x": [1, 2]}, size=(20, 12)), name="s").inputs.shape[1:] == (3, 12, 20)
    mixed = image_folder("b", {"x": [1, 2]}, size=(20, 12))
    Image.new("RGB", (50, 40)).save(mixed / "x" / "big.png")
    assert as_examples(mixed, name="s").inputs.shape[1:] == (3, 12, 12)
    assert as_examples(mixed, name="s", reading=Reading(image_size=(9, 7), channels=1)).inputs.shape[1:] == (1, 9, 7)
    huge = image_folder("c", {"x": [1]}, size=(300, 400))
    assert as_examples(huge, name="s").inputs.shape[1:] == (3, 224, 224)
    (tmp_path / "d" / "x").mkdir(parents=True)
    Image.new("L", (10, 10), 3).save(tmp_path / "d" / "x" / "a.png")
    assert as_examples(tmp_path / "d", name="s").inputs.shape[1:] == (1, 10, 10)
    for wrong in ({"image_size": 2}, {"image_size": (8, 8, 8)}, {"channels": 2}, {"workers": -1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            as_examples(tmp_path / "d", name="s", reading=Reading(**wrong))


def test_each_file_is_decoded_once(image_folder, own_cache, monkeypatch):
    root = image_folder("source", {"a": [1, 2], "b": [3]})
    first = as_examples(root, name="source")
    calls = []
    real = rules.fill
    monkeypatch.setattr(rules, "fill", lambda *args: calls.append(args) or real(*args))
    assert torch.equal(as_examples(root, name="source").inputs, first.inputs)
    for path in root.rglob("*.png"):
        os.utime(path, (1, 1))  # other times, same content
    assert torch.equal(as_examples(root, name="source").inputs, first.inputs)
    assert calls == []
    assert as_examples(root, name="source", reading=Reading(image_size=16)).inputs.shape[2:] == (16, 16)
    assert len(calls) == 1
    (root / "b" / "0003.png").write_bytes((root / "a" / "0001.png").read_bytes())
    changed = as_examples(root, name="source")
    assert len(calls) == 1  # an image of that content is known
    assert torch.equal(changed.inputs[2], changed.inputs[0])
    first.inputs[0] = 0  # writing to what was handed out leaves the cache as it is
    assert not torch.equal(as_examples(root, name="source").inputs[0], first.inputs[0])
    assert not list(own_cache.glob("unfinished-*"))


def decode_all(files, array, count, progress=None):
    with workers.Workers(count) as pool:
        return pool.decode(files, array, (3, 16, 16), progress), pool.digests(files)


def test_workers_give_the_same_as_one_process(image_folder, tmp_path):
    root = image_folder("source", {"a": list(range(100)), "b": list(range(100, 150))})
    (root / "a" / "bad.png").write_bytes(b"nothing")
    files = [*sorted(str(path) for path in root.rglob("*.png")), str(root / "none.png")]
    seen = []
    alone, digests = decode_all(files, tmp_path / "alone", 0)
    many = decode_all(files, tmp_path / "many", 2, lambda *two: seen.append(two))
    assert many == (alone, digests)
    assert alone.bad == [(100, "is not an image of a known kind"), (151, "is missing")]
    assert alone.digests == digests
    assert digests[0] == hashlib.sha256((root / "a" / "0000.png").read_bytes()).hexdigest()
    assert (tmp_path / "alone").read_bytes() == (tmp_path / "many").read_bytes()
    assert seen[-1] == (152, 152)


def test_a_dying_worker_gives_a_clear_error_and_no_cache_entry(image_folder, tmp_path, monkeypatch, own_cache):
    root = image_folder("source", {"a": list(range(70))})
    script = tmp_path / "rules.py"
    script.write_text("import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)")
    monkeypatch.setattr(workers, "__file__", str(tmp_path / "workers.py"))
    with pytest.raises(DataError, match=r"an image worker died \(exit code -9\) between .*a/0000.png and"):
        as_examples(root, name="source", reading=Reading(workers=1))
    assert list(own_cache.iterdir()) == []


KILLED = """
import sys, soseleto.data as data
from soseleto.data.image_decoding import rules
def slow(array, first, paths, shape):
    print("half way", flush=True)
    sys.stdin.readline()
rules.fill = slow
data.as_examples(sys.argv[1], name="source", reading=data.Reading(workers=0))
"""


def test_a_kill_midway_leaves_no_entry_that_could_be_taken_for_whole(image_folder, own_cache):
    root = image_folder("source", {"a": [1, 2, 3]})
    command = [sys.executable, "-c", KILLED, str(root)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"half way\n"
        process.send_signal(signal.SIGKILL)
    left = [path.name for path in own_cache.iterdir()]
    assert len(left) == 1
    assert left[0].startswith("unfinished-")
    made = as_examples(root, name="source")
    assert made.inputs[0].float().std() > 1
    old = own_cache / left[0]
    assert old.exists()  # it might belong to a process at work ...
    os.utime(old, (time.time() - 90000,) * 2)
    (root / "a" / "0009.png").write_bytes((root / "a" / "0001.png").read_bytes())
    as_examples(root, name="source")
    assert not old.exists()  # ... but not a day later


def test_a_damaged_entry_is_named(image_folder, own_cache):
    root = image_folder("source", {"a": [1, 2]})
    as_examples(root, name="source")
    (entry,) = own_cache.iterdir()
    (entry / "pixels").write_bytes(b"short")
    with pytest.raises(DataError, match="is damaged: delete that folder"):
        as_examples(root, name="source")
    assert json.loads((entry / "meta.json").read_text())["shape"] == [2, 3, 32, 32]


def test_a_full_disk_is_detected_before_decoding(image_folder, monkeypatch):
    usage = type("Usage", (), {"free": 10})
    monkeypatch.setattr(cache.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(DataError, match="GiB are free: give a smaller image_size"):
        as_examples(image_folder("source", {"a": [1]}), name="source")


def test_a_file_changed_within_its_size_and_time_is_read_again(image_folder):
    root = image_folder("source", {"a": [1, 2]}, suffix=".bmp")
    as_examples(root, name="source")
    path, other = root / "a" / "0001.bmp", root / "a" / "0002.bmp"
    before = path.stat()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    changed = as_examples(root, name="source")
    assert torch.equal(changed.inputs[0], changed.inputs[1])


def test_images_with_the_same_fault_are_counted_and_named(image_folder):
    root = image_folder("source", {"a": [1, 2, 3]})
    for name in ("0001.png", "0002.png"):
        (root / "a" / name).write_bytes(b"no image")
    with pytest.raises(
        DataError, match=r"each of 2 images is not an image of a known kind: \S*0001.png, \S*0002.png\."
    ):
        as_examples(root, name="source")


@pytest.mark.parametrize("step", ["read_bytes", "decode"])
def test_a_passing_error_is_forgotten(image_folder, monkeypatch, step):
    root = image_folder("source", {"a": [1, 2]})
    real, failing = getattr(rules, step), [OSError(5, "Input/output error"), OSError(5, "Input/output error")]

    def fails(*given):
        if failing and given[0] in (str(root / "a" / "0001.png"), (root / "a" / "0001.png").read_bytes()):
            raise failing.pop()
        return real(*given)

    monkeypatch.setattr(rules, step, fails)
    reading = Reading(image_size=32, channels=3, workers=0)
    with pytest.raises(DataError, match=r"0001\.png cannot be decoded \(.*Input/output error"):
        as_examples(root, name="source", reading=reading)
    failing.clear()
    again = as_examples(root, name="source", reading=reading)
    wanted = np.asarray(Image.open(root / "a" / "0001.png")).transpose(2, 0, 1)
    assert np.array_equal(again.inputs[0].numpy(), wanted)


def png_rows(size: int, *, kind: int, interlaced: bool, value: int = 200) -> list[bytes]:
    """The rows of a square PNG of one value, each after its filter byte."""
    passes = rules._ADAM7 if interlaced else [(0, 0, 1, 1)]
    sides = [((size - left - 1) // right + 1, (size - top - 1) // down + 1) for left, top, right, down in passes]
    channels = {0: 1, 2: 3}[kind]
    return [b"\0" + bytes([value]) * columns * channels for columns, rows in sides if columns for _ in range(rows)]


def png(rows: list[bytes], size: int, *, kind: int, interlaced: bool) -> bytes:
    header = struct.pack(">IIBBBBB", size, size, 8, kind, 0, 0, interlaced)
    pixels = zlib.compress(b"".join(rows))
    chunks = [(b"IHDR", header), (b"IDAT", pixels), (b"IEND", b"")]
    made = [struct.pack(">I", len(d)) + t + d + struct.pack(">I", zlib.crc32(t + d)) for t, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


@pytest.mark.parametrize("kind", [0, 2])
@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("size", [5, 8, 16, 17])
def test_a_png_with_fewer_rows_than_it_declares_is_damaged(kind, interlaced, size):
    rows = png_rows(size, kind=kind, interlaced=interlaced)
    for fewer in (1, len(rows) // 2, len(rows) - 1):
        with pytest.raises((rules.Unreadable, OSError), match=r"holds fewer rows than it declares|truncated"):
            rules.decode(png(rows[:fewer], size, kind=kind, interlaced=interlaced), (3, size, size))
    for value in (0, 200):
        whole = png(
            png_rows(size, kind=kind, interlaced=interlaced, value=value), size, kind=kind, interlaced=interlaced
        )
        assert rules.decode(whole, (3, size, size)) == bytes([value]) * 3 * size * size


def test_every_mode_of_png_passes_the_count_of_its_rows(tmp_path):
    for width in (9, 16, 33):
        for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
            Image.new(mode, (width, 12)).save(tmp_path / "a.png")
            rules.decode((tmp_path / "a.png").read_bytes(), (3, 8, 8))


def test_truncated_images_raise_whatever_pillow_is_set_to(image_folder, monkeypatch):
    whole = next(image_folder("source", {"a": [1]}).rglob("*.png")).read_bytes()
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(OSError, match="truncated"):
        rules.decode(whole[: len(whole) // 2], (3, 32, 32))
    assert ImageFile.LOAD_TRUNCATED_IMAGES


def read_by(monkeypatch, name):
    """The files that ``rules.fill`` decodes, or ``rules.digests`` hashes, from now on."""
    real, seen = getattr(rules, name), []

    def spied(*args):
        seen.extend(os.path.basename(path) for path in args[2 if name == "fill" else 0])
        return real(*args)

    monkeypatch.setattr(rules, name, spied)
    return seen


def test_a_set_that_grew_by_one_file_costs_one_file(image_folder, own_cache, monkeypatch):
    root = image_folder("source", {"a": [1, 2, 3], "b": [4]})
    (root / "a" / "0009.png").write_bytes(b"not an image")
    with pytest.raises(soseleto.data.ProblemsError):
        as_examples(root, name="source")
    shutil.copy(image_folder("more", {"a": [5]}) / "a" / "0005.png", root / "a")
    decoded = read_by(monkeypatch, "fill")
    with pytest.raises(soseleto.data.ProblemsError):
        as_examples(root, name="source")
    assert decoded == ["0005.png", "0009.png"]  # an error is not remembered
    (root / "a" / "0009.png").unlink()
    grown = as_examples(root, name="source")
    assert decoded == ["0005.png", "0009.png"]
    monkeypatch.setattr(rules, "VERSION", rules.VERSION + 1)  # what other rules have decoded is of no use
    assert torch.equal(as_examples(root, name="source").inputs, grown.inputs)
    assert len(decoded) == 2 + 5


@pytest.fixture
def large(monkeypatch):
    """Every set counts as too large to be read at every start, and files need not settle."""
    monkeypatch.setattr(known_files, "CHEAP", 0)
    monkeypatch.setattr(known_files, "SETTLED", 0.0)
    monkeypatch.setattr(known_files, "SAMPLE", 2)


def test_of_a_large_set_only_changed_files_are_read(image_folder, own_cache, monkeypatch, large):
    root = image_folder("source", {"a": [1, 2, 3, 4, 5, 6]}, suffix=".bmp")
    first = as_examples(root, name="source")
    hashed = read_by(monkeypatch, "digests")
    again = as_examples(root, name="source")
    assert hashed == ["0001.bmp", "0004.bmp"]  # the sample
    assert again.fingerprint() == first.fingerprint()
    path, other = root / "a" / "0002.bmp", root / "a" / "0004.bmp"
    before = path.stat()
    path.write_bytes(other.read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # same size and time
    hashed.clear()
    changed = as_examples(root, name="source")
    assert "0002.bmp" in hashed
    assert "0003.bmp" not in hashed
    assert torch.equal(changed.inputs[1], changed.inputs[3])
    assert changed.fingerprint() != first.fingerprint()


def test_where_a_sampled_file_has_changed_unnoticed_all_are_read(image_folder, own_cache, monkeypatch, large):
    root = image_folder("source", {"a": [1, 2, 3, 4]})
    monkeypatch.setattr(known_files, "_stamp", lambda file: (1, 1, 1, 1))  # a file system that shows no change
    as_examples(root, name="source")
    (root / "a" / "0001.png").write_bytes((root / "a" / "0004.png").read_bytes())
    (root / "a" / "0002.png").write_bytes((root / "a" / "0004.png").read_bytes())
    made = as_examples(root, name="source")
    assert torch.equal(made.inputs[0], made.inputs[3])
    assert torch.equal(made.inputs[1], made.inputs[3])


def test_files_that_were_changed_just_now_are_not_remembered(image_folder, own_cache, monkeypatch, large):
    monkeypatch.setattr(known_files, "SETTLED", 100.0)
    root = image_folder("source", {"a": [1, 2, 3, 4]})
    as_examples(root, name="source")
    hashed = read_by(monkeypatch, "digests")
    as_examples(root, name="source")
    assert len(hashed) == 4
    (own_cache / "known-files.sqlite").write_bytes(b"damaged" * 1000)
    assert len(as_examples(root, name="source")) == 4


def test_the_fingerprint_of_many_images_is_by_their_files(image_folder, own_cache, large):
    made = as_examples(image_folder("source", {"a": [1, 2]}), name="source")
    assert made.fingerprint().startswith("by the content of the image files: ")
    made.inputs[0] = 0
    assert len(made.fingerprint()) == 64  # what was written to is read
    assert len(made.subset([0]).fingerprint()) == 64
