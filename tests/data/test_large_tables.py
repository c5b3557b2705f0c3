"""Tables that do not fit in memory: read in pieces, and kept on disk."""

import csv
import io
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soseleto.cli.main import main
from soseleto.data import Reading, on_disk, read_pair
from soseleto.data.readers import csv_pieces as pieces
from soseleto.data.readers import large_tables, table_files
from soseleto.errors import DataError
from soseleto.run_folder.folder import RunFolder

CELLS = st.lists(st.text('ab"\n,é ', max_size=6), min_size=3, max_size=3)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Every table counts as large; the folder of the copies."""
    monkeypatch.setattr(on_disk, "LARGE", 100)
    monkeypatch.setattr(on_disk, "PIECE", 64)
    monkeypatch.setattr(pieces, "SIZE", 1000)
    monkeypatch.setenv("SOSELETO_CACHE", str(tmp_path / "copies"))
    return tmp_path / "copies"


def frame(n: int, seed: int = 0) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    size = draw.normal(size=n).round(4)
    columns = {
        "number": np.arange(n),
        "size": np.where(draw.random(n) < 0.1, np.nan, size),
        "town": draw.choice(["Ulm", 'Aix "les" Bains', "Rio,\nbeach"], n),
        "day": [f"2024-{month:02d}-01" for month in draw.integers(1, 13, n)],
        "other": draw.normal(size=n).round(4),
        "label": np.where(size + 0.1 * draw.normal(size=n) > 0, "big", "small"),
    }
    return pd.DataFrame(columns)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(CELLS, min_size=1, max_size=30), size=st.integers(3, 80))
def test_pieces_have_every_row_once_and_begin_with_the_header(
    rows: list[list[str]], size: int, tmp_path_factory: pytest.TempPathFactory
):
    path = tmp_path_factory.mktemp("csv") / "t.csv"
    with open(path, "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["x", "y\nz", "w"], *rows])
    found: list[list[str]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "SIZE", size)
        for text, before in pieces.csv_pieces(path, None, ","):
            header, *some = csv.reader(io.StringIO(text, newline=""))
            assert header == ["x", "y\nz", "w"]
            assert before.rows == len(found)
            found += some
    assert found == rows


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_large_table_is_read_as_a_small_one(tmp_path: Path, small: Path, suffix: str):
    def write(name: str, n: int, seed: int) -> Path:
        made = frame(n, seed).astype({"town": "category"}) if suffix == ".parquet" else frame(n, seed)
        path = tmp_path / f"{name}{suffix}"
        made.to_parquet(path) if suffix == ".parquet" else made.to_csv(path, index=False)
        return path

    source, target = write("s", 600, 0), write("t", 80, 1)
    large = read_pair(source, target, mode="noisy")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(on_disk, "LARGE", 1 << 30)
        whole = read_pair(source, target, mode="noisy")
    assert large.preparation == whole.preparation
    assert {one.name: one.kind for one in whole.preparation.seen}["number"] == "left out"
    assert torch.equal(large.source.inputs, whole.source.inputs)
    assert torch.equal(large.source.labels, whole.source.labels)
    assert large.source.fingerprint() == whole.source.fingerprint()
    assert list(map(str, large.problems)) == list(map(str, whole.problems))
    assert large.source.subset(torch.arange(500)).inputs.equal(whole.source.inputs[:500])
    assert os.listdir(small) == []  # nothing is left under a name


def test_the_columns_are_fitted_on_a_sample_which_is_said(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(large_tables, "SAMPLE", 200)
    whole = frame(600)
    whole.to_csv(tmp_path / "s.csv", index=False)
    frame(80, 1).to_csv(tmp_path / "t.csv", index=False)
    pair = read_pair(tmp_path / "s.csv", tmp_path / "t.csv", mode="noisy")
    assert "200 of its 600 rows, evenly spaced" in " ".join(map(str, pair.problems))
    seen = {one.name: one for one in pair.preparation.seen}
    assert seen["number"].why == "it numbers the rows"  # although the numbers of the sample have gaps
    rows = np.linspace(0, 599, 200).round().astype(int)
    assert seen["size"].missing == whole["size"].isna()[rows].sum()
    assert len(pair.source) == 600
    place = pair.preparation.names.index("other")
    assert torch.allclose(pair.source.inputs[:, place], torch.tensor(whole["other"].to_numpy()).float())


@pytest.mark.parametrize(
    ("line", "text", "message"),
    [
        (150, '7,"0.5,Ulm,2024-01-01,0.1,big', r"row 148 \(line 150\) .* stray quote"),
        (150, b"7,0.5,\xff,2024-01-01,0.1,big", r"byte 0xff in row 148 \(line 150\), column 'town' .* not UTF-8"),
        (150, "7,0.5,Ulm", "Expected 6 columns, got 3.*counted from row"),
        (150, "number,size,town,day,other,label", "row 148 .* repeats the header"),
    ],
)
def test_errors_name_the_row_of_the_file(tmp_path: Path, small: Path, line: int, text: str | bytes, message: str):
    made = frame(300)
    made["town"] = "Ulm"
    made.to_csv(tmp_path / "s.csv", index=False)
    lines = (tmp_path / "s.csv").read_bytes().splitlines()
    lines[line - 1] = text if isinstance(text, bytes) else text.encode()
    (tmp_path / "s.csv").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(DataError, match=message):
        table_files.load(tmp_path / "s.csv", "source", Reading(), all_text=True)


def test_a_full_disk_is_one_sentence(tmp_path: Path, small: Path):
    frame(50).to_csv(tmp_path / "s.csv", index=False)
    small.write_text("a file where the folder should be")
    with pytest.raises(DataError, match=r"too large for memory .* set SOSELETO_CACHE"):
        table_files.load(tmp_path / "s.csv", "source", Reading(), all_text=True)


def test_what_a_killed_process_left_is_removed_after_a_day(small: Path):
    small.mkdir()
    for name in ("unfinished-table-old", "unfinished-table-new"):
        (small / name).write_text("")
    os.utime(small / "unfinished-table-old", (0, 0))
    with on_disk.passing_file(None, what="it"):
        pass
    assert os.listdir(small) == ["unfinished-table-new"]


def typed(*words: object) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main([str(word) for word in words])
    return left.value.code


def test_fit_trains_on_a_large_table_with_probes(tmp_path: Path, small: Path):
    for name, n, seed in (("source", 500, 0), ("target", 100, 1), ("test", 100, 2)):
        frame(n, seed).to_csv(tmp_path / f"{name}.csv", index=False)
    run, source = tmp_path / "run", tmp_path / "source.csv"
    sets = [word for name in ("source", "target", "test") for word in (f"--{name}", tmp_path / f"{name}.csv")]
    assert typed("fit", *sets, "--out", run, "--epochs", 1, "--batch-size", 100, "--no-baselines") == 0
    ranking = RunFolder(run).ranking()
    shown = ranking["x1"] != ""  # the town
    assert 24 <= shown.sum() < 500  # the best and worst of both classes, suspects and what an audit would draw
    assert set(ranking["x1"][shown]) == {"Ulm", 'Aix "les" Bains', "Rio,\nbeach"}
    assert (ranking["against"][shown] != "").any()
    assert not (ranking["against"][~shown] != "").any()
    assert typed("predict", run, source, "--out", tmp_path / "p.csv") == 0
    assert len(pd.read_csv(tmp_path / "p.csv")) == 500
    assert typed("rank", run, "--export-clean", tmp_path / "clean.csv") == 0
    assert pd.read_csv(tmp_path / "clean.csv").columns.tolist() == frame(1).columns.tolist()


MEASURED = """
import sys, threading
from soseleto.data import as_examples, on_disk, read_pair
from soseleto.data.readers import csv_pieces, large_tables

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")) / 1024

def grown(source, target, large):
    on_disk.LARGE = large
    before, done = anonymous(), threading.Event()
    most = [before]
    def watch():
        while not done.wait(0.005):
            most.append(anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    pair = read_pair(source, target, mode="noisy")
    done.set()
    watcher.join()
    return max(most) - before

large_tables.SAMPLE, csv_pieces.SIZE, on_disk.PIECE = 1000, 1 << 18, 1 << 11
source, target = sys.argv[1:]
as_examples(target, name="target")  # imports what is needed
print(grown(source, target, 1 << 20), grown(source, target, 1 << 40))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_table(tmp_path: Path):
    rows = int(os.environ.get("SOSELETO_LONG_TABLE", "20000"))
    draw = np.random.default_rng(0)
    long = [f"{at} {'abcdefghij' * 30}" for at in range(9)]  # so that the file is large and quickly read
    made = pd.DataFrame({f"c{at}": draw.choice(long, rows + 50) for at in range(4)})
    made["size"], made["label"] = draw.normal(size=rows + 50), draw.choice(["a", "b"], rows + 50)
    made[:rows].to_csv(tmp_path / "s.csv", index=False)
    made[rows:].to_csv(tmp_path / "t.csv", index=False)
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "s.csv"), str(tmp_path / "t.csv")]
    environment = {**os.environ, "SOSELETO_CACHE": str(tmp_path / "copies")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    in_pieces, whole = map(float, done.stdout.split())
    assert in_pieces < 35 < 50 < whole, (done.stdout, done.stderr)  # MB
