"""``soseleto.compare``: what is trained, resumed, evaluated and kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto import Compute, Heads, Probes, UsageError
from soseleto.comparison import trainings as module
from soseleto.defaults import DefaultMethod
from soseleto.errors import TrainingError
from soseleto.review.queue import Decision, Decisions, read_decisions
from soseleto.run_folder.folder import RunFolder
from soseleto.suspects.cross_fit import SHARPNESS
from typing_in import run as command


def points(n: int, seed: int, flipped: float = 0.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 2, generator=draw)
    labels = (inputs[:, 0] > 0).long()
    return inputs, torch.where(torch.rand(n, generator=draw) < flipped, 1 - labels, labels)


def net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))


def compare(**changes: Any) -> soseleto.Comparison:
    arguments: dict[str, Any] = {
        "model": net(), "source": points(120, 0, 0.3), "target": points(60, 1), "epochs": 1, "lr": 0.1, "folds": 2,
        "batch_size": 60, "device": "cpu",
    }  # fmt: skip
    return soseleto.compare(**{**arguments, **changes})


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the trainings that are begun."""
    places: list[str] = []
    true_fit = module.fit

    def fit(*arguments: Any, **more: Any) -> Any:
        places.append(str(more["out"]))
        return true_fit(*arguments, **more)

    monkeypatch.setattr(module, "fit", fit)
    return places


def test_it_compares_on_folds_and_leaves_the_model_as_it_is(trained: list[str]) -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    compared = compare(model=model, baselines=True, probes="auto")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trainings, on_features = ["soseleto", "ordinary", "mixed", "target_only"], ["scan_mixed", "scan_target_only"]
    assert [row["method"] for row in compared.rows] == [*trainings, "scan", *on_features]
    assert {row["examples"] for row in compared.rows} == {60}
    assert all(row["low"] <= row["accuracy"] <= row["high"] for row in compared.rows)
    assert set(compared.rows[1]["minus_soseleto"]) == {"value", "low", "high"}
    assert isinstance(compared.result, soseleto.Result)
    assert compared.result.weights.shape == (120,)
    assert compared.result.config["probes"] > 0
    assert compared.kept.temperature != 1.0
    assert compared.kept.predict(points(5, 2)[0]).shape == (5,)
    assert "accuracy on 60 target examples, each held out of its own training (2 folds)" in repr(compared)
    whole = int(compared.method not in ("soseleto", "ordinary", "scan"))  # a kept baseline's, on the whole target
    assert len(trained) == 1 + 2 + 1 + 2 + 2 + whole


def test_the_same_with_a_folder_and_a_function_that_makes_the_model(tmp_path: Path) -> None:
    memory, disk = compare(model=net), compare(model=net, out=tmp_path / "run")
    assert memory.rows == disk.rows
    inputs, _ = points(20, 3)
    assert torch.equal(memory.kept.predict_proba(inputs), disk.kept.predict_proba(inputs))
    loaded = soseleto.load(tmp_path / "run", model=net(), device="cpu")
    assert torch.equal(loaded.predict_proba(inputs), disk.kept.predict_proba(inputs))
    comparison = RunFolder.open(tmp_path / "run").comparison() or {}
    assert (comparison["rows"], comparison["kept"]) == (disk.rows, disk.method)
    assert not (tmp_path / "run" / "parts").exists()
    with pytest.raises(UsageError, match="holds a run already"):
        compare(model=net, out=tmp_path / "run")


def test_trainings_that_have_ended_are_not_repeated(
    tmp_path: Path, trained: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fit = tmp_path / "run", module.fit
    asked: dict[str, Any] = {"keep": "soseleto", "method": DefaultMethod(), "baselines": True, "probes": "auto"}

    def dies_in_the_fourth(*arguments: Any, **more: Any) -> Any:
        if len(trained) == 3:
            raise KeyboardInterrupt
        return fit(*arguments, **more)

    with monkeypatch.context() as patched:
        patched.setattr(module, "fit", dies_in_the_fourth)
        with pytest.raises(KeyboardInterrupt):
            compare(out=out, **asked)
    assert trained == [str(out), f"{out}/parts/fold-1/soseleto", f"{out}/parts/fold-2/soseleto"]
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for changes, message in (
        ({"epochs": 3}, "epochs was 1 and is 3"),
        ({"lr": 0.2}, "lr was 0.1 and is 0.2"),
        ({"folds": 3}, "folds was 2 and is 3"),
        ({"probes": Probes(precision=0.8)}, "probes.precision was 0.9 and is 0.8"),
        ({"compute": Compute(dtype=torch.bfloat16)}, "dtype"),
        ({"target": points(60, 2)}, "the data changed"),
        ({"model": nn.Linear(2, 2)}, "the model changed"),
        ({"mode": "transfer"}, 'mode was "noisy" and is "transfer"'),
        ({"baselines": False}, "baselines was true and is false"),
        ({"method": DefaultMethod(weight_step=0.2)}, "settings.weight_step was null and is 0.2"),
    ):
        with pytest.raises(UsageError, match=f"holds a training with other settings, since .*{message}"):
            compare(**{"out": out, **asked, **changes})
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    del trained[:]
    resumed = compare(out=out, **asked)
    assert trained[0] == f"{out}/parts/ordinary"
    assert len(trained) == 1 + 2 + 2
    assert not isinstance(resumed.result, soseleto.Result)  # its training ended in the first process
    whole = compare(**asked)
    assert resumed.rows == whole.rows
    assert resumed.kept.temperature == whole.kept.temperature


@pytest.mark.parametrize("baselines", [False, True])
def test_the_model_to_keep_is_chosen_without_the_test_set(baselines: bool) -> None:
    """With labels of a test set that speak for another model, or without one, the same model is kept."""
    inputs, labels = points(200, 4)
    kept = {}
    for name, test in {"none": None, "right": (inputs, labels), "turned": (inputs, 1 - labels)}.items():
        compared = compare(test=test, folds=None, baselines=baselines, lr=1e-6)
        weights = torch.cat([value.flatten().float() for value in compared.kept.model.state_dict().values()])
        kept[name] = compared.method, compared.kept.temperature, weights.tolist()
    assert kept["none"] == kept["right"] == kept["turned"]
    assert kept["none"][0] != "soseleto"  # whose labels the turned test set is nearer to
    assert repr(compared).endswith("is kept; nothing is chosen on the test examples")


def test_a_test_set_needs_no_folds_where_there_is_no_choice(trained: list[str]) -> None:
    compared = compare(test=points(50, 4), folds=None, probes=0, baselines=True, keep="soseleto")
    assert (compared.judged_on, compared.folds) == ("test", 0)
    assert {row["examples"] for row in compared.rows} == {50}
    assert len(trained) == 4  # without probes the main training is the one that is compared
    assert compared.kept.temperature == 1.0  # no held-out target examples to calibrate with


def test_without_baselines_and_folds_there_is_one_training(trained: list[str]) -> None:
    compared = compare(folds=0)
    assert (len(trained), compared.rows, compared.method) == (1, [], "soseleto")
    assert compared.kept.temperature == compared.result.temperature


def test_a_baseline_that_is_better_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The source's labels are noise, and the target is large enough."""
    inputs, _ = points(200, 5)
    source = inputs, torch.randint(2, (200,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(module, "features_by", lambda *_: None)  # no first answer
    compared = compare(source=source, epochs=1, lr=0.5, target_batch_size=4, batch_size=20, out=tmp_path / "run")
    assert compared.method == "target_only"
    state = RunFolder.open(tmp_path / "run").model_state()
    assert all(torch.equal(value, state[name]) for name, value in compared.kept.model.state_dict().items())


def test_transfer_mode_has_the_target_alone_and_heads_of_ones_own(tmp_path: Path) -> None:
    trunk, heads = nn.Sequential(nn.Linear(2, 8), nn.ReLU()), Heads(source=nn.Linear(8, 2), target=nn.Linear(8, 2))
    before = heads.target.weight.clone()
    compared = compare(model=trunk, mode="transfer", heads=heads, out=tmp_path / "run")
    assert [row["method"] for row in compared.rows] == ["soseleto", "target_only"]
    assert torch.equal(heads.target.weight, before)


def test_a_baseline_that_diverges_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fit, said = module.fit, []

    def diverges(*arguments: Any, **more: Any) -> Any:
        if more["method"] is not None and more["method"].name == "mixed":
            raise TrainingError("the loss is NaN.")
        return fit(*arguments, **more)

    monkeypatch.setattr(module, "fit", diverges)
    compared = compare(baselines=True, progress=lambda event, record: said.append(record.get("text")))
    assert "ordinary" in [row["method"] for row in compared.rows]
    assert "mixed" not in [row["method"] for row in compared.rows]
    assert "mixed training, fold 1 is left out of the comparison: the loss is NaN." in said


def written(folder: Path) -> dict[str, Path]:
    """Source and target as tables."""
    for name, (inputs, labels) in {"source": points(120, 0, 0.3), "target": points(60, 1)}.items():
        rows = [
            f"{x:.4f},{y:.4f},{'ab'[label]}" for (x, y), label in zip(inputs.tolist(), labels.tolist(), strict=True)
        ]
        (folder / f"{name}.csv").write_text("\n".join(["x,y,label", *rows]) + "\n")
    return {name: folder / f"{name}.csv" for name in ("source", "target")}


# The first answer


def test_the_first_answer_is_read_until_the_training_has_ended_and_kept_where_that_is_worse(tmp_path: Path) -> None:
    run, new, data, read = tmp_path / "run", tmp_path / "new.npz", written(tmp_path), {}
    np.savez(new, x=points(60, 3)[0].numpy())

    def look(event: str, record: dict[str, Any]) -> None:
        if event == "step" and not read and (run / "config.json").exists():  # within the main training
            read["ended"] = RunFolder(run / "first").has_ended(), RunFolder(run).has_ended()
            read["ranking"] = command("rank", run, "--worst", 3).splitlines()
            read["predicted"] = command("predict", run, new, "--device", "cpu").splitlines()
            Decisions(RunFolder.open(run)).decide(Decision("7", "drop"))

    compared = compare(**data, lr=1e-6, out=run, progress=look)
    assert read["ended"] == (True, False)
    assert (len(read["ranking"]), len(read["predicted"])) == (1 + 3, 1 + 60)
    assert [row["method"] for row in compared.rows] == ["soseleto", "scan", "scan_mixed", "scan_target_only"]
    assert compared.method == "scan"
    ours, first = (row["accuracy"] for row in compared.rows[:2])
    assert ours < first
    inputs, labels = points(200, 2)
    for model in (None, net()):
        loaded = soseleto.load(run, model=model, device="cpu")
        assert torch.equal(loaded.predict_proba(inputs), compared.kept.predict_proba(inputs))
        assert loaded.evaluate((inputs, labels))["accuracy"] > 85
    assert set(read_decisions(RunFolder.open(run))) == {"7"}
    assert compared.kept.classes == ("a", "b")  # files are read as by fit
    known = json.loads((run / "source.json").read_text())
    assert known["path"] == str(data["source"])


def test_weights_start_at_beliefs_of_an_answer_that_has_not_seen_what_is_held_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers, true_fit = [], module.fit

    def fit(model: nn.Module, source: Any, target: Any, mode: str, **more: Any) -> Any:
        result = true_fit(model, source, target, mode, **more)
        judgement = more["probes"].evidence.judgement
        assert torch.equal(result.weights, torch.from_numpy(judgement.belief**SHARPNESS).float())
        answers.append((judgement.belief, judgement.trusted_labels.tolist(), target.labels.tolist()))
        return result

    monkeypatch.setattr(module, "fit", fit)
    compare(method=soseleto.Soseleto(initial_weight="beliefs", weight_step=None))
    (whole, *_), *folds = answers
    assert len(folds) == 2
    for belief, known, trained_on in folds:
        assert known == trained_on
        assert len(known) < 60
        assert not np.array_equal(belief, whole)


def test_planted_probes_make_another_source_of_which_nothing_is_believed_beforehand() -> None:
    source, target = points(120, 0, 0.3), points(60, 1)
    evidence = soseleto.scan(source, target, device="cpu").evidence
    method = soseleto.Soseleto(initial_weight="beliefs", weight_step=None)
    more: dict[str, Any] = {"method": method, "epochs": 1, "device": "cpu"}
    planted = soseleto.fit(net(), source, target, probes=Probes(share=0.5, evidence=evidence), **more)
    assert planted.weights.eq(1.0).all()
    assert soseleto.fit(net(), source, target, probes=Probes(share=None, evidence=evidence), **more).weights.min() < 0.5
    with pytest.raises(UsageError, match=r"initial_weight must lie in .* got 'belief'"):
        soseleto.Soseleto(initial_weight="belief")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keep": "mixed"}, "keep must be 'best' or 'soseleto', got 'mixed'"),
        ({"folds": 1}, "folds must be 0, or from 2 to 30 with this target, got 1"),
        ({"folds": 31}, "folds must be 0, or from 2 to 30 with this target, got 31"),
        ({"model": "mlp"}, "model must be a module, or a function that makes one, got str"),
        ({"target": (torch.randn(20, 2), torch.randn(20, 2))}, "labels that are numbers are compared in noisy mode"),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        compare(**changes)
