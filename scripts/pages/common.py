"""What the generated parts of the pages share: results files, and tables in Markdown."""

from __future__ import annotations

import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / name).read_text("utf-8"))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows)])


def of_files(columns: Sequence[str], row: Callable[[dict[str, Any]], Sequence[str] | None], *names: str) -> str:
    """A table with a line for each row of the existing results files, except rows for which ``row`` returns None."""
    lines = []
    for name in names:
        if (ROOT / "results" / name).exists():
            results = load(name)
            machine = results["device"].removeprefix("NVIDIA ")
            lines += [[*cells, machine] for each in results["rows"] if (cells := row(each)) is not None]
    return table([*columns, "machine"], lines) if lines else "Not run yet."


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}" if values else ""


def benchmark(name: str) -> ModuleType:
    """A module of benchmarks/, by its file: a package on PyPI may have the same name."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", ROOT / "benchmarks" / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return module
