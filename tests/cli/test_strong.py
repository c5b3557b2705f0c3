"""``soseleto fit --method strong`` on images and tables: its plan, its run folder, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import soseleto
from soseleto.data import FeatureViews
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


def test_plain_is_the_default_and_says_so(type_: Type, data: list[object], tmp_path: Path) -> None:
    code, said, err = type_("fit", *data, "--epochs", 1, "--folds", 0, "--no-baselines")
    assert code == 0, err
    assert "method plain; --method strong takes longer" in said
    config = RunFolder.open(tmp_path / "run").config()
    assert (config["method"], config["lr"], config["weight_decay"]) == ("soseleto", 0.03, 0.0)
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "The probability that a source example’s label is right" not in page


def numbers(path: Path, n: int, seed: int) -> Path:
    """A table of three numbers, one of them with gaps, whose sum says the class."""
    draw = np.random.default_rng(seed)
    values = draw.normal(size=(n, 3)).round(3)
    lines = [
        f"{'' if row % 7 == 0 else one[0]},{one[1]},{one[2]},{'high' if one.sum() > 0 else 'low'}"
        for row, one in enumerate(values)
    ]
    path.write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    return path


SHORT = ["--method", "strong", "--epochs", 2, "--folds", 0, "--no-baselines", "--device", "cpu"]


def test_a_table_of_numbers(type_: Type, tmp_path: Path) -> None:
    source, target = numbers(tmp_path / "s.csv", 80, 0), numbers(tmp_path / "t.csv", 20, 1)
    code, said, err = type_("fit", "--source", source, "--target", target, "--out", tmp_path / "run", *SHORT)
    assert code == 0, err
    assert "a teacher judges every label" in said
    config = RunFolder.open(tmp_path / "run").config()
    assert (config["settings"]["name"], config["model"]) == ("Strong", "table")
    assert config["augment_source"] == repr(FeatureViews())
    assert (config["lr"], config["weight_decay"], config["target_batch_size"]) == (0.03, 0.0, 20)
    assert len(RunFolder.open(tmp_path / "run").ranking()["weight"]) == 80
