"""``soseleto fit`` from end to end on tables: comparison, folds, kills, and everything that can be typed wrong."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas
import pytest
import torch
from safetensors.torch import load_file
from sklearn.datasets import load_breast_cancer

import soseleto
from soseleto.cli import comparison, summary, trainings
from soseleto.cli.choices import augment_for, augment_in_words
from soseleto.cli.fit_options import dtype_of, labels_before_of
from soseleto.cli.job import Job
from soseleto.data import Augment
from soseleto.errors import TrainingError, UsageError
from soseleto.run_folder.folder import SUSPECTS, RunFolder
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


def test_no_suspects_are_told_without_a_precision(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run")
    folder.write_ranking({"id": np.array(["a", "b"]), "mislabelled_probability": np.array([0.718, 0.1])})
    precision = {"value": 0.6, "low": 0.5, "high": 0.7, "basis": "assumes random mistakes"}
    best = {"count": 40, "precision": precision}
    folder.write_json(SUSPECTS, {"count": 0, "precision": {}, "recall": {}, "best": best})
    assert summary._suspects(folder) == (
        "no suspects: no label is wrong with more than 72 % probability; the 40 most suspicious are listed, precision "
        f"60 % (50 to 70; assumes random mistakes) (soseleto rank {folder.path} --suspects)"
    )


def test_it_plans_trains_compares_and_sums_up(type_: Type, data: list[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, said, err = type_("fit", *data, "--out", out, "--epochs", 4)
    assert code == 0, err
    assert "300 source and 60 target examples, noisy mode, 4 epochs in batches of 64" in said
    assert "give them with --labels-before COLUMN or FILE" in said
    assert (
        "3 held-out folds of the target beside ordinary training, mixed training and target only: 10 more trainings"
        in said
    )
    found = RunFolder.open(out).comparison()
    assert found is not None
    rows = {row["method"]: row for row in found["rows"]}
    assert {row["examples"] for row in rows.values()} == {60}
    assert min(row["accuracy"] for row in rows.values()) > 75
    assert re.search(r"SOSELETO +\d+\.\d %", said)
    estimate = r"(unknown|\d+ % \(\d+ to \d+; assumes estimated mistakes\))"
    assert re.search(rf"\d+ suspects: precision {estimate}, recall {estimate}", said)
    assert said.endswith(f"report: {out / 'report.html'}\n")
    assert not (out / "parts").exists()
    assert err.count("engine") == 1  # four SOSELETO trainings, one sentence
    loaded = soseleto.load(out)
    assert loaded.temperature == RunFolder.open(out).temperature() != 1.0
    again = type_("fit", *data, "--out", out, "--epochs", 4)
    assert again == (2, "", f"soseleto: {out} holds a run already: give --out another folder, or delete that one.\n")


def test_what_has_ended_is_not_repeated(
    type_: Type, data: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, trained, true_train = tmp_path / "run", [], trainings.fit

    def dies_in_the_fourth(*given: object, **more: object) -> object:
        trained.append(more["out"])
        if len(trained) == 4:
            raise KeyboardInterrupt
        return true_train(*given, **more)  # type: ignore[arg-type]

    words = ["fit", *data, "--epochs", 1, "--folds", 2, "--keep", "soseleto", "--out"]
    monkeypatch.setattr(trainings, "fit", dies_in_the_fourth)
    assert type_(*words, out)[0] == 130
    begun = RunFolder.open(out).metrics()
    code, _, err = type_(*words, out)
    assert code == 0, err
    assert trained[3:5] == [out / "parts/ordinary"] * 2  # the one that was cut short, and not those before it
    assert len(trained) == 4 + 5
    assert RunFolder.open(out).metrics() == begun
    monkeypatch.undo()
    whole = tmp_path / "whole"
    assert type_(*words, whole)[0] == 0
    assert RunFolder.open(whole).comparison() == RunFolder.open(out).comparison()
    assert RunFolder.open(whole).temperature() == RunFolder.open(out).temperature()


OTHER_SETTINGS = [
    (["--epochs", "2"], "epochs was 1 and is 2"),
    (["--lr", "0.2"], "lr was 0.1 and is 0.2"),
    (["--weight-decay", "0.01"], "weight_decay was 0.0 and is 0.01"),
    (["--weight-step", "0.2"], "settings.weight_step was 0.3 and is 0.2"),
    (["--target-share", "0.2"], "settings.gradients"),
    (["--engine", "forward"], 'settings.engine was "auto" and is "forward"'),
    (["--batch-size", "32"], "batch_size was 64 and is 32"),
    (["--target-batch-size", "16"], "target_batch_size was 32 and is 16"),
    (["--probes", "0.2"], 'probe_share was "auto" and is 0.2'),
    (["--suspect-precision", "0.8"], "suspect_precision was 0.95 and is 0.8"),
    (["--guarantee"], "guarantee was false and is true"),
    (["--no-doubt-labels"], "settings.source_loss"),
    (["--alignments", "last"], "settings.alignment"),
    (["--dtype", "bfloat16"], 'precision was null and is "torch.bfloat16"'),
    (["--non-finite", "skip"], 'non_finite was "stop" and is "skip"'),
    (["--seed", "1"], "seed was 0 and is 1"),
    (["--mode", "transfer"], 'mode was "noisy" and is "transfer"'),
    (["--folds", "2"], "folds was 0 and is 2"),
    (["--no-baselines"], "baselines was true and is false"),
    (["--model", "FOLDER/mine.py:make"], "the model changed"),
    (["--truth-column", "a"], "the data changed"),
    (["--target", "FOLDER/other.csv"], "the data changed"),
    (["--test", "FOLDER/other.csv"], "the data changed"),
]
WITHOUT_EFFECT = ["--micro-batch-size", "64", "--checkpoint-every", "5", "--probes", "0"]


def test_an_interrupted_comparison_continues_with_the_same_settings_only(
    type_: Type, data: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main training has ended, the comparison has not."""
    out = tmp_path / "run"
    words = ["fit", *data, "--out", out, "--folds", 0, "--epochs", 1]
    write_table(tmp_path / "other.csv", 60, 3)
    make = "from torch import nn\ndef make(classes, shape):\n    return nn.Linear(shape[0], classes)\n"
    (tmp_path / "mine.py").write_text(make)
    with monkeypatch.context() as patched:
        patched.setattr(Job, "_conclude", interrupted)
        assert type_(*words)[0] == 130
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for more, difference in OTHER_SETTINGS:
        code, _, err = type_(*words, *(word.replace("FOLDER", str(tmp_path)) for word in more))
        assert code == 2, (more, err)
        assert f"{out} holds a training with other settings, since " in err
        assert difference in err
        assert (err.count("\n"), err[-2:]) == (1, ".\n")
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert type_(*words)[0] == 0


def test_an_interrupted_comparison_continues_with_other_settings_that_have_no_effect(
    type_: Type, data: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["fit", *data, "--out", tmp_path / "run", "--folds", 0, "--epochs", 1, "--probes", 0]
    with monkeypatch.context() as patched:
        patched.setattr(Job, "_conclude", interrupted)
        assert type_(*words)[0] == 130
    killed, writing = (tmp_path / "run" / f".calibration.json.{process}.part" for process in (1 << 30, os.getpid()))
    for one in (killed, writing):
        one.write_text("half of a file")
    code, _, err = type_(*words, *WITHOUT_EFFECT)
    assert code == 0, err
    assert not killed.exists()
    assert writing.exists()  # of a process that is still there


def test_a_model_file_that_changed_is_another_model(
    type_: Type, data: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = "from torch import nn\ndef make(classes, shape):\n    return nn.Linear(shape[0], classes, bias={})\n"
    (tmp_path / "mine.py").write_text(make.format(True))
    words = [
        "fit",
        *data,
        "--out",
        tmp_path / "run",
        "--folds",
        0,
        "--epochs",
        1,
        "--model",
        f"{tmp_path}/mine.py:make",
    ]
    with monkeypatch.context() as patched:
        patched.setattr(Job, "_conclude", interrupted)
        assert type_(*words)[0] == 130
    (tmp_path / "mine.py").write_text(make.format(False))
    assert "since the model changed: give the same as before" in type_(*words)[2]


def test_a_source_that_is_sorted_during_the_training_loses_the_rows_that_were_trained_on(
    type_: Type, data: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, source, true_train = tmp_path / "run", tmp_path / "source.csv", trainings.fit
    header, *lines = source.read_text().splitlines()

    def sorts_the_source(*given: object, **more: object) -> object:
        source.write_text("\n".join([header, *sorted(lines)]) + "\n")
        return true_train(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(trainings, "fit", sorts_the_source)
    assert type_("fit", *data, "--out", out, "--folds", 0, "--epochs", 1, "--no-baselines")[0] == 0
    code, _, err = type_("review", out, "--export", tmp_path / "clean.csv", "--suspects", "drop")
    assert code == 1
    assert "has changed since the training: restore it, or train again" in err


def interrupted(self: Job, folder: RunFolder, kept: str) -> None:
    raise KeyboardInterrupt


def test_a_rival_that_diverges_is_left_out_and_said(
    type_: Type, data: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_train = trainings.fit

    def diverges(*given: object, **more: object) -> object:
        if str(more["out"]).endswith("fold-2/target_only"):
            raise TrainingError("the loss is NaN.")
        return true_train(*given, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(trainings, "fit", diverges)
    code, _, err = type_("fit", *data, "--out", tmp_path / "run", "--epochs", 1, "--folds", 2)
    assert code == 0, err
    assert "target only, fold 2 is left out of the comparison: the loss is NaN." in err
    rows = (RunFolder.open(tmp_path / "run").comparison() or {})["rows"]
    assert [row["method"] for row in rows] == ["soseleto", "ordinary", "mixed", "gradient_boosting"]


@pytest.mark.parametrize("keep", ["best", "soseleto"])
def test_the_best_model_is_kept(
    keep: str, type_: Type, data: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rival is made the winner; its model, trained on the whole target, is what the run predicts with."""
    monkeypatch.setattr(comparison, "winner", lambda found, **_: "mixed")
    out = tmp_path / "run"
    code, said, err = type_("fit", *data, "--out", out, "--epochs", 1, "--folds", 2, "--keep", keep)
    assert code == 0, err
    folder = RunFolder.open(out)
    own = load_file(out / "model.safetensors")
    state = folder.model_state()
    assert folder.kept == ("mixed" if keep == "best" else "soseleto")
    assert not all(torch.equal(state[name], own[name]) for name in own)  # those of the training that finds suspects
    assert ("Selection did not pay here: the model of mixed training is kept" in said) == (keep == "best")
    kept = load_file(out / "kept.safetensors")
    assert all(torch.equal(state[name], kept[name]) for name in kept)
    report = (out / "report.html").read_text()
    assert ("Selection did not pay here" in report) == (keep == "best")
    if keep == "best":
        predicted = soseleto.load(out, device="cpu").model.state_dict()
        assert all(torch.equal(predicted[name], state[name]) for name in own)
        assert json.loads((out / "calibration.json").read_text())["examples"] == 60


def test_an_unknown_model_to_keep_is_refused(type_: Type, data: list[object], tmp_path: Path) -> None:
    code, _, err = type_("fit", *data, "--out", tmp_path / "run", "--keep", "mixed")
    assert (code, err) == (2, "soseleto: --keep must be best or soseleto, got 'mixed'.\n")


def test_folds_and_baselines_can_be_left_out(type_: Type, data: list[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, said, _ = type_("fit", *data, "--out", out, "--epochs", 1, "--folds", 0, "--probes", 0)
    assert code == 0
    assert "accuracy" not in said
    assert "suspects: source examples of weight below 0.1" in said
    assert RunFolder.open(out).comparison() == {"judged_on": "target", "folds": 0, "rows": [], "kept": "soseleto"}
    test = write_table(tmp_path / "test.csv", 50, 3)
    more = ["--test", test, "--folds", 2, "--no-baselines", "--suspect-precision", 0.8]
    code, said, _ = type_("fit", *data, "--out", tmp_path / "other", "--epochs", 1, *more)
    assert code == 0
    assert "accuracy on 50 test examples" in said
    other = RunFolder.open(tmp_path / "other")
    assert [row["method"] for row in (other.comparison() or {})["rows"]] == ["soseleto"]
    assert json.loads((other.path / "calibration.json").read_text())["examples"] == 60  # the folds' held-out target
    assert (other.suspects() or {})["precision"]["value"] == pytest.approx(0.8, abs=0.05)


def test_a_scikit_learn_table_with_flipped_labels_through_a_csv(type_: Type, tmp_path: Path) -> None:
    frame = load_breast_cancer(as_frame=True).frame.sample(frac=1, random_state=3)
    source, target, test = frame[:369].copy(), frame[369:429], frame[429:]
    source["truth"] = source["target"]
    wrong = np.random.RandomState(4).rand(len(source)) < 0.3
    source["target"] = np.where(wrong, 1 - source["target"], source["target"])
    for name, part in {"source": source, "target": target, "test": test}.items():
        part.to_csv(tmp_path / f"{name}.csv", index=False)
    sets = [word for name in ("source", "target", "test") for word in (f"--{name}", tmp_path / f"{name}.csv")]
    out = tmp_path / "run"
    # 60 trusted rows are 18 probes: few suspects are sure to 95 %.
    options = ["--epochs", 15, "--device", "cpu", "--folds", 0, "--suspect-precision", 0.8]
    code, _, err = type_("fit", *sets, "--truth-column", "truth", "--out", out, *options)
    assert code == 0, err
    rows = {row["method"]: row["accuracy"] for row in (RunFolder.open(out).comparison() or {})["rows"]}
    assert rows["soseleto"] > max(90, rows["ordinary"])
    ranking = RunFolder.open(out).ranking()
    assert int(ranking["wrong"].sum()) == int(wrong.sum())
    found = ranking["is_label_issue"]
    assert ranking["wrong"][found].mean() > 0.9
    assert found[ranking["wrong"]].mean() > 0.6
    clean = tmp_path / "clean.csv"
    assert type_("review", out, "--export", clean, "--suspects", "relabel")[0] == 0
    corrected = pandas.read_csv(clean)
    assert list(corrected.columns) == list(source.columns)  # the table as it was, with other labels
    assert (corrected["target"] != corrected["truth"]).sum() < wrong.sum() / 2


def test_dtypes_by_name() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
    assert dtype_of("float16") is torch.float16
    assert dtype_of("float32") is dtype_of(None) is None  # no autocast


def test_augmentations_by_their_words() -> None:
    assert augment_for(None, (1, 28, 28)) == Augment(crop=2)
    assert augment_for("crop+flip", (3, 32, 32)) == Augment(crop=2, flip=True)
    assert augment_for("bend", (1, 28, 28)) == Augment(rotate=10, scale=0.15, shift=0.1, shear=20, elastic=0.12)
    assert augment_for("none", (1, 28, 28)) is None
    assert augment_for(None, (7,)) is None


@pytest.mark.parametrize(
    ("shape", "classes", "flip"),
    [
        ((3, 32, 32), ("cat", "dog"), True),
        ((3, 32, 32), ("0", "1"), False),  # SVHN
        ((3, 32, 32), ("a", "b"), False),
        ((3, 32, 32), ("12", "cat"), False),
        ((3, 32, 32), None, False),
        ((1, 32, 32), ("shirt", "shoe"), False),
    ],
)
def test_natural_images_are_mirrored_by_default(
    shape: tuple[int, ...], classes: tuple[str, ...] | None, flip: bool
) -> None:
    chosen = augment_for(None, shape, classes)
    assert chosen == Augment(crop=2, flip=flip)
    assert ("mirrored" in augment_in_words(chosen, chosen=True)) is flip
    assert augment_for("crop", shape, classes) == Augment(crop=2)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--folds", "1"], "--folds must be 0 or at least 2, got 1"),
        (["--folds", "31"], "--folds is 31, but the target has only 60 examples"),
        (["--augment", "crop"], "--augment crop is for images"),
        (["--augment", "crp"], "did you mean 'crop'"),
        (["--suspect-precision", "95"], "the precision of the suspects must lie between 0 and 1, got 95.0"),
        (["--precision", "0.9"], "there is no option --precision: write --suspect-precision 0.95"),
        (["--precision", "bfloat16"], "or --dtype bfloat16 for the number format of the model"),
        (["--dtype", "bf16"], "unknown dtype 'bf16' (did you mean 'bfloat16'?)"),
        (["--probes", "3"], "--probes must be a share between 0 and 1, or be 0 for none, got 3.0: leave it out"),
        (["--epochs", "0"], "--epochs must be at least 1, got 0: leave it out for the default."),
        (["--batch-size", "500"], "batch_size is 500, but the source has only"),
        (
            ["--target-batch-size", "500"],
            "--target-batch-size is 500, but the target has 42 examples to train on beside 18 probes",
        ),
        (["--lr", "-1"], "--lr must be above 0, got -1.0: leave it out for the default."),
        (["--lr", "nan"], "--lr must be above 0, got nan"),
        (["--weight-decay", "-1"], "--weight-decay must be 0 or more, got -1.0"),
        (["--weight-step", "0"], "--weight-step must be above 0"),
        (["--target-share", "1"], "--target-share must be a share between 0 and 1, got 1.0"),
        (["--device", "cuda:0"], "needs a GPU, but PyTorch sees none here: use --device cpu."),
        (["--engine", "fastest"], "unknown engine 'fastest'"),
        (["--device", "gpu"], "unknown device 'gpu'"),
        (["--model", "lenet"], "takes square images"),
        (["--model", "gone.py:make"], "there is no file gone.py"),
        (["--label-column", "lable"], "did you mean 'label'"),
        (["--test", "nowhere.csv"], "'nowhere.csv' is not there"),
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


def test_transfer_mode_has_the_target_alone_for_a_rival(type_: Type, data: list[object], tmp_path: Path) -> None:
    out = tmp_path / "run"
    code, _, err = type_("fit", *data, "--out", out, "--epochs", 1, "--mode", "transfer", "--folds", 2)
    assert code == 0, err
    rows = (RunFolder.open(out).comparison() or {})["rows"]
    assert [row["method"] for row in rows] == ["soseleto", "target_only"]
    assert set(soseleto.load(out).classes or ()) == {"left", "right"}


def test_regression_is_for_python(tmp_path: Path) -> None:
    (tmp_path / "numbers.csv").write_text("a,label\n1,0.5\n2,0.7\n3,0.9\n4,0.8\n")
    pair = soseleto.data.read_pair(tmp_path / "numbers.csv", tmp_path / "numbers.csv", mode="transfer", skip_bad=True)
    with pytest.raises(UsageError, match="real numbers"):
        Job.of(None, pair, None)  # type: ignore[arg-type]


def test_earlier_labels_doubt_and_a_guarantee(type_: Type, data: list[object], tmp_path: Path) -> None:
    target = tmp_path / "target.csv"
    header, *lines = write_table(target, 120, 2).read_text().splitlines()
    other = {"right": "left", "left": "right"}
    was = [other[line.split(",")[-1]] if row % 4 == 0 else line.split(",")[-1] for row, line in enumerate(lines)]
    target.write_text("\n".join([f"{header},was", *map(",".join, zip(lines, was, strict=True))]) + "\n")
    before = tmp_path / "before.csv"
    before.write_text("\n".join(["label", *was]) + "\n")
    found = {}
    for name, given in (("column", "was"), ("file", before)):
        if name == "file":
            target.write_text("\n".join([header, *lines]) + "\n")
        words = [
            "--epochs",
            1,
            "--folds",
            2,
            "--no-baselines",
            "--doubt-labels",
            "--guarantee",
            "--labels-before",
            given,
        ]
        code, said, err = type_("fit", *data, "--out", tmp_path / name, *words)
        assert code == 0, err
        folder = RunFolder.open(tmp_path / name)
        found[name] = folder.suspects() or {}
        assert found[name]["basis"] == "from earlier labels"
        assert folder.config()["guarantee"] is True
        assert "label_doubt" in json.dumps(folder.config()["settings"]["source_loss"])
        assert "from earlier labels" in said or "unknown" in said
    assert found["column"] == found["file"]
    assert found["column"]["count"] == 0 or found["column"]["precision"]["low"] >= 0.95
    for words, message in (
        (["--labels-before", "was"], "is neither a column of"),
        (["--labels-before", before, "--mode", "transfer"], "--labels-before has no effect in transfer mode"),
        (["--labels-before", before, "--probes", 0], "labels_before has no effect without probes"),
        (["--guarantee", "--probes", 0], "--guarantee has no effect, since this training has no probes"),
    ):
        code, _, err = type_("fit", *data, "--out", tmp_path / "off", *words)
        assert (code, message in err) == (2, True), err


@pytest.mark.parametrize(("wrong", "used"), [(6, True), (5, False)])
def test_earlier_labels_are_found_without_asking(wrong: int, used: bool) -> None:
    target = soseleto.data.Examples(torch.zeros(40, 4), torch.zeros(40, dtype=torch.int64), classes=("a", "b"))
    before = torch.tensor([1] * wrong + [0] * 20 + [-1] * (20 - wrong))  # -1: not in the source
    pair = soseleto.data.Pair(target, target, None, labels_before=before)
    options = SimpleNamespace(labels_before=None)
    found = labels_before_of(options, pair)  # type: ignore[arg-type]
    assert (found is before) is used
    assert used or found is None  # too few to be planted
