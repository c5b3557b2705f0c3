"""``soseleto fit`` from end to end on tables: comparison, folds, kills, and everything that can be typed wrong."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import soseleto
from soseleto.comparison import trainings as comparison
from soseleto.run_folder.folder import RunFolder
from typing_in import Type


def write_table(path: Path, count: int, seed: int, flipped: float = 0.0) -> Path:
    """Points in the plane, labelled by their side; a share of the labels is flipped, the truth stands beside them."""
    draw = torch.Generator().manual_seed(seed)
    points = (torch.rand(count, 2, generator=draw) * 2 - 1).tolist()
    wrong = (torch.rand(count, generator=draw) < flipped).tolist()
    sides = ["right" if x > 0 else "left" for x, _ in points]
    other = {"right": "left", "left": "right"}
    rows = [
        f"{x:.4f},{y:.4f},{other[side] if flip else side}"
        for (x, y), side, flip in zip(points, sides, wrong, strict=True)
    ]
    path.write_text("\n".join(["a,b,label", *rows]) + "\n")
    return path


@pytest.fixture
def data(tmp_path: Path) -> list[object]:
    source = write_table(tmp_path / "source.csv", 300, 1, flipped=0.3)
    target = write_table(tmp_path / "target.csv", 60, 2)
    return ["--source", source, "--target", target, "--device", "cpu", "--batch-size", 64, "--lr", 0.1]


def test_it_plans_trains_compares_and_sums_up(type_: Type, data: list[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["--epochs", 4, "--baselines", "--probes", 0.3]
    code, said, err = type_("fit", *data, "--out", out, *words)
    assert code == 0, err
    assert "300 source and 60 target examples, noisy mode, 4 epochs in batches of 64" in said
    assert f"a first answer by the columns comes before the training, in {out / 'first'}" in said
    assert (
        "3 held-out folds of the target beside ordinary training, mixed training, target only: 10 more trainings"
        in said
    )
    found = RunFolder.open(out).comparison()
    rows = {row["method"]: row for row in found["rows"]}
    assert {row["examples"] for row in rows.values()} == {60}
    assert min(row["accuracy"] for row in rows.values()) > 75
    assert re.search(r"SOSELETO +\d+\.\d %", said)
    estimate = r"(unknown|\d+ % \(\d+ to \d+; from trusted examples\))"
    assert re.search(rf"\d+ suspects(: precision {estimate}, recall {estimate}|, unchecked: \d+ checks tell)", said)
    assert said.endswith(f"report: {out / 'report.html'}\n")
    assert not (out / "parts").exists()
    assert err.count("engine") == 1  # four SOSELETO trainings, one sentence
    loaded = soseleto.load(out)
    assert loaded.temperature == RunFolder.open(out).temperature() != 1.0
    again = type_("fit", *data, "--out", out, *words)
    assert again == (2, "", f"soseleto: {out} holds a run already: give --out another folder, or delete that one.\n")


def test_a_source_that_is_sorted_during_the_training_loses_the_rows_that_were_trained_on(
    type_: Type, data: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, source, true_train = tmp_path / "run", tmp_path / "source.csv", comparison.fit
    header, *lines = source.read_text().splitlines()

    def sorts_the_source(*given: object, **more: object) -> object:
        source.write_text("\n".join([header, *sorted(lines)]) + "\n")
        return true_train(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(comparison, "fit", sorts_the_source)
    assert type_("fit", *data, "--out", out, "--folds", 0, "--epochs", 1, "--no-baselines")[0] == 0
    code, _, err = type_("review", out, "--export", tmp_path / "clean.csv", "--suspects", "drop")
    assert code == 1
    assert "has changed since the training or is gone: restore it, or train again" in err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--folds", "1"], "folds must be 0, or from 2 to 30 with this target, got 1"),
        (["--suspect-precision", "95"], "the precision of the suspects must lie between 0 and 1, got 95.0"),
        (["--epochs", "0"], "invalid value for '--epochs'"),
        (["--device", "cuda:0"], "needs a GPU, but PyTorch sees none here: use --device cpu."),
        (["--method", "storng"], "unknown method 'storng' (did you mean 'strong'?)"),
        (["--model", "lenet"], "takes square images"),
        (["--model", "gone.py:make"], "there is no file gone.py"),
        (["--model", "quick", "--train", "head"], "are for pretrained networks that read images, and quick is"),
        (["--labels-before", "was"], "has no column 'was' for before_column"),
        (["--labels-before", "was", "--mode", "transfer"], "--labels-before has no effect in transfer mode"),
        (["--label-column", "lable"], "did you mean 'label'"),
        (["--test", "nowhere.csv"], "'nowhere.csv' is not there"),
        (["--config", "nowhere.toml"], "there is no file nowhere.toml"),
    ],
)
def test_words_that_are_off_are_one_sentence(
    type_: Type, data: list[object], tmp_path: Path, words: list[str], sentence: str
) -> None:
    code, _, err = type_("fit", *data, "--out", tmp_path / "run", "--epochs", "1", *words)
    assert code == 2, err
    assert sentence in err
    assert err.startswith("soseleto: ")
    assert (err.count("\n"), err[-2:]) == (1, ".\n")


CONFIGS = {
    "epoch = 3": "has an unknown key 'epoch' (did you mean 'epochs'?)",
    "epochs = 'three'": "invalid value for '--epochs'",
    "weight_step = 0.1": "has an unknown key 'weight_step'",  # it is in [method]
    "[probes]\nprecison = 0.9": "[probes] has no key 'precison' (did you mean 'precision'?)",
    "[reading]\nencodng = 'latin-1'": "[reading] has no key 'encodng' (did you mean 'encoding'?)",
    "[compute]\ndtype = 'bf16'": "unknown dtype 'bf16'",
    "[method]\nengine = 'fastest'": "unknown engine 'fastest'",
    "[method]\nweight_stp = 1": "[method] has no key 'weight_stp' (did you mean 'weight_step'?)",
    "[optimizer]\nname = 'Adm'": "[optimizer] has an unknown name 'Adm' (did you mean 'Adam'?)",
    "[augment]\ncrop = 2": "[augment] is for images",
    "augment = 'crop'": "augment must be a table",
    "[checkpoints]\nseconds = -1": "seconds between checkpoints must be 0 or more",
    "epochs": "is not TOML",
}


@pytest.mark.parametrize("text", CONFIGS, ids=lambda text: text.split("=")[0])
def test_mistakes_in_a_config_are_one_sentence(text: str, type_: Type, data: list[object], tmp_path: Path) -> None:
    (tmp_path / "fit.toml").write_text(text)
    code, _, err = type_("fit", *data, "--out", tmp_path / "run", "--config", tmp_path / "fit.toml")
    assert code == 2, err
    assert CONFIGS[text] in err
    assert (err.count("\n"), err[-2:]) == (1, ".\n")


def test_a_config_has_all_settings_and_the_line_wins(type_: Type, data: list[object], tmp_path: Path) -> None:
    (tmp_path / "fit.toml").write_text(
        f"source = '{tmp_path / 'source.csv'}'\ntarget = '{tmp_path / 'target.csv'}'\ndevice = 'cpu'\n"
        "epochs = 7\nbaselines = false\nfolds = 0\nbatch_size = 64\ntarget_batch_size = 16\n"
        "[probes]\nshare = 0.25\nprecision = 0.8\n"
        "[optimizer]\nname = 'SGD'\nlr = 0.2\nmomentum = 0.5\n[compute]\ncuda_graph = false\n"
        "[method]\nweight_step = 0.2\ntarget_share = 0.4\nengine = 'forward'\n"
    )
    out = tmp_path / "run"
    code, _, err = type_("fit", "--config", tmp_path / "fit.toml", "--epochs", 1, "--out", out)
    assert code == 0, err
    config = RunFolder.open(out).config()
    found = {name: config[name] for name in ("epochs", "batch_size", "target_batch_size", "probes")}
    assert found == {"epochs": 1, "batch_size": 64, "target_batch_size": 16, "probes": 15}
    assert config["suspect_precision"] == 0.8
    settings = config["settings"]
    assert (settings["weight_step"], settings["engine"], settings["gradients"]["share"]) == (0.2, "forward", 0.4)


@pytest.mark.long
def test_earlier_labels_and_doubt(type_: Type, data: list[object], tmp_path: Path) -> None:
    target = tmp_path / "target.csv"
    header, *lines = write_table(target, 120, 2).read_text().splitlines()
    other = {"right": "left", "left": "right"}
    was = [other[line.split(",")[-1]] if row % 4 == 0 else line.split(",")[-1] for row, line in enumerate(lines)]
    target.write_text("\n".join([f"{header},was", *map(",".join, zip(lines, was, strict=True))]) + "\n")
    words = ["--epochs", 1, "--no-baselines", "--labels-before", "was"]
    code, said, err = type_("fit", *data, "--out", tmp_path / "run", *words)
    assert code == 0, err
    assert (RunFolder.open(tmp_path / "run").suspects() or {})["basis"] == "from earlier labels"
    assert "from earlier labels" in said or "unknown" in said
