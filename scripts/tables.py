"""Write the tables of README and docs from the files in results/: run it after a results file has changed.

python scripts/tables.py [--check]
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from soseleto.experiments import cifar10_words, svhn_mnist_words
from soseleto.experiments.results import put_between

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = {"cifar10-noise": ("table1.md", cifar10_words.page), "svhn-mnist": ("table2.md", svhn_mnist_words.page)}
ENGINES = ("layerwise", "forward", "double_backward", "loop")


def load(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "results" / name).read_text("utf-8"))


def synthetic() -> str:
    found = load("synthetic.json")
    lines = [f"| mean ± standard deviation of {len(found['rows'])} seeds | |", "|---|---|"]
    for key, title, scale, digits in (
        ("clean_above", "correctly labelled points with a weight above 0.1", 100, 1),
        ("flipped_below", "flipped points with a weight below 0.1", 100, 1),
        ("accuracy", "accuracy on 2,000 fresh points", 1, 1),
        ("missed_distance", "median distance of the missed flipped points from the separator", 1, 3),
    ):
        values = [scale * row[key] for row in found["rows"]]
        unit = " %" if digits == 1 else ""
        lines.append(
            f"| {title} | {statistics.fmean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}{unit} |"
        )
    return "\n".join(lines)


def engines() -> str:
    lines = ["| | " + " | ".join(ENGINES) + " |", "|---|" + "---|" * len(ENGINES)]
    for name in ("engines-gpu.json", "engines-cpu.json"):
        found = load(name)
        for case in dict.fromkeys((row["model"], row["precision"]) for row in found["rows"]):
            times = {row["engine"]: row["times"] for row in found["rows"] if (row["model"], row["precision"]) == case}
            cells = [f"{times[e]:.2f}x" if isinstance(times[e], float) else "declines" for e in ENGINES]
            lines.append(f"| {', '.join(case)}, {found['device']} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def pages() -> dict[Path, str]:
    readme = ROOT / "README.md"
    text = put_between(readme.read_text("utf-8"), "synthetic", synthetic())
    found = {readme: put_between(text, "engines", engines())}
    for name, (page, tables) in EXPERIMENTS.items():
        results, path = ROOT / "results" / f"{name}.json", ROOT / "docs" / page
        if results.exists():
            found[path] = tables(path.read_text("utf-8"), results)
    return found


def main() -> None:
    stale = [path for path, text in pages().items() if path.read_text("utf-8") != text]
    if "--check" in sys.argv:
        sys.exit(f"out of date, run python scripts/tables.py: {[p.name for p in stale]}" if stale else 0)
    for path, text in pages().items():
        path.write_text(text, "utf-8")


if __name__ == "__main__":
    main()
