"""The benchmarks run, their contenders agree, and their numbers can be read back; speed is not tested here."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tiny_text_model

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ALWAYS = (
    "loop of the notebook",
    "loop, one example at a time",
    "torch.func vmap(grad)",
    "double backward (Learning to Reweight)",
)
# The optional packages emit warnings of their own.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module", autouse=True)
def _ready() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # toy sizes: a second thread only adds overhead
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))
    torch.set_num_threads(threads)


def run(name: str, out: Path, *options: str) -> list[dict[str, Any]]:
    """The rows that a benchmark's tiny mode writes."""
    importlib.import_module(name).main(["--device", "cpu", "--tiny", "--out", str(out), *options])
    written = json.loads(out.read_text(), parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert written["name"] == name
    assert written["versions"]["torch"] == torch.__version__
    assert {"device", "threads", "commit"} <= written.keys()
    return written["rows"]


@pytest.mark.parametrize("job", ["alignments", "step"])
def test_peers_give_equal_answers(job: str) -> None:
    peers = importlib.import_module("peers")
    absent = peers.missing()
    for case in peers.peer_cases(torch.device("cpu"), tiny=True):
        errors = peers.compare(case, job, torch.device("cpu"), torch.float64)
        assert set(ALWAYS) <= errors.keys()
        assert set(peers.PEERS) - set(absent) <= errors.keys()
        assert "ours, joint" in errors
        assert max(errors.values()) < 1e-12, f"{case.name}: {errors}"


def test_comparison_sees_a_wrong_answer() -> None:
    peers = importlib.import_module("peers")
    right = peers.Answer(torch.ones(3), {"weight": torch.ones(2, 2)})
    assert peers.relative_error(right, right) == 0.0
    assert peers.relative_error(peers.Answer(torch.ones(2), {}), right) == 0.0
    assert peers.relative_error(peers.Answer(-torch.ones(3), right.gradient), right) == 2.0
    assert peers.relative_error(peers.Answer(torch.ones(3), {"weight": torch.zeros(2, 2)}), right) == 1.0


@pytest.mark.long
def test_end_to_end(tmp_path: Path) -> None:
    rows = run("end_to_end", tmp_path / "end_to_end.json", "--epochs", "1", "--limit", "40")
    assert len(rows) == 4
    assert rows[-1]["ratio"] == 1.0
    assert all(row["seconds"] > 0 for row in rows)
    assert all(row["accuracy"] is None for row in rows)  # of random images


@pytest.mark.parametrize("adapter", ["full", pytest.param("lora", marks=pytest.mark.long)])
def test_steps_of_language_models(adapter: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers" if adapter == "full" else "peft")
    (row,) = run("language", tmp_path / "language.json", "--only", f"tiny {adapter}")
    assert row["time"] > 0
    assert row["memory"] > 0


def test_language_peers_give_equal_answers() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    peers = importlib.import_module("language_peers")
    case = peers.line(tiny=True)
    problem = peers.problem_of(case, case.source, torch.device("cpu"), torch.float64)
    right_q, right_g = peers.ours(problem)()
    for name, make in peers.CONTENDERS.items():
        q, g = make(problem)()
        torch.testing.assert_close(q.double(), right_q, rtol=1e-4, atol=1e-7, msg=f"{name}: alignments")
        for parameter, wanted in right_g.items():
            found = g[parameter].double()
            torch.testing.assert_close(found, wanted.double(), rtol=1e-4, atol=1e-7, msg=f"{name}: {parameter}")


@pytest.mark.long
def test_host_time() -> None:
    """Ours dispatches more operators than an ordinary step, by the layerwise engine."""
    pytest.importorskip("transformers")
    models = importlib.import_module("models")
    row = models.host_row(models.host_lines()[0], rounds=1)
    assert row["engine"] == "layerwise"
    assert 1.0 < row["times operators"] < 2.5


@pytest.mark.long
def test_fine_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    fine_tuning = importlib.import_module("fine_tuning")
    monkeypatch.setattr(fine_tuning, "settle", lambda step, engine: step())
    rows = run("fine_tuning", tmp_path / "fine_tuning.json")
    assert [(row["part"], row.get("method"), row["engine"], row["graph"]) for row in rows] == [
        ("fit", "many wrong", "layerwise", False),
        ("fit", "Soseleto()", "layerwise", False),
        ("trainer", None, "layerwise", False),
    ]
    assert all(row["times"] == pytest.approx(row["ours ms"] / row["plain ms"]) for row in rows)
    assert 1.0 < rows[0]["memory"] < 5.0  # that of a step with a proof
    good = {**rows[0], "times": 1.2, "memory": 1.1}
    assert fine_tuning.shortfalls([good]) == []
    bad = [{**good, "times": 1.31}, {**good, "memory": 1.16}, {**good, "engine": "forward"}]
    assert [line.partition(":")[2].split()[0] for line in fine_tuning.shortfalls(bad)] == ["1.31x", "1.16x", "the"]


@pytest.fixture
def coverage() -> Any:
    """By its file: a package on PyPI has the same name."""
    spec = importlib.util.spec_from_file_location("benchmark_coverage", BENCHMARKS / "coverage.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.long
def test_coverage_compares_each_basis_with_the_truth(tmp_path: Path, coverage: Any) -> None:
    draw = np.random.default_rng(0)
    truth = draw.integers(0, 4, 900)
    points = (3 * np.array([[0, 0], [1, 0], [1, 1], [0, 1]])[truth] + draw.normal(size=(900, 2))).astype(np.float32)
    np.savez(tmp_path / coverage.FILE, **{"table/x": points, "table/y": truth})
    cell = coverage.Cell("table", "uniform", 0.2, 0)
    rows = coverage.rows_of(cell, tmp_path / coverage.FILE, "cpu", 2, (400, 100, 300))
    assert [row["basis"] for row in rows] == [coverage.WITHOUT, "audited", "from earlier labels"]
    assert all(0.1 < row["true share"] < 0.3 for row in rows)
    few = coverage.Cell("table", "uniform", 0.005, 0)
    rows += coverage.rows_of(few, tmp_path / coverage.FILE, "cpu", 1, (400, 100, 300))
    assert rows[-1]["suspects"] is None  # no earlier label was wrong, so that none can be planted
    out = tmp_path / "coverage.json"
    coverage.write_rows(out, torch.device("cpu"), rows)
    assert coverage.read_rows(out) == rows
    kind = ["--only", "table", "--noise", "uniform", "--rates", "0.2", "--seeds", "1", "--device", "cpu"]
    coverage.main(["--data", str(tmp_path), "--out", str(out), *kind])
    assert coverage.read_rows(out) == rows  # it was finished


def test_coverage_counts_what_is_unknown_or_empty(coverage: Any) -> None:
    name = {"data": "digits", "noise": "hard", "rate": 0.2, "basis": "audited", "seed": 3}
    known = {"precision": [0.9, 0.8, 1.0], "true precision": 0.85, "share": [0.2, 0.1, 0.3], "true share": 0.35}
    unknown = {"precision": None, "true precision": 0.5, "share": [0.2, 0.1, 0.3], "true share": 0.2}
    rows = [name | known | {"suspects": 5}, name | unknown | {"suspects": 5}, name | unknown | {"suspects": 0}]
    rows += [{**rows[0], "noise": coverage.CHOSEN_ON}, name | {"suspects": None}]
    found = {line["mistakes"]: line for line in coverage.summary(rows) if line["basis"] == "audited"}
    assert set(found) == {"all", "hard"}
    assert found["all"]["draws"] == 4
    assert found["all"]["precision held %"] == 100
    assert found["all"]["share held %"] == pytest.approx(200 / 3)
    assert found["all"]["share width"] == pytest.approx(20)
    assert (found["all"]["precision unknown"], found["all"]["share unknown"], found["all"]["no suspects"]) == (2, 1, 1)


def test_scan_beside_cleanlab(tmp_path: Path) -> None:
    pytest.importorskip("cleanlab", reason="cleanlab is not installed")
    out = tmp_path / "scan.json"
    (row,) = importlib.import_module("scan").main(["--short", "--features", str(tmp_path), "--out", str(out)])
    assert json.loads(out.read_text())["rows"] == [row]
    assert row["auroc"]["joined"] > row["auroc"]["cleanlab"] > 0.9  # pairs
    assert row["accuracy"]["ours"] > row["accuracy"]["ordinary"] > 80
    assert row["true_precision"] > 0.8
    assert row["share"][1] <= row["true_share"] <= row["share"][2]


def test_the_time_of_a_scan_of_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    tiny_text_model.make_folder(tmp_path / "pretrained" / "minilm")
    (tmp_path / "text").mkdir()
    monkeypatch.setenv("SOSELETO_DATA", str(tmp_path))
    for seed, split in enumerate(("train", "test")):
        reviews = tiny_text_model.write_reviews(tmp_path / "reviews.csv", 60, seed=seed).read_text()
        lines = reviews.replace("review,label,truth", "text,label,gt").replace("neg", "0").replace("pos", "1")
        (tmp_path / "text" / f"noisy_ag_news_{split}.csv").write_text(lines)
    options = ["--texts", "40", "--trusted", "20", "--models", str(tmp_path), "--out", str(tmp_path / "out.json")]
    first, second = importlib.import_module("scan").main(options)
    assert first["setting"] == {"texts": 40, "trusted": 20, "run": "first"}
    assert all(row["seconds"] > row["encoder_seconds"] > 0 for row in (first, second))
    assert json.loads((tmp_path / "out.json").read_text())["rows"] == [first, second]


def test_strong_step(tmp_path: Path) -> None:
    strong_step = importlib.import_module("strong_step")
    rows = strong_step.main(["--tiny", "--device", "cpu", "--only", "ordinary", "strong", "--out", str(tmp_path / "o")])
    assert [row["line"] for row in rows] == ["ordinary", "strong"]
    assert rows[0]["times"] == 1.0
    assert rows[1]["times"] == rows[1]["ms a step"] / rows[0]["ms a step"] > 0


@pytest.mark.long
def test_tables(tmp_path: Path) -> None:
    from experiments.data import data_root

    if not (data_root() / "tables" / "adult.csv").exists():
        pytest.skip("needs tables/adult.csv below SOSELETO_DATA")
    importlib.import_module("tables").main(
        ["--tiny", "--noise", "0.3", "--seeds", "1", "--out", str(tmp_path / "t.json")]
    )
    rows = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert {row["method"] for row in rows} >= {"gradient_boosting", "soseleto", "soseleto_then_boosting_mean"}
    assert all(50 < row["accuracy"] < 100 for row in rows)
    tables = importlib.import_module("tables")
    data = tables.split(0.3, 0, tiny=True)
    assert 0.2 < float((data.source.labels != data.true_labels).double().mean()) < 0.4
    tables.main(["--tiny", "--noise", "0.3", "--seeds", "1", "--out", str(tmp_path / "t.json")])  # nothing is repeated
    assert json.loads((tmp_path / "t.json").read_text())["rows"] == rows


def test_large_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large_data = importlib.import_module("large_data")
    monkeypatch.setattr(large_data, "REPEATS", 1)
    monkeypatch.setattr(large_data, "seconds_of_quick", lambda: 1.0)
    out = tmp_path / "large_data.json"
    kills = "1" if os.environ.get("SOSELETO_LONG_KILLS") else "0"
    sizes = ["--items", "600", "--examples", "100000", "--kills", kills]
    rows = large_data.main([*sizes, "--work", str(tmp_path), "--out", str(out)])
    assert json.loads(out.read_text())["rows"] == rows
    assert len(rows) == 8 + 2 * int(kills)
    limits = {row["what"]: row["at_most"] for row in rows if "at_most" in row}
    assert sorted(limits.values()) == sorted([1.3, 300, 2, 2000] + [0] * int(kills))
    assert all(row["value"] == 0 for row in rows if row.get("at_most") == 0)


@pytest.mark.long
def test_never_worse_runs_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, coverage: Any) -> None:
    monkeypatch.setitem(sys.modules, "coverage", coverage)  # not the package of that name
    never_worse = importlib.import_module("never_worse")
    draw = np.random.default_rng(0)
    truth = draw.integers(0, 2, 400)
    points = (3.0 * truth[:, None] + draw.normal(size=(400, 2))).astype(np.float32)
    np.savez(tmp_path / coverage.FILE, **{"table/x": points, "table/y": truth})
    cell = coverage.Cell("table", "uniform", 0.3, never_worse.FIRST_SEED)
    row = never_worse.row_of(cell, tmp_path / coverage.FILE, "cpu", (200, 20, 100), ["--epochs", "1"])
    assert set(row["accuracy"]) == {"soseleto", "ordinary", "mixed", "target_only"}
    assert all(40 <= accuracy <= 100 for accuracy in row["accuracy"].values())
    assert row["kept"] in row["accuracy"]


def test_regression() -> None:
    regression = importlib.import_module("regression")
    first = regression.row_of("diabetes", regression.SCAN, 0)
    assert 20 < first["explained_variance"] < 80
    shown = regression.summary([{**first, "line": "soseleto", "explained_variance": 30.0}, first])
    assert shown[1]["minus soseleto"] == pytest.approx(first["explained_variance"] - 30)
    shown = regression.summary([{**first, "line": "soseleto", "explained_variance": None}])
    assert shown[0]["mean"] == "diverged"
