"""``soseleto fit`` on a table of numbers and words, and what can be done with its run."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from typer.testing import CliRunner

import soseleto
from soseleto.cli.commands import app
from soseleto.cli.job import Job
from soseleto.data import TablePreparation
from soseleto.errors import DataError
from soseleto.prediction import final
from soseleto.prediction.export import _describe
from soseleto.prediction.final import FinalData, boosting, by_recipe
from soseleto.run_folder.folder import RunFolder

SHORT = ("--epochs", "2", "--device", "cpu", "--no-baselines", "--folds", "0")


def rows(n: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    size = draw.normal(size=n)
    colour = draw.choice(["red", "green", "blue"], n)
    label = np.where(size + (colour == "red") > 0.3, "ripe", "raw")
    frame = pd.DataFrame({"size": size.round(3), "colour": colour, "crate": np.arange(n) + 7, "label": label})
    frame["note"] = [f"crate {i} came with the morning boat on day {i % 5}" for i in range(n)]
    frame.loc[::9, "size"] = None
    frame.loc[::11, "colour"] = "?"
    return frame


def command(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables and a finished run on them."""
    folder = tmp_path_factory.mktemp("desk")
    for name, n, seed in (("source", 120, 0), ("target", 40, 1), ("test", 50, 2)):
        rows(n, seed).to_csv(folder / f"{name}.csv", index=False)
    sets = [part for name in ("source", "target", "test") for part in (f"--{name}", folder / f"{name}.csv")]
    printed = command("fit", *sets, "--drop-column", "note", "--out", folder / "run", *SHORT)
    (folder / "printed.txt").write_text(printed)
    return folder


def test_the_plan_is_printed_and_no_row_is_lost(desk: Path) -> None:
    printed = (desk / "printed.txt").read_text()
    for line in (
        "  size    number         14  ",
        "  colour  category       11  ",
        "  crate   left out        0  it numbers",
    ):
        assert line in printed
    assert "model table" in printed
    assert RunFolder(desk / "run").config()["n_source"] == 120


def test_the_preparation_is_in_the_run_and_predict_uses_it(desk: Path) -> None:
    loaded = soseleto.load(desk / "run")
    stored = RunFolder(desk / "run").config()["prepare"]["standardize"]
    assert TablePreparation.from_dict(stored) == loaded.preparation
    new = pd.DataFrame({"colour": ["red", "violet", None], "size": [None, 0.5, -2.0]})
    new.to_csv(desk / "new.csv", index=False)
    printed = command("predict", desk / "run", desk / "new.csv").splitlines()[1:]
    inputs = loaded.preparation.read(pa.Table.from_pandas(new))
    expected = loaded.predict_proba(inputs).max(1).values
    assert [float(line.rsplit(",", 1)[1]) for line in printed] == pytest.approx(expected.tolist(), abs=1e-4)
    assert loaded.predict_proba(new).allclose(loaded.predict_proba(inputs))
    assert loaded.evaluate(desk / "test.csv")["accuracy"] > 40


def test_an_onnx_file_describes_its_table(desk: Path) -> None:
    onnx = pytest.importorskip("onnx")
    value = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["a"], ["b"])], "g", [value("a", 1, [1])], [value("b", 1, [1])]
    )
    onnx.save(onnx.helper.make_model(graph), str(desk / "tiny.onnx"))
    loaded = soseleto.load(desk / "run")
    _describe(desk / "tiny.onnx", loaded.classes, loaded.preparation)
    assert described(desk / "tiny.onnx") == loaded.preparation
    props = {entry.key: entry.value for entry in onnx.load(str(desk / "tiny.onnx")).metadata_props}
    assert json.loads(props["soseleto.classes"]) == list(loaded.classes or ())
    _describe(desk / "tiny.onnx", loaded.classes, None)  # images have no preparation
    assert [entry.key for entry in onnx.load(str(desk / "tiny.onnx")).metadata_props] == ["soseleto.classes"]


def described(file: Path) -> TablePreparation:
    onnx = pytest.importorskip("onnx")
    props = {entry.key: entry.value for entry in onnx.load(str(file)).metadata_props}
    return TablePreparation.from_dict(json.loads(props["soseleto.table"]))


@pytest.mark.skipif("SOSELETO_LONG_ONNX" not in os.environ, reason="long: set SOSELETO_LONG_ONNX=1")
def test_onnx_takes_stored_rows_and_describes_them(desk: Path) -> None:
    runtime = pytest.importorskip("onnxruntime")
    command("export", desk / "run", "--onnx", desk / "model.onnx")
    stored = described(desk / "model.onnx").read(pa.Table.from_pandas(rows(5, 4)))
    session = runtime.InferenceSession(str(desk / "model.onnx"), providers=["CPUExecutionProvider"])
    (got,) = session.run(None, {"inputs": stored.numpy()})
    assert np.allclose(got, soseleto.load(desk / "run").predict_proba(stored).numpy(), atol=1e-5)


@pytest.fixture(scope="module")
def boosted(desk: Path) -> Iterator[tuple[Path, str]]:
    """A run with a final model of one member, and what was printed."""
    sets = [part for name in ("source", "target", "test") for part in (f"--{name}", desk / f"{name}.csv")]
    options = ("--epochs", "1", "--device", "cpu", "--probes", "0", "--final", "boosting", "--drop-column", "note")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(final, "MEMBERS", 1)
        yield desk / "boosted", command("fit", *sets, "--out", desk / "boosted", *options)


def test_the_comparison_of_tables_has_gradient_boosting(boosted: tuple[Path, str]) -> None:
    run, printed = boosted
    methods = {row["method"]: row for row in RunFolder(run).comparison()["rows"]}
    assert {"soseleto", "ordinary", "mixed", "target_only", "gradient_boosting", "final"} == set(methods)
    assert methods["gradient_boosting"]["examples"] == 50
    assert "predictions are made by the final model" in printed


def test_the_final_model_is_fitted_again_from_the_run(boosted: tuple[Path, str], desk: Path) -> None:
    run, _ = boosted
    loaded, frame = soseleto.load(run), rows(50, 2)
    tensors, recipe = RunFolder(run).final()
    ranking = RunFolder(run).ranking()
    mean, (source, target) = ranking["weight"].mean(), tensors["weights"].split([120, 40])
    assert (target == 1.0).all()
    assert 0.0 < float(source.min()) <= float(source.max()) <= mean + 1e-5
    given = FinalData(tensors["inputs"], tensors["labels"], torch.tensor([mean] * 120 + [1.0] * 40).float())
    judges = boosting(recipe["codes"], recipe["seed"], final.JUDGES)
    torch.testing.assert_close(tensors["weights"], given.doubted(judges, 120, recipe["seed"]).weights)
    by_hand = boosting(recipe["codes"], recipe["seed"])
    by_hand.fit(tensors["inputs"].numpy(), tensors["labels"].numpy(), sample_weight=tensors["weights"].numpy())
    stored = loaded.preparation.read(pa.Table.from_pandas(frame))
    assert np.allclose(loaded.predict_proba(stored), by_hand.predict_proba(stored.numpy()), atol=1e-6)
    accuracy = next(row for row in RunFolder(run).comparison()["rows"] if row["method"] == "final")["accuracy"]
    assert loaded.evaluate(desk / "test.csv")["accuracy"] == pytest.approx(accuracy)
    with pytest.raises(soseleto.UsageError, match="not a network"):
        loaded.export_onnx(desk / "final.onnx")


def test_a_final_model_is_rescued_when_the_folder_is_deleted(desk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of the folds, whose folders are gone, were kept in memory."""
    monkeypatch.setattr(final, "MEMBERS", 1)
    sets = ("--source", desk / "source.csv", "--target", desk / "target.csv", "--drop-column", "note")
    options = ("--epochs", 1, "--device", "cpu", "--probes", 0, "--final", "boosting", "--folds", 2, "--no-baselines")
    best = Job._best

    def deleted(job: Job) -> str:
        shutil.rmtree(desk / "lost")
        return best(job)

    monkeypatch.setattr(Job, "_best", deleted)
    command("fit", *sets, "--out", desk / "lost", "--rescue", desk / "rescued", *options)
    rescued = RunFolder(desk / "rescued")
    assert {row["method"]: row["examples"] for row in rescued.comparison()["rows"]}["final"] == 40
    weights, mean = rescued.final()[0]["weights"], rescued.ranking()["weight"].mean()
    assert (weights[120:] == 1.0).all()
    assert 0.5 * mean < float(weights[:120].mean()) <= mean + 1e-5


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(DataError, match=r"the final model 'os\.system' of the run is unknown"):
        by_recipe({"name": "os.system", "codes": [], "seed": 0})
