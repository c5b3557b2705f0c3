"""The paper's synthetic experiment: its data, its run folder, and what it must find."""

import json
from pathlib import Path

import pytest
import torch

import experiments
from experiments import synthetic
from soseleto.errors import UsageError
from soseleto.run_folder.folder import RunFolder
from soseleto.training.result import Result


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    out = tmp_path_factory.mktemp("synthetic") / "run"
    return synthetic.run(out, seed=0), out


def test_the_data_are_the_papers() -> None:
    source, target, test = synthetic.make_data(seed=3)
    assert (len(source), len(target), len(test)) == (500, 50, 2000)
    assert source.truth is not None
    assert int((source.labels != source.truth).sum()) == 100
    for examples, right in ((source, source.truth), (target, target.labels), (test, test.labels)):
        assert torch.equal(right, (examples.inputs[:, 0] > 0).long())
        assert float(examples.inputs.abs().max()) <= 1
        assert float(examples.inputs.min(0).values.max()) < -0.9  # the whole square, not a part
        assert float(examples.inputs.max(0).values.min()) > 0.9


def test_a_seed_is_one_draw_and_no_other() -> None:
    once, again, other = (synthetic.make_data(seed) for seed in (1, 1, 2))
    assert [e.fingerprint() for e in once] == [e.fingerprint() for e in again]
    assert all(a.fingerprint() != b.fingerprint() for a, b in zip(once, other, strict=True))
    assert not torch.equal(once[0].inputs[:50], once[1].inputs)


def test_the_model_depends_on_the_seed_and_leaves_the_random_state_alone() -> None:
    before = torch.random.get_rng_state()
    first, same, other = (synthetic.make_model(seed).state_dict() for seed in (0, 0, 1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_it_finds_what_the_paper_finds(found: tuple[Result, Path]) -> None:
    result, _ = found
    numbers = synthetic.summary(result, 0)
    # One draw; the means over twenty are held against the paper where the results file is tested.
    assert numbers["clean_above"] >= 0.95
    assert numbers["flipped_below"] >= 0.85
    assert numbers["missed_distance"] <= 0.15
    assert numbers["accuracy"] >= 96


def test_the_summary_against_a_plain_count(found: tuple[Result, Path]) -> None:
    result, out = found
    ranking = RunFolder.open(out).ranking()
    low, wrong = ranking["weight"] < 0.1, ranking["wrong"]
    numbers = synthetic.summary(result, 0)
    assert numbers["clean_above"] == pytest.approx((~low)[~wrong].mean())
    assert numbers["flipped_below"] == pytest.approx(low[wrong].mean())
    missed = abs(ranking["x0"][wrong & ~low])
    assert numbers["missed_distance"] == pytest.approx(float(torch.tensor(missed).quantile(0.5)))
    assert numbers["accuracy"] > 95


def test_the_run_folder_keeps_the_contract(found: tuple[Result, Path]) -> None:
    run = RunFolder.open(found[1])
    records = run.metrics()
    assert [record["event"] for record in records if record["event"] != "message"] == ["start"] + ["epoch"] * 100 + [
        "end"
    ]
    last = [record for record in records if record["event"] == "epoch"][-1]
    for key in (
        "epoch", "step", "lr", "source_loss", "target_loss", "mean_weight", "effective_source", "share_at_zero",
        "share_at_one", "condition", "predicted_change", "actual_change", "seconds",
    ):  # fmt: skip
        assert isinstance(last[key], int | float), key
    assert len(last["histogram"]) == 20
    assert {name: group["count"] for name, group in last["groups"].items()} == {"right": 400, "wrong": 100}
    columns = {"id", "label", "predicted_label", "weight", "score", "visits", "true_label", "wrong", "x0", "x1"}
    assert set(run.ranking()) == columns
    assert run.model_state().keys() == found[0].model.state_dict().keys()


def test_reproduce_writes_one_row_a_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic, "EPOCHS", 1)
    lines: list[str] = []
    path = experiments.reproduce("synthetic", tmp_path / "out", seeds=2, report=lines.append)
    results = json.loads(path.read_text())
    assert path.name == "synthetic.json"
    assert results.keys() == {"name", "commit", "device", "versions", "rows"}
    assert [(row["method"], row["setting"], row["seed"]) for row in results["rows"]] == [
        ("soseleto", {}, 300),
        ("soseleto", {}, 301),
    ]
    assert all(0 <= row["accuracy"] <= 100 and row["seconds"] > 0 for row in results["rows"])
    assert (path.parent / "seed-300" / "report.html").exists()
    assert lines[-1].startswith("mean of 2: ")


@pytest.mark.parametrize(
    ("name", "seeds", "sentence"),
    [("sinthetic", 1, "did you mean 'synthetic'"), ("synthetic", 0, "seeds must be at least 1")],
)
def test_bad_arguments_raise(tmp_path: Path, name: str, seeds: int, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        experiments.reproduce(name, tmp_path, seeds=seeds, report=print)
