"""How defaults were chosen: what moves the weights, and the strong recipe."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from experiments.methods.divide_mix import DivideMix
from experiments.results import Spread
from pages.common import benchmark, load, table

FEW_DRAWS = 4  # below which a cell states its number of draws


def steps() -> str:
    """What moves the weights: points above mixed training on the same draws."""
    rows = load("choose-usual-steps.json")["rows"]
    accuracy = {(row["line"], row["data"], row["noise"], row["rate"], row["seed"]): row["accuracy"] for row in rows}
    cells = sorted({key[1:4] for key in accuracy}, key=lambda cell: (cell[2] > 0.1, cell))
    lines = []
    for line in dict.fromkeys(key[0] for key in accuracy if key[0] != "mixed"):
        shown = []
        for cell in cells:
            points = [
                value - accuracy["mixed", *cell, key[-1]]
                for key, value in accuracy.items()
                if key[:-1] == (line, *cell) and ("mixed", *cell, key[-1]) in accuracy
            ]
            few = f" ({len(points)})" if 0 < len(points) < FEW_DRAWS else ""
            shown.append(f"{statistics.fmean(points):+.1f}{few}" if points else "")
        lines.append([line, *shown])
    return table(["weights move by", *map(_cell, cells)], lines)


def _cell(cell: tuple[str, str, float]) -> str:
    data, noise, rate = cell
    return f"{data} {'next class ' if noise == 'pairs' else ''}{100 * rate:g} %"


def never_worse() -> str:
    """The command line's model, and the one that it keeps, against the best of its rivals; ± standard error."""
    cells = {
        (
            row["data"],
            "all" if row["rate"] is None else f"{'next class, ' * (row['mistakes'] == 'pairs')}{row['rate']:.0%}",
        ): row
        for row in benchmark("never_worse").summary(load("never_worse.json")["rows"])
    }
    data, rates = (list(dict.fromkeys(key[at] for key in cells)) for at in (0, 1))

    def shown(key: tuple[str, str]) -> str:
        names = ("SOSELETO − best", "kept − best")
        return ", ".join(f"{cells[key][n]:+.1f} ± {cells[key][f'{n}, ±']:.1f}" for n in names) if key in cells else ""

    return table(["data", *rates], [[name, *(shown((name, rate)) for rate in rates)] for name in data])


def convolutional_steps() -> str:
    """Held-out accuracy by what moves the weights of a network with convolutions, a share of 0.3."""
    rows = [row for row in load("choose-convolutional-gpu.json")["rows"] if row["target_share"] == 0.3]
    assert {row.get("beyond_noise", 0.0) for row in rows} <= {0.0, 2.0}
    columns = {
        "Quick, 30 %": ("quick", 0.3),
        "Quick, 40 %": ("quick", 0.4),
        "Quick, 50 %": ("quick", 0.5),
        "Quick, CIFAR-10N worst": ("quick", "worse_label"),
        "ResNet-18, 40 %": ("resnet18", 0.4),
        "ResNet-18, CIFAR-10N worst": ("resnet18", "worse_label"),
    }

    def line(row: dict[str, Any]) -> str:
        if row["base"] == "mixed":
            return "mixed"
        if row["weight_step"] is None:
            return f"weights frozen at {row['initial_weight']:g}"
        way = row["weight_step"] * row["epochs"]
        step = f"{row['weight_step']:g}" if not row["beyond_noise"] else f"{way:.2g}/epochs, beyond 2 standard errors"
        return f"{step}, first weight {row.get('initial_weight', 1.0):g}"

    found: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        found.setdefault((line(row), row["model"], row["noise"]), []).append(row["heldout_accuracy"])
    lines = sorted({name for name, *_ in found})

    cells = [[_mean(found.get((name, *at), [])) for at in columns.values()] for name in lines]
    return table(["weight step", *columns], [[name, *own] for name, own in zip(lines, cells, strict=True)])


def lines_by_noise(file: str, title: Callable[[Any], str]) -> str:
    """Accuracy, mean and standard deviation over seeds, and mean AUROC of every line; title: of a column, by noise."""
    found: dict[tuple[str, Any], list[dict[str, Any]]] = {}
    for row in load(file)["rows"]:
        found.setdefault((row["line"], row["noise"]), []).append(row)
    lines, noises = (list(dict.fromkeys(key[at] for key in found)) for at in (0, 1))

    def cell(line: Any, noise: Any) -> str:
        rows = found[line, noise]
        return f"{Spread.of([row['accuracy'] for row in rows])}, {statistics.fmean(row['auroc'] for row in rows):.2f}"

    return table(["", *map(title, noises)], [[line, *(cell(line, noise) for noise in noises)] for line in lines])


def by_class() -> str:
    """Accuracy with ``by_class``, mean over seeds."""
    found: dict[tuple[float, str], list[float]] = {}
    for row in load("choose-by-class-cpu.json")["rows"]:
        found.setdefault((row["by_class"], row["noise"]), []).append(row["accuracy"])
    noises = sorted({noise for _, noise in found})
    shares = sorted({share for share, _ in found})
    cells = [[_mean(found.get((share, noise), [])) for noise in noises] for share in shares]
    return table(["`by_class`", *noises], [[f"{share:g}", *own] for share, own in zip(shares, cells, strict=True)])


def _mean(values: list[float]) -> str:
    return f"{sum(values) / len(values):.1f}" + (f" ({len(values)})" if len(values) > 1 else "") if values else ""


def rivals_table(rows: list[dict[str, Any]]) -> str:
    """Runs of DivideMix on held-out images, by which its settings were chosen."""
    lines = ["| λ_u | warm-up | learning rate | epochs | source | held out |", "|---|---|---|---|---|---|"]
    for config, row in ((row["config"], row) for row in rows if row["config"]["base"] == "divide_mix"):
        settings = {"unlabelled": DivideMix.unlabelled, "warm_up": DivideMix.warm_up, **config["settings"]}
        cells = [f"{settings['unlabelled']:g}", f"{settings['warm_up']:g}", config["lr"], config["epochs"]]
        lines.append(f"| {' | '.join(map(str, cells))} | {config['n_source']:,} | {row['heldout_accuracy']:.1f} |")
    return "\n".join(lines)


def parts() -> dict[str, str]:
    """Of results/choices.md."""
    return {
        "steps": steps(),
        "convolutional": convolutional_steps(),
        "rivals": rivals_table(load("cifar10-deep-choose.json")["rows"]),
        "by class": by_class(),
        "parts": lines_by_noise("choose-strong-parts-cpu.json", str),
    }
