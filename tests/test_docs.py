"""What README and docs say is what the code and the results say."""

from __future__ import annotations

import importlib.util
import json
import re
import statistics
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
NEED_FILES = "docs/data.md"  # its examples read files that a user has
PAGES = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if str(path.relative_to(ROOT)) not in (NEED_FILES, "docs/contracts.md")
]
BLOCKS = [
    pytest.param(block, id=f"{path.name}-{number}")
    for path in PAGES
    for number, block in enumerate(re.findall(r"```python\n(.*?)```", path.read_text("utf-8"), re.DOTALL), start=1)
]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("block", BLOCKS)
def test_code_blocks_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "block", "exec"), {})


def test_there_are_blocks_to_run() -> None:
    assert len(BLOCKS) >= 2


def test_tables_come_from_the_results() -> None:
    for path, text in script("tables").pages().items():
        assert path.read_text("utf-8") == text, "run python scripts/tables.py"


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text("utf-8")):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


def test_the_synthetic_results_are_what_the_paper_shows() -> None:
    rows = json.loads((ROOT / "results" / "synthetic.json").read_text("utf-8"))["rows"]
    assert len({row["seed"] for row in rows}) >= 20
    means = {key: statistics.fmean(row[key] for row in rows) for key in rows[0] if isinstance(rows[0][key], float)}
    assert means["clean_above"] >= 0.99
    assert means["flipped_below"] >= 0.85
    assert means["missed_distance"] <= 0.15
    assert means["accuracy"] >= 98


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.json")), ids=lambda p: p.name)
def test_results_name_their_machine_and_versions(path: Path) -> None:
    found = json.loads(path.read_text("utf-8"))
    assert found["rows"]
    assert found["versions"]["torch"]
    assert found.get("device") or found.get("processor")
