"""``soseleto fit`` on a table of numbers and words, and what can be done with its run."""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

import soseleto
from soseleto.data import TablePreparation, check_pair
from soseleto.prediction import export_onnx
from soseleto.review.queue import Queue
from soseleto.run_folder.folder import RunFolder
from typing_in import run as command
from typing_in import typed

SHORT = ("--epochs", "2", "--device", "cpu", "--no-baselines", "--folds", "0")
DROPPED = ("--drop-column", "note", "--drop-column", "again")


def rows(n: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    size = draw.normal(size=n)
    colour = draw.choice(["red", "green", "blue"], n)
    label = np.where(size + (colour == "red") > 0.3, "ripe", "raw")
    frame = pd.DataFrame({"size": size.round(3), "colour": colour, "crate": np.arange(n) + 7, "label": label})
    frame["weight"] = (1000 + 2 * size).round(4)
    frame["note"] = [f"crate {i} came with the morning boat on day {i % 5}" for i in range(n)]
    frame["again"] = frame["note"]
    frame.loc[::9, "size"] = None
    frame.loc[::11, "colour"] = "?"
    return frame


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tables and a finished run on them."""
    folder = tmp_path_factory.mktemp("desk")
    for name, n, seed in (("source", 120, 0), ("target", 40, 1), ("test", 50, 2)):
        rows(n, seed).to_csv(folder / f"{name}.csv", index=False)
    sets = [part for name in ("source", "target", "test") for part in (f"--{name}", folder / f"{name}.csv")]
    printed = command("fit", *sets, *DROPPED, "--out", folder / "run", *SHORT)
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
    new = pd.DataFrame({"colour": ["red", "violet", None], "size": [None, 0.5, -2.0], "weight": [900.0, None, 1001.5]})
    new.to_csv(desk / "new.csv", index=False)
    printed = command("predict", desk / "run", desk / "new.csv").splitlines()[1:]
    inputs = loaded.preparation.read(pa.Table.from_pandas(new))
    expected = loaded.predict_proba(inputs).max(1).values
    assert [float(line.rsplit(",", 1)[1]) for line in printed] == pytest.approx(expected.tolist(), abs=1e-4)
    assert loaded.predict_proba(new).allclose(loaded.predict_proba(inputs))
    assert loaded.evaluate(desk / "test.csv")["accuracy"] > 40


def test_the_ranking_has_the_columns_names_and_those_that_are_left_out(desk: Path) -> None:
    """In three significant digits, none of them twice, and one that has a taken name under another."""
    table = pd.read_csv(desk / "source.csv")
    listed = json.loads(command("rank", desk / "run", "--format", "json"))
    names = list(listed[0])
    assert names[-5:] == ["crate", "note", "size", "colour", "weight_source"]
    assert not {"again", "x0"} & set(names)
    for row in listed:
        true = table.loc[int(row["id"])]
        assert (row["crate"], row["note"], row["label"]) == (str(true["crate"]), true["note"], true["label"])
        assert row["weight_source"] == round(true["weight"])
        assert len(f"{row['weight']:f}".replace(".", "").strip("0")) <= 3
    command("rank", desk / "run", "--format", "parquet", "--out", desk / "full.parquet")
    full = pd.read_parquet(desk / "full.parquet")
    assert list(full) == names
    assert full["weight_source"].tolist() == pytest.approx(table["weight"][full["id"].astype(int)].tolist(), abs=1e-4)
    rows_read = full["id"].astype(int)
    assert full["size"].isna().tolist() == table["size"].isna()[rows_read].tolist()
    assert Queue(RunFolder(desk / "run")).to_json()["features"] == [*names[-5:-1], "weight"]
    page = (desk / "run" / "report.html").read_text()
    assert f">{listed[0]['note']}</td>" in page


def test_the_closing_lines_are_accuracy_wrong_labels_suspects_and_one_command(desk: Path) -> None:
    printed = command("scan", "--source", desk / "source.csv", "--target", desk / "target.csv", "--out", desk / "scan")
    lines = printed[printed.index("accuracy on 40 target examples") :].splitlines()
    said = [[line for line in lines if part in line] for part in ("labels are wrong", "suspects", "soseleto ")]
    assert [len(found) for found in said] == [1, 1, 1]
    assert re.match(r"next: soseleto (review|audit|rank) ", lines[-2])
    assert lines[-1].startswith("report: ")
    assert "effective source size" not in printed


def test_predict_counts_what_it_cannot_use(desk: Path) -> None:
    new = pd.DataFrame({"colour": ["red", "violet", None, "?"], "size": ["0,5", "90", "1.5", " "], "weight": None})
    new.to_csv(desk / "odd.csv", index=False)
    wanted = [
        "column 'size': 1 missing, 1 unreadable ('0,5'), 1 outside the training's range ('90'), of 4",
        "column 'colour': 2 missing, 1 unseen ('violet'), of 4",
        "column 'weight': 4 missing, of 4",
        "1 row without a value that can be used (3)",
    ]
    for strict, code in ((), 0), (("--strict",), 1):
        printed = typed("predict", desk / "run", desk / "odd.csv", *strict)
        assert printed.code == code
        assert all(line in printed.err for line in wanted)
        assert printed.out.splitlines()[4:] == ([] if strict else [f"{desk / 'odd.csv'}:3,,"])
    loaded = soseleto.load(desk / "run")
    assert (loaded.predict(new) == -1).tolist() == [False, False, False, True]
    assert loaded.predict_proba(new).isnan().all(1).tolist() == [False, False, False, True]


def test_a_range_that_does_not_overlap_is_reported(desk: Path, tmp_path: Path) -> None:
    far = rows(40, 1).assign(when="31.12.2021")
    near = rows(120, 0).assign(when=[f"{day:%d.%m.%Y}" for day in pd.date_range("1998-01-01", periods=120)])
    far["size"] *= 1000
    far["size"] = far["size"].where(far["size"].abs() > 10)
    problems = {one.text.split("'")[1]: one for one in check_pair(near, far, mode="noisy") if one.kind == "range"}
    assert set(problems) == {"size", "when"}
    assert not any(one.stops for one in problems.values())
    assert "no value within the source's range ('31.12.2021'; the source has 01.01.1998" in problems["when"].text


def test_an_onnx_file_describes_its_table(desk: Path, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    loaded = soseleto.load(desk / "run", device="cpu")
    file = export_onnx(loaded, tmp_path / "model.onnx")
    props = {entry.key: entry.value for entry in onnx.load(str(file)).metadata_props}
    assert TablePreparation.from_dict(json.loads(props["soseleto.table"])) == loaded.preparation
    assert json.loads(props["soseleto.classes"]) == list(loaded.classes or ())
