"""Exports after the source has changed: the same examples are corrected, or nothing is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow
import pytest

from soseleto.cli.main import main
from soseleto.data import Reading
from soseleto.errors import DataError
from soseleto.review.decisions import Decision, Decisions
from soseleto.review.manifest import export_manifest
from soseleto.run_folder import manifest
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.source_rows import Rows, digests_of, unchanged

N, SUSPECTS = 20, 5
Change = Callable[[list[str]], list[str]]


def trained_on(tmp_path: Path, header: str, lines: list[str], **columns: list[str]) -> tuple[RunFolder, Path]:
    """A run whose suspects are the first rows of the table."""
    source = tmp_path / "source.csv"
    source.write_text("\n".join([header, *lines]) + "\n")
    run = RunFolder.create(tmp_path / "run")
    run.write_config({})
    weight = np.float32([0.0] * SUSPECTS + [1.0] * (N - SUSPECTS))
    names = columns.get("ids", [str(row) for row in range(N)])
    label = [line.split(",")[-1] for line in lines]
    run.write_ranking({"id": names, "label": label, "weight": weight, "suggested_label": ["fixed"] * N})
    manifest.remember(run, source, Reading())
    return run, source


@pytest.fixture
def without_ids(tmp_path: Path) -> tuple[RunFolder, Path]:
    return trained_on(tmp_path, "x,y,label", [f"{N - row}.50,{row % 3},{'ab'[row % 2]}" for row in range(N)])


@pytest.fixture
def with_ids(tmp_path: Path) -> tuple[RunFolder, Path]:
    ids = [f"r{row}" for row in range(N)]
    lines = [f"{name},{N - row}.50,{'ab'[row % 2]}" for row, name in enumerate(ids)]
    return trained_on(tmp_path, "id,x,label", lines, ids=ids)


def change(source: Path, how: Change) -> None:
    header, *lines = source.read_text().splitlines()
    source.write_text("\n".join([header, *how(lines)]) + "\n")


def rows(path: Path) -> set[str]:
    return set(path.read_text().replace('"', "").replace(".50", ".5").splitlines()[1:])


@pytest.mark.parametrize("kind", ["without_ids", "with_ids"])
@pytest.mark.parametrize(
    "how", [sorted, lambda lines: lines[::-1], lambda lines: lines], ids=["sorted", "turned", "same"]
)
def test_a_sorted_table_loses_the_same_rows(
    kind: str, how: Change, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run, source = request.getfixturevalue(kind)
    manifest.write_clean(run.path, tmp_path / "clean.csv")
    change(source, how)
    manifest.write_clean(run.path, tmp_path / "again.csv")
    assert len(rows(tmp_path / "clean.csv")) == N - SUSPECTS
    assert rows(tmp_path / "again.csv") == rows(tmp_path / "clean.csv")


@pytest.mark.parametrize("kind", ["without_ids", "with_ids"])
def test_a_sorted_table_is_relabelled_and_reviewed_by_the_same_rows(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run, source = request.getfixturevalue(kind)
    names = [str(name) for name in run.ranking()["id"]]
    before = source.read_text().replace(".50", ".5").splitlines()[1:]
    decisions = Decisions(run)
    decisions.decide(Decision(names[2], "drop"))
    decisions.decide(Decision(names[3], "relabel", "c"))
    decisions.close()
    change(source, sorted)
    manifest.write_clean(run.path, tmp_path / "relabelled.csv", relabel=True)
    corrected = {line.rpartition(",")[0] + ",fixed" for line in before[:SUSPECTS]}
    assert rows(tmp_path / "relabelled.csv") == corrected | set(before[SUSPECTS:])
    export_manifest(run.path, tmp_path / "reviewed.csv")
    assert rows(tmp_path / "reviewed.csv") == {*before[:2], before[3][:-1] + "c", *before[4:]}


@pytest.mark.parametrize("kind", ["without_ids", "with_ids"])
def test_added_rows_are_kept_and_missing_or_repeated_rows_are_refused(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    run, source = request.getfixturevalue(kind)
    whole, new = source.read_text(), "new,99.5,a" if kind == "with_ids" else "99.5,7,a"
    change(source, lambda lines: [new, *lines])
    manifest.write_clean(run.path, tmp_path / "clean.csv")
    assert new in rows(tmp_path / "clean.csv")
    assert len(rows(tmp_path / "clean.csv")) == N - SUSPECTS + 1
    for how in (lambda lines: lines[:-1], lambda lines: [*lines, lines[7]]):
        source.write_text(whole)
        change(source, how)
        with pytest.raises(DataError, match=r"source.csv has changed since the training \(1 of the 20 .* exactly once"):
            manifest.write_clean(run.path, tmp_path / "other.csv")
    assert not (tmp_path / "other.csv").exists()


def test_rows_with_other_values_are_refused_where_they_would_be_corrected(
    with_ids: tuple[RunFolder, Path], tmp_path: Path
) -> None:
    """Such as ids that were numbered anew after sorting."""
    run, source = with_ids
    change(source, lambda lines: [*lines[:-1], lines[-1][:-1] + "c"])
    manifest.write_clean(run.path, tmp_path / "clean.csv")  # a row that is kept
    change(source, lambda lines: [lines[0][:-1] + "c", *lines[1:]])
    with pytest.raises(DataError, match="1 row to correct with other values, such as id r0"):
        manifest.write_clean(run.path, tmp_path / "other.csv")


def test_a_missing_column_or_table_is_refused_and_a_new_column_is_kept(
    without_ids: tuple[RunFolder, Path], tmp_path: Path
) -> None:
    run, source = without_ids
    header, *lines = source.read_text().splitlines()
    source.write_text("\n".join([f"{header},note", *(f"{line},n" for line in lines)]) + "\n")
    manifest.write_clean(run.path, tmp_path / "clean.csv")
    assert (tmp_path / "clean.csv").read_text().replace('"', "").startswith("x,y,label,note\n")
    source.write_text("\n".join(line.partition(",")[2] for line in (header, *lines)) + "\n")
    with pytest.raises(DataError, match=r"has changed since the training \(it has no column x\)"):
        manifest.write_clean(run.path, tmp_path / "other.csv")
    source.unlink()
    with pytest.raises(DataError, match="no longer exists: restore it"):
        manifest.write_clean(run.path, tmp_path / "other.csv")


def test_equal_rows_are_interchangeable(tmp_path: Path) -> None:
    run, source = trained_on(tmp_path, "x,label", [f"{row % 2}.5,a" for row in range(N)])
    change(source, sorted)
    manifest.write_clean(run.path, tmp_path / "clean.csv")
    kept = (tmp_path / "clean.csv").read_text().splitlines()[1:]
    assert (sum(line.strip('"').startswith("0") for line in kept), len(kept)) == (
        7,
        N - SUSPECTS,
    )  # rows 0, 2 and 4 are dropped


@pytest.mark.parametrize("kind", ["without_ids", "with_ids"])
def test_a_run_that_recorded_no_rows_needs_ids(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    run, source = request.getfixturevalue(kind)
    (run.path / "rows.parquet").unlink()
    change(source, sorted)
    if kind == "with_ids":
        manifest.write_clean(run.path, tmp_path / "clean.csv")
        assert not {f"r{row}" for row in range(SUSPECTS)} & {
            line.split(",")[0] for line in rows(tmp_path / "clean.csv")
        }
    else:
        with pytest.raises(DataError, match="this run recorded neither ids nor rows"):
            manifest.write_clean(run.path, tmp_path / "clean.csv")


def test_digests_depend_on_values_and_not_on_their_types() -> None:
    one = pyarrow.table({"a": [1, 2, None], "b": ["x", "y,z", ""]})
    other = pyarrow.table({"b": pyarrow.array(["x", "y,z", ""]).dictionary_encode(), "a": [1.0, 2.0, None]})
    assert digests_of(one, ["a", "b"]) == digests_of(other, ["a", "b"])
    cells = pyarrow.table({"a": ["1,2", "1", "", None], "b": ["3", "2,3", None, ""]})
    assert len(set(digests_of(cells, ["a", "b"]))) == 4
    nested = pyarrow.table({"a": [[1, 2], [1, 3]], "b": [b"\xff", b"\xff"]})
    assert len(set(digests_of(nested, ["a", "b"]))) == 2


def test_a_source_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "source.csv").write_text("x,label\n1,a\n")
    with unchanged(tmp_path / "source.csv"):
        assert Rows.of(tmp_path / "source.csv", Reading()) is not None
    with pytest.raises(DataError, match="changed while it was read"), unchanged(tmp_path / "source.csv"):
        (tmp_path / "source.csv").write_text("x,label\n2,a\n3,b\n")


@pytest.mark.parametrize("kind", ["without_ids", "with_ids"])
def test_copies_of_target_examples_are_dropped_or_get_the_targets_label(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The training left them out; their labels in the source are known, and some known to be wrong."""
    run, source = request.getfixturevalue(kind)
    ranking = run.ranking()
    names, left = [str(name) for name in ranking["id"]], slice(0, N - 4)
    run.write_ranking({name: values[left] for name, values in ranking.items()})
    copies = manifest.Copies(names[-4:], {names[-1]: "c", names[-2]: "c"})
    manifest.remember(run, source, Reading(), copies=copies)
    before = source.read_text().replace(".50", ".5").splitlines()[1:]
    export = ["rank", str(run.path), "--export-clean"]
    with pytest.raises(SystemExit, match="0"):
        main([*export, str(tmp_path / "clean.csv")])
    assert rows(tmp_path / "clean.csv") == set(before[SUSPECTS:-4])
    assert "11 examples, 9 dropped, 0 relabelled, 4 of them because they are in the target" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main([*export, str(tmp_path / "relabelled.csv"), "--relabel"])
    fixed = {line[:-1] + "fixed" for line in before[:SUSPECTS]}
    assert rows(tmp_path / "relabelled.csv") == fixed | set(before[SUSPECTS:-2]) | {
        line[:-1] + "c" for line in before[-2:]
    }
    assert "20 examples, 0 dropped, 7 relabelled, 2 of them because they are in the target" in capsys.readouterr().err
    decisions = Decisions(run)
    decisions.decide(Decision(names[0], "drop"))
    decisions.close()
    with pytest.raises(SystemExit, match="0"):
        main(["review", str(run.path), "--export", str(tmp_path / "reviewed.csv")])
    assert rows(tmp_path / "reviewed.csv") == {*before[1:-2], *(line[:-1] + "c" for line in before[-2:])}
    assert "19 examples: 1 dropped, 2 relabelled, 2 of them because they are in the target" in capsys.readouterr().out
