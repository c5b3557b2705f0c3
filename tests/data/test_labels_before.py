"""Labels from before a check: a column of the target, or those of its copies in the source."""

from __future__ import annotations

from pathlib import Path

import pytest

import soseleto
from soseleto.data import Reading, read_pair
from soseleto.errors import DataError, UsageError
from soseleto.run_folder.folder import RunFolder
from typing_in import run


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_column_of_the_target_is_read_and_is_no_feature(tmp_path: Path) -> None:
    source = write(tmp_path / "source.csv", "a,label\n1,cat\n2,dog\n3,eel\n")
    table = tmp_path / "target.csv"
    write(table, "a,label,was,id\n4,cat,dog,x\n5,,dog,y\n6,eel,cat,z\n7,dog,,u\n")
    pair = read_pair(source, table, mode="noisy", reading=Reading(before_column="was"), skip_bad=True)
    assert pair.preparation.names == ("a",)
    assert pair.target.ids == ("x", "z", "u")
    assert pair.labels_before.tolist() == [1, 0, -1]  # examples that are left out leave no gap
    with pytest.raises(UsageError, match=r"no column 'wsa' for before_column .did you mean 'was'"):
        read_pair(source, table, mode="noisy", reading=Reading(before_column="wsa"))
    write(table, "a,label,was\n4,cat,dgo\n5,dog,dog\n")
    with pytest.raises(DataError, match=r"has dgo among its labels from before the check.*did you mean 'dog'"):
        read_pair(source, table, mode="noisy", reading=Reading(before_column="was"))


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
    assert "copies of 30 target examples (" in problem.text
    assert ", 10 of them under another label: these" in problem.text
    assert len(pair.source) == 30  # the copies are left out
    before = pair.labels_before
    assert before[:10].tolist() == [-1] * 10
    assert (before[10:] != pair.target.labels[10:]).tolist() == [n % 3 == 0 for n in range(30)]
    assert problem.ids == tuple(str(n) for n in range(30))
    assert pair.checked == {str(n): "cat" if n % 2 else "dog" for n in range(0, 30, 3)}


def test_a_run_remembers_the_copies_and_their_checked_labels_which_are_planted(tmp_path: Path) -> None:
    source, target = checked(tmp_path, differ=True)
    network, more = soseleto.models.mlp(4, 2), {"lr": 0.001, "probes": 0.5, "device": "cpu"}
    made = soseleto.fit(network, source, target, epochs=1, out=tmp_path / "fit", **more)
    words = ["--epochs", "1", "--folds", "0", "--no-baselines", "--probes", "0"]
    run("fit", f"--source={source}", f"--target={target}", f"--out={tmp_path / 'command'}", *words)
    for by in ("fit", "command"):
        known = RunFolder.open(tmp_path / by).source()
        assert known["checked"] == {str(n): "cat" if n % 2 else "dog" for n in range(0, 30, 3)}
    assert made.evidence.judgement.before is not None
    assert made.suspects().basis == "from earlier labels"


def test_copies_under_the_same_label_stop_the_training(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has copies of 30 target examples"):
        read_pair(*checked(tmp_path, differ=False), mode="noisy")
    pair = read_pair(*checked(tmp_path, differ=False), mode="noisy", skip_bad=True)
    assert pair.labels_before is None
