"""``soseleto fit --method strong``: its plan, its run folder, sets without labels, and what is refused."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import soseleto
from soseleto.data import read_pair
from soseleto.run_folder.folder import RunFolder
from soseleto.training.resume import Keeper
from typing_in import Type

SHORT = ["--method", "strong", "--epochs", 2, "--folds", 0, "--no-baselines", "--device", "cpu"]
ANSWERS = "labelled by the teacher in every step"
Fit = Callable[..., tuple[int, str, str]]


def photos(folder: Path, n: int, seed: int, *, side: int = 12, classes: bool = True) -> Path:
    """PNG files whose upper or lower half is bright; without class folders some lie deep and some at the top."""
    draw = np.random.default_rng(seed)
    for at in range(n):
        lower = int(draw.integers(2))
        image = draw.integers(100, size=(side, side, 3))
        image[side // 2 * lower : side // 2 * (lower + 1)] += 150
        below = ("upper", "lower")[lower] if classes else ("", "more/deep")[at % 2]
        (folder / below).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image.astype(np.uint8)).save(folder / below / f"{seed}-{at}.png")
    return folder


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """Folders ``source``, ``target`` and ``more``, which has no classes and photos of another size."""
    photos(tmp_path / "source", 48, 0)
    photos(tmp_path / "target", 12, 1)
    photos(tmp_path / "more", 20, 2, side=16, classes=False)
    return tmp_path


def words(desk: Path, out: str = "run", more: str = "more") -> list[object]:
    sets = ["--source", desk / "source", "--target", desk / "target", "--unlabelled", desk / more]
    return ["fit", *sets, "--model", "mlp", "--out", desk / out, *SHORT]


@pytest.fixture
def fit(type_: Type, desk: Path) -> Fit:
    """``fit(out, more, *words)`` types the command for the photos of the desk."""
    return lambda out="run", more="more", *others: type_(*words(desk, out, more), *others)


def test_photos_are_learned_from_counted_and_recorded(desk: Path, fit: Fit, type_: Type) -> None:
    code, said, err = fit()
    assert code == 0, err
    assert f"20 unlabelled examples, {ANSWERS}\n" in said
    config = RunFolder.open(desk / "run").config()
    assert config["unlabelled"] == str(desk / "more")
    assert config["settings"]["unlabelled"]["shape"] == [20, 3, 12, 12]
    assert config["settings"]["unlabelled_batch"] == 20
    assert config["settings"]["name"] == "Strong"
    assert (config["lr"], config["weight_decay"], config["target_batch_size"]) == (0.1, 5e-4, 12)
    assert config["optimizer"] == "sgd, nesterov=True"
    assert soseleto.load(desk / "run").outputs(np.zeros((2, 3, 12, 12), dtype=np.uint8)).shape == (2, 2)
    page = (desk / "run" / "report.html").read_text("utf-8")
    assert "The probability that a source example’s label is right" in page
    assert "lignment" not in page
    without = [word for word in words(desk, "without") if word not in ("--unlabelled", desk / "more")]
    assert type_(*without)[0] == 0
    assert "unlabelled" not in RunFolder.open(desk / "without").config()
    one, other = (RunFolder.open(desk / name).ranking() for name in ("run", "without"))
    assert len(one["weight"]) == 48
    assert sorted(one["weight"].tolist()) != sorted(other["weight"].tolist())


def numbers(path: Path, n: int, seed: int, columns: str = "a,y,colour,label") -> Path:
    """A table with gaps; ``y`` is a feature, since the labels are in ``label``."""
    draw = np.random.default_rng(seed)
    a, y = draw.normal(size=(2, n)).round(3)
    found = {
        "a": ["" if row % 7 == 0 else str(a[row]) for row in range(n)],
        "y": [str(value) for value in y],
        "colour": [("red", "blue", "green")[row % 3] for row in range(n)],
        "label": ["high" if value > 0 else "low" for value in y],
        "also": ["1"] * n,
    }
    named = columns.split(",")
    lines = [",".join(found[name][row] for name in named) for row in range(n)]
    path.write_text("\n".join([columns, *lines]) + "\n")
    return path


@pytest.mark.parametrize("columns", ["a,y,colour", "colour,label,y,a"])
def test_a_table_with_or_without_its_label_column(columns: str, tmp_path: Path) -> None:
    source, target = numbers(tmp_path / "s.csv", 60, 0), numbers(tmp_path / "t.csv", 20, 1)
    same = numbers(tmp_path / "same.csv", 60, 0, columns)
    pair = read_pair(source, target, mode="noisy", unlabelled=same)
    assert pair.unlabelled is not None
    assert torch.equal(pair.unlabelled, pair.source.inputs)


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["--method", "plain"], "--unlabelled has an effect with --method strong only"),
        (["--mode", "transfer"], "--method strong is for wrong labels, in noisy mode"),
        (["--unlabelled", "mroe"], "the unlabelled set 'mroe' is not there"),
        (["--unlabelled", __file__], "has an unknown ending: give an image folder, or a file ending in .csv"),
    ],
)
def test_mistakes_in_the_command(desk: Path, fit: Fit, others: list[str], said: str) -> None:
    code, out, err = fit("run", "more", *others)
    assert (code, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (desk / "run").exists()


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    after = Keeper.after

    def stopped(self: Keeper, now: int) -> None:
        if now == step:
            self._received = signal.SIGTERM
        after(self, now)

    monkeypatch.setattr(Keeper, "after", stopped)


def test_a_moved_folder_is_the_same_and_a_changed_one_is_not(
    desk: Path, fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        stop_at(2, patched)
        assert fit()[0] == 143
    shutil.copytree(desk / "more", desk / "changed")
    Image.new("RGB", (16, 16), "red").save(desk / "changed" / "2-0.png")
    code, _, err = fit("run", "changed")
    assert code == 2
    assert "holds a training with other settings, since the unlabelled data changed: give the same" in err
    (desk / "more").rename(desk / "moved")
    code, _, err = fit("run", "moved")
    assert code == 0, err
    assert any(one.get("text") == "resumed after step 2" for one in RunFolder(desk / "run").metrics())
