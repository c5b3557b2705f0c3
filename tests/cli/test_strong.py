"""``soseleto fit --method strong`` on images and tables: its plan, its run folder, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import soseleto
from soseleto.run_folder.folder import RunFolder
from typing_in import Type


def pictures(path: Path, n: int, seed: int, flipped: float = 0.0) -> Path:
    """Two classes: the upper or the lower half is bright."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(2, size=n)
    bright = (np.arange(8) // 4 == labels[:, None])[:, None, :, None]
    images = draw.integers(100, size=(n, 1, 8, 8)) + 150 * bright
    np.savez(path, x=images.astype(np.uint8), y=np.where(draw.random(n) < flipped, 1 - labels, labels))
    return path


@pytest.fixture
def data(tmp_path: Path) -> list[object]:
    source, target = pictures(tmp_path / "s.npz", 96, 0, 0.3), pictures(tmp_path / "t.npz", 16, 1)
    return ["--source", source, "--target", target, "--device", "cpu", "--model", "mlp", "--out", tmp_path / "run"]


def test_it_says_its_method_and_writes_a_run(type_: Type, data: list[object], tmp_path: Path) -> None:
    words = ["--method", "strong", "--epochs", 2, "--folds", 0, "--no-baselines"]
    code, said, err = type_("fit", *data, *words)
    assert code == 0, err
    assert "method strong: a teacher judges every label" in said
    config = RunFolder.open(tmp_path / "run").config()
    assert config["settings"]["name"] == "Strong"
    assert (config["lr"], config["weight_decay"], config["target_batch_size"]) == (0.1, 5e-4, 16)
    assert config["optimizer"] == "sgd, nesterov=True"
    assert soseleto.load(tmp_path / "run").outputs(np.zeros((2, 1, 8, 8), dtype=np.uint8)).shape == (2, 2)
    assert len(RunFolder.open(tmp_path / "run").ranking()["weight"]) == 96
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "The probability that a source example’s label is right" in page
    assert "lignment" not in page
