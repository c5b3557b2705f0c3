"""Small files to read, and the real public data sets below SOSELETO_DATA."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image


@pytest.fixture(scope="session")
def real_root(data_root: Path) -> Path:
    return data_root


def picture(seed: int, size: tuple[int, int] = (32, 32)) -> Image.Image:
    """A smooth colour image of size (width, height), different for every seed."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (5, 5, 3), dtype=np.uint8))
    return coarse.resize(size, Image.Resampling.BICUBIC)


@pytest.fixture
def image_folder(tmp_path):
    """Makes a folder of images, one per seed: ``image_folder("source", {"cat": [1, 2], "dog": [3]})``."""

    def make(name: str, classes: dict[str, list[int]], size=(32, 32), suffix=".png") -> Path:
        for label, seeds in classes.items():
            folder = tmp_path / name / label
            folder.mkdir(parents=True)
            for seed in seeds:
                picture(seed, size).save(folder / f"{seed:04d}{suffix}")
        return tmp_path / name

    return make
