"""Write the tables of README and docs/ from the files in results/. Run it after a results file has changed.

python scripts/tables.py [--check]
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from soseleto.experiments.cifar10_noise import tables as cifar10
from soseleto.experiments.results import put_between
from soseleto.experiments.svhn_mnist import tables as svhn_mnist

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = {
    "cifar10-noise": ("results/table1.md", cifar10.page),
    "svhn-mnist": ("results/table2.md", svhn_mnist.page),
}
STEPS = ("step-gpu.json", "step-cpu.json")
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


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(["| " + " | ".join(row) + " |" for row in (columns, ["---"] * len(columns), *rows)])


def of_files(columns: Sequence[str], row: Callable[[dict[str, Any]], Sequence[str] | None], *names: str) -> str:
    """A table with a line for each row of the existing results files, except rows for which ``row`` returns None."""
    found = [load(name) for name in names if (ROOT / "results" / name).exists()]
    lines = [[*cells, one["device"]] for one in found for r in one["rows"] if (cells := row(r)) is not None]
    return table([*columns, "machine"], lines) if lines else "Not run yet."


def step(row: dict[str, Any]) -> list[str]:
    form = ", ".join([row["precision"], *(["channels last"] if row.get("layout") == "channels last" else [])])
    memory = "" if row["memory"] is None else f"{row['memory']:.2f}x"
    times = [f"{row['ordinary ms']:.2f}", f"{row['times']:.2f}x", f"{row['floor']:.2f}x"]
    return [row["model"], form, f"{row['B']}, {row['T']}", row["engine"], *times, memory]


def price(row: dict[str, Any]) -> list[str]:
    return [f"{row['model']}, {row['engine']}", row["precision"], f"{row['times']:.2f}x", f"{row['floor']:.2f}x"]


def peer(row: dict[str, Any]) -> list[str]:
    if "times ours" not in row:
        return [row["model"], row["job"], row["contender"], row["error"], ""]
    return [row["model"], row["job"], row["contender"], f"{row['times ours']:.1f}", f"{row['error']:.0e}"]


def update(row: dict[str, Any]) -> list[str] | None:
    if row["against"] != "source examples":
        return None
    return [f"{row['size']:,}", f"{row['update µs']:.1f}", f"{row['share %']:.2f} %"]


def sweep(row: dict[str, Any]) -> list[str] | None:
    if row["against"] == "source examples":
        return None
    memory = [f"{row['ours MiB']:,.0f}", f"{row['ordinary MiB']:,.0f}"]
    return [row["against"], f"{row['size']:,}", f"{row['ours ms']:.2f}", f"{row['times']:.2f}x", *memory]


def training(row: dict[str, Any]) -> list[str]:
    accuracy = "random images" if row["accuracy"] is None else f"{row['accuracy']:.1f}"
    return [row["training"], row["form"], f"{row['seconds']:.1f}", accuracy]


def overhead(row: dict[str, Any]) -> list[str]:
    return [row["step"], f"{row['ms']:.1f}", f"{row['operations ms']:.1f}", f"{row['overhead %']:.1f} %"]


def speed() -> dict[str, str]:
    """The tables of docs/explanation/speed.md, by their marks."""
    heads = ["model", "precision", "B, T", "engine", "ordinary, ms", "ours", "floor", "memory"]
    trainings = ("end_to_end-gpu.json", "end_to_end-bf16-gpu.json")
    return {
        "step": of_files(heads, step, STEPS[0], "step-channels-last-gpu.json", STEPS[1]),
        "peers": of_files(
            ["model", "job", "implementation", "times ours", "error"], peer, "peers-gpu.json", "peers-cpu.json"
        ),
        "sweeps": of_files(
            ["against", "size", "ours, ms", "over an ordinary step", "MiB", "MiB, ordinary on B+T"],
            sweep,
            "scaling-gpu.json",
        ),
        "update": of_files(["source examples", "µs", "of a Quick step"], update, "scaling-gpu.json"),
        "training": of_files(["training", "form", "seconds", "test accuracy"], training, *trainings),
        "overhead": of_files(["step", "ms", "operations, ms", "overhead"], overhead, "overhead-cpu.json"),
    }


def scale() -> str:
    """The table of docs/how-to/scale.md: our step over an ordinary one, and the costs that grow with the source."""
    steps, sizes = load("step-gpu.json"), load("scaling-gpu.json")
    lines = [
        [
            f"a step of {row['model']} in {row['precision']}, B={row['B']}, T={row['T']}",
            f"{row['times']:.2f} ordinary steps",
        ]
        for row in steps["rows"]
        if row["model"] in ("ResNet-18 GroupNorm", "transformer")
    ]
    lines += [
        [
            f"weights and scores of a batch of 256, of {row['size']:,} examples in {row['MB']:,.0f} MB",
            f"{row['update µs']:.1f} µs a step, and {row['summary ms']:.1f} ms an epoch for their summary",
        ]
        for row in sizes["rows"]
        if row["against"] == "source examples" and row["size"] >= 1_000_000
    ]
    return table(["measured", steps["device"]], lines)


def intervals() -> str:
    """Coverage of the intervals of suspects, with and without the rates counted on probes."""
    rates = ("wrong share", "precision", "recall")
    titles = {noise: title for title, noise in cifar10.SETTINGS.items()}
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in load("suspect_intervals-cpu.json")["rows"]:
        cells = lines.setdefault((titles[row["noise"]], row["probes"]), {})
        cells[row["rate"]] = f"{row['covered %']:.0f} % (±{row['half width']:.1f})"
        cells["alone " + row["rate"]] = f"{row['regressions alone: covered %']:.0f} % (±{row['their half width']:.1f})"
    ways = [*rates, *("alone " + rate for rate in rates)]
    return table(
        ["wrong labels", "probes", *rates, *(f"regressions alone: {rate}" for rate in rates)],
        [[noise, str(n), *(cells.get(way, "") for way in ways)] for (noise, n), cells in lines.items()],
    )


def pages() -> dict[Path, str]:
    readme, fast = ROOT / "README.md", ROOT / "docs" / "explanation" / "speed.md"
    text = put_between(readme.read_text("utf-8"), "synthetic", synthetic())
    page = fast.read_text("utf-8")
    for mark, lines in speed().items():
        page = put_between(page, mark, lines)
    ways = ROOT / "docs" / "explanation" / "engines.md"
    text = put_between(text, "price", of_files(["model", "precision", "ours", "floor"], price, *STEPS))
    text = put_between(text, "table 1", cifar10.accuracy_table(load("cifar10-noise.json")["rows"]))
    text = put_between(text, "table 2", svhn_mnist.accuracy_table(load("svhn-mnist.json")["rows"]))
    large, suspects = ROOT / "docs" / "how-to" / "scale.md", ROOT / "docs" / "how-to" / "suspects.md"
    found = {
        large: put_between(large.read_text("utf-8"), "measured", scale()),
        suspects: put_between(suspects.read_text("utf-8"), "intervals", intervals()),
        readme: text,
        fast: page,
        ways: put_between(ways.read_text("utf-8"), "engines", engines()),
    }
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
