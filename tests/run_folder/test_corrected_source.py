"""An exported source is read as the source was, without the dropped rows: every column, every format."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet
import pytest
from PIL import Image

from fabricated import saved
from soseleto.data import Examples, Pair, Reading, as_examples
from soseleto.errors import DataError, UsageError
from soseleto.review.queue import Decision, Decisions, export_source
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.source import digest, remember
from typing_in import run as command

N, FEATURES = 30, 20  # more features than a ranking holds
DROPPED = (3, 17)
LABELS = ["007", "7", "1e3"]


def table() -> pandas.DataFrame:
    values = np.random.default_rng(0).normal(size=(N, FEATURES))
    columns: dict[str, list[object]] = {f"feature {i}": values[:, i].tolist() for i in range(FEATURES)}
    labels = [LABELS[row % 3] for row in range(N)]
    return pandas.DataFrame({"key": [f"r{row}" for row in range(N)], **columns, "label": labels})


def images(folder: Path) -> Path:
    """A folder of images, one subfolder per class."""
    random = np.random.default_rng(0)
    for row in range(N):
        file = folder / LABELS[row % 3] / f"{row}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (8, 8), dtype=np.uint8)).save(file)
    return folder


def listed(folder: Path) -> Path:
    """A manifest of such a folder."""
    rows = [f"{file.relative_to(folder)},{file.parent.name},note" for file in sorted(images(folder).rglob("*.png"))]
    (folder / "list.csv").write_text("\n".join(["path,label,comment", *rows]) + "\n")
    return folder / "list.csv"


MAKERS = {
    ".csv": lambda tmp: saved(table(), tmp / "s.csv"),
    ".parquet": lambda tmp: saved(table(), tmp / "s.parquet"),
    ".jsonl": lambda tmp: saved(table(), tmp / "s.jsonl"),
    "folder": lambda tmp: images(tmp / "images"),
    "manifest": lambda tmp: listed(tmp / "images"),
}


def trained_on(source: Path, folder: Path, reading: Reading | None = None) -> tuple[RunFolder, Examples]:
    """A run folder as ``fit`` leaves it, with the rows ``DROPPED`` as suspects."""
    reading = reading or Reading()
    read = as_examples(source, name="source", reading=reading)
    run = RunFolder.create(folder)
    run.write_config({})
    ids = [read.id_of(row) for row in range(len(read))]
    labels = [read.classes[label] for label in read.labels.tolist()]
    weight = np.float32([0.0 if row in DROPPED else 1.0 for row in range(len(read))])
    paths = {} if read.paths is None else {"path": list(read.paths)}
    run.write_ranking({"id": ids, "label": labels, "weight": weight, **paths})
    remember(run, source, Pair(None, None, None), digest(source), reading)
    return run, read


def contents(read: Examples) -> dict[str, tuple[str, list[float]]]:
    """Label and input by id, or by the input itself where a set has no ids."""
    rows = [
        (read.classes[int(label)], value.flatten().tolist())
        for label, value in zip(read.labels, read.inputs, strict=True)
    ]
    keys = [str(value) for _, value in rows] if read.ids is None else read.ids
    return dict(zip(keys, rows, strict=True))


@pytest.mark.parametrize("kind", ["folder", "manifest"])
def test_images_are_found_from_another_folder_than_fits(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = MAKERS[kind](tmp_path)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run, _ = trained_on(source.relative_to(tmp_path), tmp_path / "run")
    monkeypatch.chdir(tmp_path / "elsewhere")
    export_source(run.path, tmp_path / "images" / "clean.csv", suspects="drop")
    assert len(as_examples(tmp_path / "images" / "clean.csv", name="source")) == N - len(DROPPED)
    with pytest.raises(UsageError, match=rf"are outside .*: write it as {tmp_path}/images/clean.csv\.$"):
        export_source(run.path, "clean.csv", suspects="drop")


@pytest.mark.parametrize("kind", MAKERS)
def test_the_export_is_read_as_the_source_was(kind: str, tmp_path: Path) -> None:
    source = MAKERS[kind](tmp_path)
    run, before = trained_on(source, tmp_path / "run")
    out = ".parquet" if kind == ".jsonl" else ".csv"
    file = tmp_path / "images" / f"clean{out}" if kind in ("folder", "manifest") else tmp_path / f"clean{out}"
    export_source(run.path, file, suspects="drop")
    expected = contents(before.subset([row for row in range(N) if row not in DROPPED]))
    if kind == "manifest":  # without ids, rows are matched by their images
        expected = {str(value): (label, value) for label, value in expected.values()}
    after = as_examples(file, name="source")
    assert contents(after) == expected


def test_arrays_are_corrected_where_they_were_made(tmp_path: Path) -> None:
    labels = np.array(LABELS * 10)
    np.savez(tmp_path / "s.npz", x=np.random.default_rng(0).normal(size=(N, FEATURES)), y=labels)
    run, _ = trained_on(tmp_path / "s.npz", tmp_path / "run")
    with pytest.raises(UsageError, match=r"was trained on arrays, .* --suspects` lists, or those in .*review.jsonl"):
        export_source(run.path, tmp_path / "clean.csv", suspects="drop")


def test_a_source_that_has_changed_is_refused(tmp_path: Path) -> None:
    run, _ = trained_on(saved(table(), tmp_path / "s.csv"), tmp_path / "run")
    lines = (tmp_path / "s.csv").read_text().splitlines()
    (tmp_path / "s.csv").write_text("\n".join([lines[0], *sorted(lines[1:])]) + "\n")
    with pytest.raises(DataError, match=r"s.csv has changed since the training or is gone: restore it, or train again"):
        export_source(run.path, tmp_path / "clean.csv", suspects="drop")
    (tmp_path / "s.csv").unlink()
    with pytest.raises(DataError, match="or is gone: restore it"):
        export_source(run.path, tmp_path / "clean.csv", suspects="drop")


def test_decisions_suspects_and_copies_of_target_examples_are_corrected(tmp_path: Path) -> None:
    """Rows 28 and 29 were left out of the training because the target has them, with other labels."""
    source = saved(table(), tmp_path / "s.csv")
    run, before = trained_on(source, tmp_path / "run")
    ranking = {name: values[:28] for name, values in run.ranking().items()}
    run.write_ranking({**ranking, "suggested_label": ["1e3"] * 28})
    remember(run, source, Pair(None, None, None, checked={"r28": "new", "r29": "new"}), digest(source))
    with pytest.raises(UsageError, match="has no review decisions yet"):
        export_source(run.path, tmp_path / "none.csv")
    decisions = Decisions(run)
    decisions.decide(Decision("r3", "relabel", "7"))
    decisions.decide(Decision("r4", "drop"))
    decisions.close()
    copies = {name: ("new", contents(before)[name][1]) for name in ("r28", "r29")}
    decided = {**contents(before), **copies, "r3": ("7", contents(before)["r3"][1])}
    del decided["r4"]
    for undecided, said in {
        "keep": "29 examples, 1 dropped, 3 relabelled, 2 of them because they are in the target, 1 suspect not decided",
        "drop": "28 examples, 2 dropped, 3 relabelled, 2 of them because they are in the target\n",
        "relabel": "29 examples, 1 dropped, 4 relabelled, 2 of them because they are in the target\n",
    }.items():
        out = tmp_path / f"{undecided}.csv"
        assert said in command("review", run.path, "--export", out, "--suspects", undecided)
        expected = dict(decided)
        if undecided == "drop":
            del expected["r17"]
        if undecided == "relabel":
            expected["r17"] = ("1e3", expected["r17"][1])
        assert contents(as_examples(out, name="source")) == expected


def test_values_that_csv_cannot_hold_need_parquet(tmp_path: Path) -> None:
    folder = images(tmp_path / "images")
    files = sorted(str(file.relative_to(folder)) for file in folder.rglob("*.png"))
    columns = {"path": files, "label": [file.split("/")[0] for file in files], "boxes": [[1, 2]] * N}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "list.parquet")
    run, _ = trained_on(folder / "list.parquet", tmp_path / "run")
    with pytest.raises(UsageError, match=r"cannot be written as CSV: write .*clean.parquet instead"):
        export_source(run.path, folder / "clean.csv", suspects="drop")
    export_source(run.path, folder / "clean.parquet", suspects="drop")
    assert pyarrow.parquet.read_table(folder / "clean.parquet")["boxes"].to_pylist() == [[1, 2]] * (N - 2)
