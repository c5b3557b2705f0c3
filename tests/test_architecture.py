"""Which package may import which, checked on the source, and the page that shows it.

After a module or a package has been added, ``python tests/test_architecture.py`` writes the table of the page anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "soseleto"
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "architecture.svg"
TOP = "soseleto"
ENTRY_POINTS = {"__init__", "__main__"}  # import whatever the user asks for
OUTSIDE = "experiments"  # in a clone, not in the wheel
MOST_FLAT = 16


@dataclass(frozen=True)
class Unit:
    """A package, or a module of the top level, and what it may import beside itself and ``errors``."""

    purpose: str
    may_import: frozenset[str] = frozenset()
    in_functions: frozenset[str] = field(default=frozenset(), kw_only=True)  # and these, but only when called


def unit(purpose: str, may_import: str = "", *, in_functions: str = "") -> Unit:
    return Unit(purpose, frozenset(may_import.split()), in_functions=frozenset(in_functions.split()))


TRAINING = (
    "defaults schedules methods algorithm pieces task parallel engines models weights data suspects run_folder"
    " prediction"
)
UNITS = {
    "errors": unit("what a user's mistake or a failed run raises"),
    "weights": unit("one weight and one score for every source example"),
    "engines": unit("exact alignments of source examples with the target gradient"),
    "data": unit("from files to batches"),
    "models": unit("networks, by name or from a file of the user's own"),
    "parallel": unit("one step over several processes and over parts of a batch", "engines data models"),
    "task": unit("the model, losses and optimizer that a method trains", "parallel engines data weights"),
    "pieces": unit("what we add to the paper's algorithm, by argument", "task engines weights data"),
    "algorithm": unit("the paper's Algorithm 1", "pieces task engines models data weights"),
    "selection": unit(
        "Algorithm 1 for a training loop of the user's own",
        "defaults algorithm pieces task parallel engines models data weights",
    ),
    "scoring": unit(
        "alignments of a pool with several targets at checkpoints, before a training",
        "pieces task parallel engines models data run_folder",
    ),
    "methods": unit("the methods that SOSELETO is compared with", "algorithm task engines models data weights"),
    "schedules": unit("learning-rate schedules"),
    "defaults": unit("one set of defaults for every caller", "schedules methods algorithm pieces models task data"),
    "suspects": unit(
        "which labels are wrong: cross-fitted beliefs, probes, suspects with estimated error rates, audits",
        "data models",
    ),
    "run_folder": unit("the files that a run writes", "data"),
    "prediction": unit("a trained model applied to new inputs", "run_folder models task parallel data"),
    "training": unit("`fit` and its loop", TRAINING, in_functions="report"),
    "comparison": unit(
        "`scan`, and `fit` beside its baselines on held-out examples",
        "weights defaults training prediction run_folder suspects methods parallel task models data",
    ),
    "estimator": unit(
        "`fit` as a scikit-learn estimator", "defaults training suspects algorithm prediction models data"
    ),
    "integrations": unit(
        "trainers of other libraries", "defaults selection algorithm parallel task engines data report run_folder"
    ),
    "report": unit("the report page of a run folder", "run_folder"),
    "review": unit("the page on which suspects are reviewed and audited", "run_folder report suspects"),
    "cli": unit("the command line", "*"),
}


@dataclass(frozen=True)
class Import:
    importer: str
    imported: str
    line: int
    in_function: bool

    def __str__(self) -> str:
        return f"{self.importer}, line {self.line}: imports {self.imported}"


def modules(root: Path) -> dict[str, Path]:
    """Every module under ``root`` by its full name; a package has the name of its folder."""
    found = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@lru_cache
def imports(root: Path) -> list[Import]:
    """Every import of one of our modules by another: at the top, for type checking, in a function, or by a string."""
    known = modules(root)
    return [
        Import(name, found, node.lineno, in_function)
        for name, path in known.items()
        for node, in_function in _nodes(ast.parse(path.read_text("utf-8")))
        for found in _imported(node, known)
    ]


def _nodes(tree: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for node in ast.iter_child_nodes(tree):
        yield node, in_function
        inside = in_function or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        yield from _nodes(node, inside)


def _imported(node: ast.AST, known: Iterable[str]) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
        base = "." * node.level + (node.module or "")
        names = [f"{base}.{alias.name}" if f"{base}.{alias.name}" in known else base for alias in node.names]
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
        names = [one.value for one in node.args if isinstance(one, ast.Constant) and isinstance(one.value, str)]
    else:
        return
    yield from (name for name in names if name.split(".")[0] in (TOP, OUTSIDE, ""))


def unit_of(module: str) -> str:
    """``soseleto.data.batch`` belongs to ``data``; the top-level package itself is ``__init__``."""
    return [*module.split("."), "__init__"][1]


def forbidden(found: Iterable[Import]) -> list[str]:
    """A sentence for every import that the table does not allow."""
    sentences = []
    for one in found:
        importer, imported = unit_of(one.importer), unit_of(one.imported)
        if one.imported.split(".")[0] == OUTSIDE:
            sentences.append(f"{one}: not in the wheel")
        elif one.imported.startswith("."):
            sentences.append(f"{one}: write the whole name, {TOP}.…")
        elif (
            importer in ENTRY_POINTS
            or importer == imported
            or imported == "errors"
            or (imported in ENTRY_POINTS and importer in UNITS and "*" in UNITS[importer].may_import)
        ):
            continue
        elif importer not in UNITS or imported not in UNITS:
            sentences.append(f"{one}: not in the table of packages")
        elif imported in (allowed := UNITS[importer]).in_functions:
            if not one.in_function:
                sentences.append(f"{one}: {importer} may import {imported} only inside a function")
        elif imported not in allowed.may_import and "*" not in allowed.may_import:
            sentences.append(f"{one}: {importer} may not import {imported}")
    return sentences


def cycle(edges: Iterable[tuple[str, str]]) -> list[str]:
    """The names along one cycle, the first of them again at the end; nothing where there is none."""
    sorter: TopologicalSorter[str] = TopologicalSorter()
    for importer, imported in edges:
        if importer != imported:
            sorter.add(importer, imported)
    try:
        sorter.prepare()
    except CycleError as error:
        return list(reversed(error.args[1]))  # graphlib names the imported module first
    return []


def unit_edges(found: Iterable[Import]) -> list[tuple[str, str]]:
    pairs = [(unit_of(one.importer), unit_of(one.imported)) for one in found]
    return [pair for pair in pairs if pair[0] not in ENTRY_POINTS]


def module_edges(found: Iterable[Import]) -> list[tuple[str, str]]:
    return [(one.importer, one.imported) for one in found if one.importer != TOP]


def test_every_import_is_allowed() -> None:
    found = imports(SOURCE)
    assert len(found) > 300
    assert forbidden(found) == []


def test_packages_have_no_cycle() -> None:
    allowed = [(name, one) for name, its in UNITS.items() for one in its.may_import | its.in_functions if one != "*"]
    assert cycle(allowed) == []
    assert cycle(unit_edges(imports(SOURCE))) == []


def test_modules_have_no_cycle() -> None:
    assert cycle(module_edges(imports(SOURCE))) == []


def test_the_top_level_has_nothing_else() -> None:
    flat = {path.stem for path in SOURCE.glob("*.py")}
    folders = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert len(flat) <= MOST_FLAT
    assert flat & folders == set()
    assert (flat | folders) - ENTRY_POINTS == set(UNITS)


@pytest.fixture
def made_up(tmp_path: Path) -> Path:
    """A small package with one of each mistake; the imports of ``data`` are all right."""
    files = {
        "__init__.py": "from soseleto.training.fit import fit",
        "errors.py": "",
        "data/__init__.py": "from soseleto.errors import DataError\nimport torch",
        "data/batch.py": "from soseleto.data import examples",
        "data/examples.py": "def f():\n    from soseleto.data import batch",
        "engines/__init__.py": "if TYPE_CHECKING:\n    from soseleto.task import Task",
        "task/__init__.py": "import soseleto.engines",
        "training/__init__.py": "",
        "training/fit.py": "from soseleto import report\nclass A:\n    def f(self):\n        import soseleto.report",
        "report/__init__.py": "from .. import errors",
        "models/__init__.py": "importlib.import_module('soseleto.data.batch')",
        "plots/__init__.py": "import soseleto.data",
        "weights.py": "def f():\n    from experiments.data import load",
    }
    for name, text in files.items():
        path = tmp_path / TOP / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / TOP


def test_the_checks_find_what_is_wrong(made_up: Path) -> None:
    found = imports(made_up)
    assert sorted(forbidden(found)) == [
        "soseleto.engines, line 2: imports soseleto.task: engines may not import task",
        "soseleto.models, line 1: imports soseleto.data.batch: models may not import data",
        "soseleto.plots, line 1: imports soseleto.data: not in the table of packages",
        "soseleto.report, line 1: imports ..: write the whole name, soseleto.…",
        "soseleto.training.fit, line 1: imports soseleto.report: training may import report only inside a function",
        "soseleto.weights, line 2: imports experiments.data: not in the wheel",
    ]
    assert set(cycle(unit_edges(found))) == {"engines", "task"}
    inside = [(a, b) for a, b in module_edges(found) if a.startswith("soseleto.data.")]
    assert set(cycle(inside)) == {"soseleto.data.batch", "soseleto.data.examples"}
    assert cycle(["ab", "bc", "ac"]) == []


# docs/architecture.md


def contents(name: str) -> str:
    """The modules of a package, and its subpackages with a slash."""
    folder = SOURCE / name
    if not folder.is_dir():
        return f"`{name}.py`"
    files = [path.stem for path in folder.glob("*.py") if not path.stem.startswith("__")]
    folders = [f"{path.parent.name}/" for path in folder.glob("*/__init__.py")]
    return ", ".join(f"`{one}`" for one in sorted(files) + sorted(folders))


def allowed_in_words(its: Unit) -> str:
    if "*" in its.may_import:
        return "everything"
    names = [name for name in UNITS if name in its.may_import]
    return ", ".join([*names, *(f"{name} (inside functions)" for name in sorted(its.in_functions))]) or "-"


def table() -> str:
    """The users' side first."""
    lines = ["| package | purpose | contents | may import |", "|---|---|---|---|"]
    for name, its in reversed(UNITS.items()):
        lines.append(f"| {name} | {its.purpose} | {contents(name)} | {allowed_in_words(its)} |")
    return "\n".join(lines)


def with_table(text: str) -> str:
    begin, end = "<!-- packages -->", "<!-- /packages -->"
    assert begin in text
    assert end in text
    return f"{text.split(begin)[0]}{begin}\n{table()}\n{end}{text.split(end)[1]}"


def test_the_page_has_this_table() -> None:
    text = PAGE.read_text("utf-8")
    assert with_table(text) == text, "run python tests/test_architecture.py"


def boxes() -> dict[str, float]:
    """How far down the picture each box is."""
    svg = ElementTree.parse(PICTURE).getroot()
    groups = [one for one in svg.iter("{http://www.w3.org/2000/svg}g") if "id" in one.attrib]
    place = re.compile(r"translate\(\S+ (\S+)\)")
    return {one.attrib["id"]: float(place.findall(one.attrib["transform"])[0]) for one in groups}


def test_the_picture_has_every_package_above_what_it_imports() -> None:
    drawn = boxes()
    assert set(drawn) == set(UNITS)
    for name, its in UNITS.items():
        below = set(UNITS) - {name} if "*" in its.may_import else its.may_import | its.in_functions
        assert [one for one in below if drawn[one] <= drawn[name]] == [], name


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text("utf-8")), "utf-8")
