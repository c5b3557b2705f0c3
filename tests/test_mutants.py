"""The table of mutants fits the source, and the script that runs them finds what survives."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = "def add(a, b):\n    return a + b\n\n\ndef last(values):\n    return values[-1]\n"
TESTS = "from soseleto.sums import add, last\n\ndef test_add():\n    assert add(1, 2) == 3\n    assert last([7]) == 7\n"
TABLE = """
[add-subtracts]
file = "sums.py"
old = 'return a + b'
new = 'return a - b'
why = "sums are differences"
tests = ["tests/test_sums.py"]

[last-is-first]
file = "sums.py"
old = 'values[-1]'
new = 'values[0]'
why = "the wrong end"
tests = ["tests/test_sums.py::test_add"]
survives = "lists of one value only"
"""


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # also where its processes look for it
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    module = importlib.import_module("mutants")
    module.WARM.set_forkserver_preload(["pytest"])  # the made-up tests need no torch
    return module


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A made-up tree; the fork server of other tests, which has imported our own package, is stopped before."""
    forkserver._forkserver._stop()
    for name, content in (
        ("src/soseleto/__init__.py", ""),
        ("src/soseleto/sums.py", SOURCE),
        ("tests/test_sums.py", TESTS),
        ("scripts/mutants.toml", TABLE),
        ("results/README", ""),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    yield tmp_path
    forkserver._forkserver._stop()


def test_every_mutant_fits_the_source_and_names_tests_that_exist(mutants: ModuleType) -> None:
    table = mutants.read_table(ROOT)  # raises where the old text does not occur exactly once
    assert len(table) >= 150
    for mutant in table:
        assert mutant.new != mutant.old
        for test in mutant.tests:
            file, _, name = test.partition("::")
            assert (ROOT / file).exists(), f"{mutant.name}: {test}"
            assert not name or f"def {name}(" in (ROOT / file).read_text("utf-8"), f"{mutant.name}: {test}"


def test_killed_and_surviving_mutants_are_told_apart(
    mutants: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_text() for path in tree.rglob("*.py")}
    assert mutants.main([], tree) == 0
    out = capsys.readouterr().out
    assert "survived: last-is-first (sums.py): the wrong end; lists of one value only" in out
    assert "2 mutants: 1 killed, 1 survived, 0 timeout, 0 error" in out
    found = json.loads((tree / "results" / "mutants.json").read_text())
    assert (found["mutants"], found["killed"], found["survived"]) == (2, 1, 1)
    assert found["survivors"] == [
        {"name": "last-is-first", "why": "the wrong end", "reason": "lists of one value only"}
    ]
    assert {path: path.read_text() for path in tree.rglob("*.py")} == before
    monkeypatch.setattr(mutants, "MOST", 0)
    assert mutants.main([], tree) == 1  # and only the survivor is tested again
    assert "add-subtracts" not in capsys.readouterr().out


def test_a_table_that_does_not_fit_is_an_error(mutants: ModuleType, tree: Path) -> None:
    assert mutants.main(["--list", "--only", "add"], tree) == 0
    (tree / "src/soseleto/sums.py").write_text(SOURCE.replace("a + b", "b + a"))
    with pytest.raises(mutants.MutantError, match=r"add-subtracts: 'return a \+ b' occurs 0 times in sums\.py"):
        mutants.main([], tree)


def test_a_mutant_that_breaks_an_import_is_an_error(mutants: ModuleType, tree: Path) -> None:
    (tree / "scripts/mutants.toml").write_text(TABLE.replace("return a - b", "return a -"))
    assert mutants.main(["--only", "add"], tree) == 1
    assert json.loads((tree / "results" / "mutants.json").read_text())["error"] == 1


def test_tests_that_fail_without_a_mutant_are_named(
    mutants: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tree / "tests/test_sums.py").write_text(TESTS.replace("== 3", "== 4"))
    assert mutants.main(["--only", "add"], tree) == 1
    assert "these tests fail without any mutant: tests/test_sums.py" in capsys.readouterr().err
    assert not (tree / "results" / "mutants.json").exists()
