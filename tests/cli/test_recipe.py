"""``soseleto fit --recipe strong`` on images and tables: its plan, its run folder, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import soseleto
from soseleto.cli.choices import model_for, views_for
from soseleto.cli.job import Job
from soseleto.data import Examples, FeatureViews, Views
from soseleto.errors import UsageError
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


def test_it_says_its_recipe_and_writes_a_run(type_: Type, data: list[object], tmp_path: Path) -> None:
    words = ["--recipe", "strong", "--epochs", 2, "--folds", 0, "--no-baselines"]
    code, said, err = type_("fit", *data, *words)
    assert code == 0, err
    assert "recipe strong, as asked for: a teacher judges every label" in said
    assert "images are shifted by up to 12.5 %" in said
    config = RunFolder.open(tmp_path / "run").config()
    assert config["settings"]["name"] == "Strong"
    assert (config["lr"], config["weight_decay"], config["target_batch_size"]) == (0.1, 5e-4, 16)
    assert config["optimizer"] == "SGD, momentum 0.9, Nesterov"
    assert soseleto.load(tmp_path / "run").outputs(np.zeros((2, 1, 8, 8), dtype=np.uint8)).shape == (2, 2)
    assert len(RunFolder.open(tmp_path / "run").ranking()["weight"]) == 96
    page = (tmp_path / "run" / "report.html").read_text("utf-8")
    assert "The probability that a source example’s label is right" in page
    assert "probability that the label is right" in page
    assert "lignment" not in page


def test_plain_is_the_default_and_says_so(type_: Type, data: list[object], tmp_path: Path) -> None:
    code, said, err = type_("fit", *data, "--epochs", 1, "--folds", 0, "--no-baselines")
    assert code == 0, err
    assert "recipe plain, the default; --recipe strong is for networks that memorise" in said
    config = RunFolder.open(tmp_path / "run").config()
    assert (config["method"], config["lr"], config["weight_decay"]) == ("soseleto", 0.03, 0.0)
    assert "Mean alignment with the target gradient" in (tmp_path / "run" / "report.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--recipe", "storng"], "unknown recipe 'storng' (did you mean 'strong'?)"),
        (["--recipe", "strong", "--weight-step", 0.5], "--weight-step has no effect with --recipe strong"),
        (["--recipe", "strong", "--doubt-labels"], "--doubt-labels has no effect with --recipe strong"),
        (["--recipe", "strong", "--no-doubt-labels"], "--no-doubt-labels has no effect with --recipe strong"),
        (["--recipe", "strong", "--mode", "transfer", "--doubt-labels"], "--doubt-labels does not go with --recipe"),
        (["--recipe", "strong", "--micro-batch-size", 4], "leave it out, or write --recipe plain."),
        (["--recipe", "strong", "--augment", "bend"], "--recipe strong: write crop or crop+flip, or leave it out."),
    ],
)
def test_what_does_not_fit_is_one_sentence(type_: Type, data: list[object], words: list[object], said: str) -> None:
    code, _, err = type_("fit", *data, *words)
    assert code == 2
    assert said in err


def test_transfer_mode(type_: Type, data: list[object], tmp_path: Path) -> None:
    words = ["--recipe", "strong", "--mode", "transfer", "--epochs", 2, "--folds", 0, "--no-baselines"]
    code, said, err = type_("fit", *data, *words, "--weight-step", 0.2)
    assert code == 0, err
    assert "a teacher gives answers to learn beside the labels, and learning images are strongly augmented" in said
    config = RunFolder.open(tmp_path / "run").config()
    assert config["settings"]["name"] == "StrongTransfer"
    assert config["settings"]["selection"]["weight_step"] == 0.2
    assert config["augment_source"] == repr(Views(flip=False, count=1))
    assert (config["lr"], config["target_batch_size"]) == (0.03, 16)
    assert soseleto.load(tmp_path / "run").outputs(np.zeros((2, 1, 8, 8), dtype=np.uint8)).shape == (2, 2)


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


SHORT = ["--recipe", "strong", "--epochs", 2, "--folds", 0, "--no-baselines", "--device", "cpu"]


def test_a_table_of_numbers(type_: Type, tmp_path: Path) -> None:
    source, target = numbers(tmp_path / "s.csv", 80, 0), numbers(tmp_path / "t.csv", 20, 1)
    code, said, err = type_("fit", "--source", source, "--target", target, "--out", tmp_path / "run", *SHORT)
    assert code == 0, err
    assert "a teacher judges every label, and 40 % of the values are dropped in learning" in said
    config = RunFolder.open(tmp_path / "run").config()
    assert (config["settings"]["name"], config["model"]) == ("Strong", "table")
    assert config["augment_source"] == repr(FeatureViews())
    assert (config["lr"], config["weight_decay"], config["target_batch_size"]) == (0.03, 0.0, 20)
    assert len(RunFolder.open(tmp_path / "run").ranking()["weight"]) == 80


def test_choices() -> None:
    images = Examples(torch.zeros(1, 3, 32, 32, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64))
    assert views_for("crop", images) == Views(flip=False)
    assert views_for(None, images, ("cat", "dog")) == Views(flip=True)
    rows = Examples(torch.zeros(1, 7), torch.zeros(1, dtype=torch.int64))
    assert views_for(None, rows) == FeatureViews()
    with pytest.raises(UsageError, match="--augment crop is for images"):
        views_for("crop", rows)
    assert model_for(None, (3, 32, 32), None, "strong") == "preact-resnet18"
    assert model_for(None, (7,), None, "strong") == model_for(None, (7,), None)
    assert model_for(None, (3, 32, 32), None, "strong", "transfer") == "quick"


def planned(data: list[object], *words: object, type_: Type, monkeypatch: pytest.MonkeyPatch) -> tuple[Job, list[str]]:
    """The job of a command before its first training, and its plan."""
    seen: list[Job] = []

    def run(job: Job, progress: object) -> None:
        seen.append(job)
        raise UsageError("planned.")

    monkeypatch.setattr(Job, "run", run)
    _, _, err = type_("fit", *data, *words)
    assert "planned" in err
    return seen[0], seen[0].plan()


def test_a_deep_network_without_a_gpu_is_called_slow(
    type_: Type, data: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = [word for word in data if word not in ("--model", "mlp")]
    slow = "without a GPU this network is slow: --model quick is a smaller one"
    assert slow in planned(chosen, "--recipe", "strong", type_=type_, monkeypatch=monkeypatch)[1]
    asked = [*chosen, "--model", "preact-resnet18"]
    for words in ([*asked, "--recipe", "strong"], chosen):
        assert slow not in planned(words, type_=type_, monkeypatch=monkeypatch)[1]


def test_the_time_of_a_training_is_estimated_by_its_passes(
    type_: Type, data: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--recipe", "strong", "--batch-size", 24, "--target-batch-size", 8]
    job, _ = planned([*data, *words], type_=type_, monkeypatch=monkeypatch)
    (ordinary,) = {job.trainings.cost(part) for part in job.parts if part.method == "ordinary"}
    assert ordinary == 30 * 3 * 24
    assert job.trainings.cost(job.main) == 100 * (24 + 3 * 2 * (24 + 8))  # judged, and two views of all learned
    more = ["--unlabelled", pictures(tmp_path / "u.npz", 10, 2)]
    job, _ = planned([*data, *words, *more], type_=type_, monkeypatch=monkeypatch)
    assert job.trainings.cost(job.main) == 100 * (34 + 3 * 2 * (34 + 8))


@pytest.mark.parametrize(("words", "main", "said"), [([], 100, True), (["--epochs", 30], 30, False)])
def test_images_are_trained_longer_by_the_recipe_alone(
    words: list[object], main: int, said: bool, type_: Type, data: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    job, plan = planned([*data, "--recipe", "strong", *words], type_=type_, monkeypatch=monkeypatch)
    assert f"{main} epochs in batches of" in plan[0]
    assert ("the strong recipe trains images for 100 epochs by default (--epochs N)" in plan) == said
    assert ("beside ordinary training, mixed training and target only, each for 30 epochs" in plan[-1]) == said
    of = {part.method: job.trainings.epochs(part) for part in (job.main, *job.parts)}
    assert of == {"soseleto": main, **dict.fromkeys(set(of) - {"soseleto"}, 30)}
    transfer = [*data, "--recipe", "strong", "--mode", "transfer", *words]
    job, _ = planned(transfer, type_=type_, monkeypatch=monkeypatch)
    assert job.trainings.epochs(job.main) == 30
