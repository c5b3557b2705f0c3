"""Image folders and tar shards that are decoded in every epoch."""

import io
import os
import tarfile

import numpy as np
import pytest
import torch
from torch import nn

import soseleto
from soseleto.data import Reading, as_examples, live_images, tar_shards
from soseleto.errors import DataError, UsageError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SOSELETO_CACHE", str(tmp_path / "cache"))


def png(value):
    stream = io.BytesIO()
    Image.fromarray(np.full((9, 12, 3), value, np.uint8)).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def folder(tmp_path):
    for c, start in (("cat", 0), ("dog", 100)):
        (tmp_path / "images" / c).mkdir(parents=True)
        for at in range(5):
            (tmp_path / "images" / c / f"{at}.png").write_bytes(png(start + at))
    return tmp_path / "images"


def test_a_folder_has_the_pixels_and_names_of_one_that_is_read_into_memory(folder):
    live = live_images(folder, image_size=8, workers=0)
    pair = as_examples(folder, name="source", reading=Reading(image_size=8))
    assert torch.equal(live.take(torch.arange(10))[0], pair.inputs)
    assert (live.ids, live.classes, live.paths) == (pair.ids, pair.classes, pair.paths)
    assert torch.equal(live.labels, pair.labels)
    other = live_images(folder, image_size=8, classes=["dog", "bird", "cat"], workers=0)
    assert other.labels.tolist() == [2] * 5 + [0] * 5


def test_a_changed_file_changes_the_fingerprint_and_an_equal_folder_does_not(folder):
    one = live_images(folder, image_size=8, workers=0).fingerprint()
    assert one == live_images(folder, image_size=8, workers=0).fingerprint()
    assert one.startswith("names, sizes and times")
    os.utime(folder / "cat" / "3.png", ns=(0, 1))
    assert one != live_images(folder, image_size=8, workers=0).fingerprint()


def test_a_broken_image_is_named(folder):
    (folder / "dog" / "2.png").write_bytes(b"no image")
    live = live_images(folder, image_size=8, workers=1).named("source")
    with pytest.raises(DataError, match=r"item 7 of the source data set: .*2.png"):
        list(live.read([torch.arange(10)]))
    live.close()


def test_fit_trains_on_a_live_folder(folder):
    live = live_images(folder, image_size=8, workers=0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    result = soseleto.fit(model, live, live_images(folder, image_size=8), epochs=2, batch_size=4)
    assert result.ranking()["label"][0] in ("cat", "dog")
    with pytest.raises(UsageError, match="the same list in the same order"):
        soseleto.fit(model, live, live_images(folder, image_size=8, classes=["dog", "cat"]), epochs=1)
    with pytest.raises(UsageError, match="a path cannot stand beside"):
        soseleto.fit(model, live, str(folder), epochs=1)


def shard(path, first, n, drop=()):
    with tarfile.open(path, "w") as archive:
        for at in range(first, first + n):
            for name, content in ((f"{at:04d}.png", png(at)), (f"{at:04d}.cls", str(at % 3).encode())):
                if name not in drop:
                    member = tarfile.TarInfo(name)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
    return path


def test_shards_are_read_in_any_order_and_indexed_once(tmp_path, monkeypatch):
    for at in range(3):
        shard(tmp_path / f"part-{at}.tar", 10 * at, 4 + at)
    made = tar_shards(tmp_path / "part-*.tar", image_size=8, workers=0)
    assert made.ids[3:5] == ("0003", "0010")
    inputs, labels = made.take(torch.tensor([14, 0, 4]))
    assert inputs[:, 0, 0, 0].tolist() == [25, 0, 10]
    assert labels.tolist() == [1, 0, 1]
    scanned = []
    scan = soseleto.data.live_files._scanned
    monkeypatch.setattr(soseleto.data.live_files, "_scanned", lambda *given: scanned.append(given) or scan(*given))
    shard(tmp_path / "part-3.tar", 30, 2)
    assert len(tar_shards(tmp_path / "part-*.tar", image_size=8)) == 17
    assert [os.path.basename(path) for path, _ in scanned] == ["part-3.tar"]  # one file more costs one file


def test_shards_of_arrays_and_what_is_refused(tmp_path):
    stream = io.BytesIO()
    np.save(stream, np.arange(3, dtype=np.float32))
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        for name, content in (("a/x.npy", stream.getvalue()), ("a/x.cls", b"2")):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    made = tar_shards(tmp_path / "a.tar", workers=0)
    inputs, labels = made.take(torch.tensor([0]))
    assert (inputs.tolist(), labels.tolist(), made.ids) == ([[0.0, 1.0, 2.0]], [2], ("a/x",))
    with pytest.raises(DataError, match=r"'0001' in .* has no label"):
        tar_shards(shard(tmp_path / "b.tar", 0, 2, drop=["0001.cls"]), image_size=8)
    with pytest.raises(UsageError, match="is not there"):
        tar_shards(tmp_path / "none.tar")
    (tmp_path / "c.tar").write_bytes(b"no tar" * 200)
    with pytest.raises(DataError, match="not an uncompressed tar"):
        tar_shards(tmp_path / "c.tar")
    with pytest.raises(DataError, match="image_size"):
        tar_shards(shard(tmp_path / "d.tar", 0, 2), workers=0).take(torch.tensor([0]))
