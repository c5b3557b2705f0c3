"""Labels from before a check: a column of the target, or a table matched by id, by path or by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import soseleto
from soseleto.data import Examples, Reading, as_examples, column_of, read_labels_before, read_pair
from soseleto.errors import DataError, UsageError
from soseleto.run_folder.folder import RunFolder
from typing_in import run

CLASSES = ("cat", "dog", "eel")


def target(ids: tuple[str, ...] | None = None, paths: tuple[str, ...] | None = None) -> Examples:
    return Examples(torch.zeros(3, 2), torch.tensor([0, 1, 2]), ids=ids, classes=CLASSES, paths=paths)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_column_of_the_target_is_read_and_is_no_feature(tmp_path: Path) -> None:
    source = write(tmp_path / "source.csv", "a,label\n1,cat\n2,dog\n3,eel\n")
    table = tmp_path / "target.csv"
    write(table, "a,label,was,id\n1,cat,dog,x\n2,dog,dog,y\n3,eel,cat,z\n")
    assert column_of("was", table, Reading()) == "was"
    reading = Reading(before_column="was")
    pair = read_pair(source, table, mode="noisy", reading=reading)
    assert pair.columns == ("a",)
    assert read_labels_before("was", pair.target, table, reading).tolist() == [1, 1, 0]
    left = pair.target.subset([2, 0])  # examples that were left out leave no gap
    assert read_labels_before("was", left, table, reading).tolist() == [0, 1]


def test_names_are_exact_and_merged_like_labels(tmp_path: Path) -> None:
    table = tmp_path / "target.csv"
    write(table, "a,label,was\n1,007,008\n2,008,008\n")
    made = as_examples(table, name="target", reading=Reading(before_column="was"))
    assert read_labels_before("was", made, table, Reading()).tolist() == [1, 1]
    write(table, "a,label,was\n1,cat,DOG \n2,dog,Dog\n")
    merged = Reading(before_column="was", merge_labels=True)
    made = as_examples(table, name="target", reading=merged)
    assert read_labels_before("was", made, table, merged).tolist() == [1, 1]


def test_a_table_of_its_own_is_matched_by_id_or_row(tmp_path: Path) -> None:
    there = tmp_path / "target"
    by_id = write(tmp_path / "ids.csv", "id,label\nz,cat\nx,dog\nmore,dog\ny,eel\n")
    assert read_labels_before(by_id, target(("x", "y", "z")), there, Reading()).tolist() == [1, 2, 0]
    by_row = write(tmp_path / "rows.csv", "label\ndog\ndog\ndog\n")
    assert read_labels_before(by_row, target(), there, Reading()).tolist() == [1, 1, 1]
    numbers = Examples(torch.zeros(2, 2), torch.tensor([0, 1]))
    assert read_labels_before(write(tmp_path / "n.csv", "label\n1\n0\n"), numbers, there, Reading()).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("text", "ids", "message"),
    [
        ("id,label\nx,cat\ny,dog\n", ("x", "y", "z"), r"no label for 1 of the 3 target examples \(z\)"),
        ("id,label\nx,cat\nx,dog\nz,dog\n", ("x", "y", "z"), "two rows for one example"),
        (
            "id,label\nx,cat\ny,dgo\nz,dog\n",
            ("x", "y", "z"),
            "the labels dgo, which are not classes .*did you mean 'dog'",
        ),
    ],
)
def test_mismatches_are_named(tmp_path: Path, text: str, ids: tuple[str, ...] | None, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_labels_before(write(tmp_path / "before.csv", text), target(ids), tmp_path / "target", Reading())


def test_neither_a_column_nor_a_file(tmp_path: Path) -> None:
    table = tmp_path / "target.csv"
    write(table, "a,label,was\n1,cat,dog\n")
    with pytest.raises(UsageError, match=r"is neither a column of .* nor a file .did you mean 'was'"):
        column_of("wsa", table, Reading())
    with pytest.raises(UsageError, match="'was' is not a file"):
        column_of("was", tmp_path, Reading())


def checked(tmp_path: Path, *, differ: bool) -> tuple[Path, Path]:
    """A source of 4 columns whose first rows are also in the target, with their labels corrected."""
    rows = [f"{n + 0.5},{n % 7},{n % 3},{n % 5}" for n in range(60)]  # whole numbers in order would number the rows
    labels = ["cat" if n % 2 else "dog" for n in range(60)]
    wrong = [("dog" if name == "cat" else "cat") if differ and n % 3 == 0 else name for n, name in enumerate(labels)]
    source, target = tmp_path / "source.csv", tmp_path / "target.csv"
    write(source, "\n".join(["a,b,c,d,label", *(f"{row},{name}" for row, name in zip(rows, wrong, strict=True))]))
    more = [f"{100.5 + n},1,2,3,cat" for n in range(10)]
    write(target, "\n".join(["a,b,c,d,label", *more, *(f"{rows[n]},{labels[n]}" for n in range(30))]))
    return source, target


def test_labels_before_are_found_in_the_source(tmp_path: Path) -> None:
    pair = read_pair(*checked(tmp_path, differ=True), mode="noisy")
    (problem,) = pair.dropped
    assert problem.kind == "checked"
    assert "copies of 30 target examples, 10 of them under another label" in problem.text
    assert len(pair.source) == 30  # the copies are left out
    before = pair.labels_before
    assert before is not None
    assert before[:10].tolist() == [-1] * 10
    assert (before[10:] != pair.target.labels[10:]).tolist() == [n % 3 == 0 for n in range(30)]
    assert pair.copies == tuple(str(n) for n in range(30))
    assert pair.checked == {str(n): "cat" if n % 2 else "dog" for n in range(0, 30, 3)}


@pytest.mark.parametrize("by", ["fit", "command"])
def test_a_run_remembers_the_copies_and_their_checked_labels(tmp_path: Path, by: str) -> None:
    source, target = checked(tmp_path, differ=True)
    if by == "fit":
        soseleto.fit(soseleto.models.mlp(4, 2), source, target, epochs=1, out=tmp_path / "run")
    else:
        words = ["--epochs", "1", "--folds", "0", "--no-baselines", "--probes", "0"]
        run("fit", f"--source={source}", f"--target={target}", f"--out={tmp_path / 'run'}", *words)
    known = RunFolder.open(tmp_path / "run").source()
    assert known["checked"] == {str(n): "cat" if n % 2 else "dog" for n in range(0, 30, 3)}


def test_copies_under_the_same_label_stop_the_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has copies of 30 target examples"):
        read_pair(*checked(tmp_path, differ=False), mode="noisy")
    pair = read_pair(*checked(tmp_path, differ=False), mode="noisy", skip_bad=True)
    assert pair.labels_before is None


def test_found_labels_are_planted(tmp_path: Path) -> None:
    made = soseleto.fit(
        soseleto.models.mlp(4, 2), *checked(tmp_path, differ=True), epochs=1, lr=0.001, probes=0.5, device="cpu"
    )
    assert made.evidence is not None
    assert made.evidence.judgement.before is not None
    assert made.suspects().basis == "from earlier labels"
