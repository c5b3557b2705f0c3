"""How defaults were chosen: what moves the weights, and the strong recipe."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from pages.common import ROOT, benchmark, load, table
from soseleto.experiments.cifar10_deep import tables as cifar10_deep
from soseleto.experiments.results import Spread


def usual() -> str:
    """What moves the weights where few and where many labels are wrong: mean accuracies over the draws to choose on."""
    rows, lines = load("choose-usual.json")["rows"], []
    cells = list(dict.fromkeys((row["data"], row["noise"], row["rate"]) for row in rows))
    cells.sort(key=lambda cell: (cell[2] > 0.1, cell))
    for line in benchmark("choose_usual").LINES:
        shown = []
        for cell in cells:
            same = [row for row in rows if (row["data"], row["noise"], row["rate"]) == cell and row["line"] == line]
            own = [row["accuracy"] for row in same]
            shown.append(f"{statistics.fmean(own):.1f}{'¹' if len(own) == 1 else ''}" if own else "")
        lines.append([line.replace("_", " "), *shown])
    return table(["weights move by", *map(_cell, cells)], lines)


FEW_DRAWS = 4  # below which a cell states its number of draws


def usual_steps() -> str:
    """Of the second comparison: points above mixed training on the same draws."""
    rows, lines = load("choose-usual-steps.json")["rows"], []
    choose = benchmark("choose_usual")
    found = {(row["line"], row["data"], row["noise"], row["rate"], row["seed"]): row["accuracy"] for row in rows}
    for line in choose.STEP_LINES:
        shown = []
        for cell in choose.STEP_CELLS:
            own = [
                accuracy - found["mixed", *cell, key[-1]]
                for key, accuracy in found.items()
                if key[:-1] == (line, *cell) and ("mixed", *cell, key[-1]) in found
            ]
            few = f" ({len(own)})" if 0 < len(own) < FEW_DRAWS else ""
            shown.append(f"{statistics.fmean(own):+.1f}{few}" if own else "")
        if line != "mixed" and any(shown):
            lines.append([line, *shown])
    return table(["weights move by", *map(_cell, choose.STEP_CELLS)], lines)


def _cell(cell: tuple[str, str, float]) -> str:
    data, noise, rate = cell
    return f"{data} {'next class ' if noise == 'pairs' else ''}{100 * rate:g} %"


def preconditioned() -> str:
    """Plain alignments against those with the optimizer's preconditioner: means over draws."""
    titles = {
        "minilm": "MiniLM fine-tuned",
        "embeddings": "linear classifier of its embeddings",
        "images": "SVHN, 30 % flipped, Quick",
    }
    rows = [row for name in ("gpu", "cpu") for row in load(f"preconditioned-{name}.json")["rows"]]
    lines = []
    for problem, title in titles.items():
        own = [row for row in rows if row["problem"] == problem]
        for line in dict.fromkeys(row["method"] for row in own):
            found = [row for row in own if row["method"] == line]
            cells = [f"{statistics.fmean(row['accuracy'] for row in found):.1f}"]
            for name in ("AUROC weight", "AUROC score"):
                cells.append(f"{statistics.fmean(row[name] for row in found):.3f}" if name in found[0] else "")
            lines.append([title, line, *cells, str(len(found))])
    return table(["model", "alignments", "accuracy", "AUROC of weights", "of scores", "draws"], lines)


def never_worse() -> str:
    """The command line's model against the best of its rivals."""
    if not (ROOT / "results" / "never_worse.json").exists():
        return "Not run yet."
    lines = []
    for row in benchmark("never_worse").summary(load("never_worse.json")["rows"]):
        kind = "next class, " if row["mistakes"] == "pairs" else ""
        mistakes = "" if row["rate"] is None else f"{kind}{row['rate']:.0%}"
        points = [f"{row[name]:+.1f}" for name in ("SOSELETO − ordinary", "SOSELETO − best", "kept − best")]
        lines.append([row["data"], mistakes, str(row["draws"]), *points, str(row["kept SOSELETO"])])
    columns = ["data", "wrong labels", "draws", "SOSELETO − ordinary", "SOSELETO − best rival", "kept − best rival"]
    return table([*columns, "SOSELETO kept"], lines)


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


def strong() -> dict[str, str]:
    """Of docs/explanation/strong.md."""
    rows = load("cifar10-deep-choose.json")["rows"]
    return {
        "chosen": cifar10_deep.chosen_table(rows),
        "rivals": cifar10_deep.rivals_table(rows),
        "by class": by_class(),
        "dropped values": lines_by_noise(
            "choose-strong-tables-cpu.json", lambda noise: f"{noise:.0%} flipped".replace("%", " %")
        ),
        "parts": lines_by_noise("choose-strong-parts-cpu.json", str),
    }


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


def parts() -> dict[str, str]:
    """Of docs/explanation/alignments.md."""
    return {
        "usual": usual(),
        "usual steps": usual_steps(),
        "never worse": never_worse(),
        "preconditioned": preconditioned(),
    }
