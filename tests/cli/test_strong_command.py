"""``soseleto fit --method strong``: its run folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import soseleto
from soseleto.run_folder.folder import RunFolder
from typing_in import Type

SHORT = ["--method", "strong", "--epochs", 2, "--folds", 0, "--no-baselines", "--device", "cpu"]


def photos(folder: Path, n: int, seed: int, side: int = 12) -> None:
    """PNG files whose upper or lower half is bright."""
    draw = np.random.default_rng(seed)
    for at in range(n):
        lower = int(draw.integers(2))
        image = draw.integers(100, size=(side, side, 3))
        image[side // 2 * lower : side // 2 * (lower + 1)] += 150
        below = ("upper", "lower")[lower]
        (folder / below).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.astype(np.uint8)).save(folder / below / f"{seed}-{at}.png")


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOSELETO_CACHE", str(tmp_path / "cache"))
    photos(tmp_path / "source", 48, 0)
    photos(tmp_path / "target", 12, 1)
    return tmp_path


def words(desk: Path) -> list[object]:
    sets = ["--source", desk / "source", "--target", desk / "target"]
    return ["fit", *sets, "--model", "mlp", "--out", desk / "run", *SHORT]


def test_photos_are_learned_from_and_recorded(desk: Path, type_: Type) -> None:
    code, _, err = type_(*words(desk))
    assert code == 0, err
    config = RunFolder.open(desk / "run").config()
    assert config["settings"]["name"] == "Strong"
    assert (config["lr"], config["weight_decay"], config["target_batch_size"]) == (0.1, 5e-4, 12)
    assert config["optimizer"] == "sgd, nesterov=True"
    assert soseleto.load(desk / "run").outputs(np.zeros((2, 3, 12, 12), dtype=np.uint8)).shape == (2, 2)
    page = (desk / "run" / "report.html").read_text("utf-8")
    assert "in the strong recipe the probability that its label is right" in page
    assert "lignment" not in page
    assert len(RunFolder.open(desk / "run").ranking()["weight"]) == 48
