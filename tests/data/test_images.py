"""The decoding rules one by one."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from soseleto.data import Reading, as_examples, images
from soseleto.errors import DataError, UsageError


def read(image: Image.Image, path: Path, height=8, width=8, channels=3, **save):
    image.save(path, **save)
    inputs, bad = images.decoded([str(path)], (channels, height, width))
    assert not bad
    return inputs[0].numpy()


@pytest.mark.parametrize(
    ("image", "file", "colour"),
    [
        (Image.new("RGB", (8, 8), "red").convert("P", palette=Image.Palette.ADAPTIVE), "palette.png", [255, 0, 0]),
        (Image.new("RGBA", (8, 8), (0, 0, 0, 0)), "clear.png", [255] * 3),
        (Image.new("RGBA", (8, 8), (0, 0, 0, 128)), "half.png", [127] * 3),
        (Image.new("LA", (8, 8), (10, 255)), "grey and alpha.png", [10] * 3),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "cmyk.tif", [255, 0, 0]),
        (Image.new("1", (8, 8), 1), "one bit.png", [255] * 3),
        (Image.fromarray(np.full((8, 8), 257 * 100, np.uint16)), "16 bit.png", [100] * 3),
        (Image.fromarray(np.full((8, 8), 0.5, np.float32)), "float.tif", [128] * 3),
        (Image.fromarray(np.full((8, 8), 77.0, np.float32)), "float to 255.tif", [77] * 3),
    ],
)
def test_modes(tmp_path, image, file, colour):
    assert read(image, tmp_path / file)[:, 4, 4].tolist() == colour


def test_orientation_is_applied(tmp_path):
    image = Image.new("RGB", (16, 8))
    image.paste((255, 255, 255), (0, 0, 8, 8))  # the left half is white
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: shown a quarter clockwise, left becomes top
    made = read(image, tmp_path / "a.png", height=16, width=8, exif=exif.tobytes())
    assert made[0, 2, 4] == 255
    assert made[0, 13, 4] == 0
    (tmp_path / "s" / "x").mkdir(parents=True)
    (tmp_path / "a.png").rename(tmp_path / "s" / "x" / "a.png")
    assert as_examples(tmp_path / "s", name="source").inputs.shape == (1, 3, 16, 8)


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
    for wrong in ({"image_size": 2}, {"image_size": (8, 8, 8)}, {"channels": 2}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            as_examples(tmp_path / "d", name="s", reading=Reading(**wrong))


def test_the_number_of_threads_changes_nothing(image_folder, tmp_path, monkeypatch):
    root = image_folder("source", {"a": list(range(100)), "b": list(range(100, 150))})
    (root / "a" / "bad.png").write_bytes(b"nothing")
    files = [*sorted(str(path) for path in root.rglob("*.png")), str(root / "none.png")]
    made = []
    for cores in (1, 4):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        made.append(images.decoded(files, (3, 16, 16)))
    (one, bad), (many, same) = made
    assert bad == same == {"is not an image of a known kind": [100], "is missing": [151]}
    assert torch.equal(one, many)


def test_many_images_are_on_disk_where_there_is_room(image_folder, monkeypatch):
    root = image_folder("source", {"a": [1, 2]})
    in_memory = as_examples(root, name="source").inputs
    monkeypatch.setattr(images, "LARGE", 100)
    assert torch.equal(as_examples(root, name="source").inputs, in_memory)
    monkeypatch.setattr(images.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 10}))
    with pytest.raises(DataError, match="GiB are free: give a smaller image_size"):
        as_examples(root, name="source")


def test_an_error_while_decoding_is_named(image_folder, monkeypatch):
    def fails(*given):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(images, "pixels", fails)
    with pytest.raises(DataError, match=r"cannot be decoded \(.*Input/output error"):
        as_examples(image_folder("source", {"a": [1, 2]}), name="source")
