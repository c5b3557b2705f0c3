"""Command line of ``python -m experiments.cifar10_noise``, and the tables made from its results file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from experiments import arguments
from experiments.cifar10_noise.experiment import LINES, NOISE, Config, configuration, run_all
from experiments.results import Row, Spread, fill_page, table

SETTINGS = {
    "30 %": 0.3,
    "40 %": 0.4,
    "50 %": 0.5,
    "CIFAR-10N worst": "worse_label",
    "CIFAR-10N aggregate": "aggre_label",
}
PAPER = (
    ("paper: ordinary training", "65.57", "62.38", "57.36"),
    ("paper: Sukhbaatar et al., 10,000 clean", "69.73", "66.66", "63.39"),
    ("paper: Xiao et al., 10,000 clean", "69.81", "66.76", "63.00"),
    ("paper: SOSELETO", "72.41", "69.98", "66.33"),
)
UNAWARE = ("target_only", "oracle")  # lines that see no noisy label
VARIANT = "…"  # first character of the titles of SOSELETO's variants
RUNS = 5  # seeds
RATES = ("precision", "recall")
# Configuration fields that have a command-line option.
NUMBERS = {
    "epochs": int,
    "batch_size": int,
    "lr": float,
    "weight_decay": float,
    "crop": int,
    "n_clean": int,
    "n_heldout": int,
    "schedule": str,
    "precision": str,
    "micro_batch_size": int,
    "folds": int,
    "model": str,
}


def parser() -> argparse.ArgumentParser:
    made = arguments.parser("cifar10_noise", __doc__, lines=LINES, seeds=5, numbers=NUMBERS)
    made.add_argument("--noise", nargs="+", default=[str(n) for n in NOISE])
    made.add_argument(
        "--probes", type=arguments.number_or_name, help="share of the clean images planted as probes, or auto"
    )
    made.add_argument("--flip", action="store_true", default=None)
    made.add_argument("--no-record", dest="record", action="store_false", default=None)
    return made


def configs(given: argparse.Namespace) -> list[Config]:
    """Every combination, ordered by seed, so that the first rows already cover all methods."""
    changes = arguments.changes(given, (*NUMBERS, "probes", "flip", "record"), n_heldout=1000)
    return [
        configuration(method, noise=arguments.number_or_name(noise), seed=seed, small=given.small, **changes)
        for seed in given.seeds
        for noise in given.noise
        for method in given.methods
    ]


def main(argv: Sequence[str] | None = None) -> None:
    arguments.run(parser(), configs, run_all, argv)


def accuracy_table(rows: Sequence[Row]) -> str:
    """Accuracy of every method after the last epoch, with the paper's numbers on top."""
    titles = {name: title for name, (title, _) in LINES.items() if not title.startswith(VARIANT)}
    noises = {row["setting"]["noise"] for row in rows}
    symmetric = [n for n in SETTINGS.values() if isinstance(n, float)]
    blank = [""] * sum(n in noises for n in SETTINGS.values() if isinstance(n, str))
    paper = [[line[0], *(line[1 + i] for i, n in enumerate(symmetric) if n in noises), *blank] for line in PAPER]
    return _accuracies(at_every_noise(rows), titles, paper)


def ingredients_table(rows: Sequence[Row]) -> str:
    """SOSELETO's accuracy with one setting changed at a time."""
    titles = {name: title for name, (title, _) in LINES.items() if title.startswith(VARIANT) or name == "soseleto"}
    rows = [row for row in rows if row["method"] in titles]
    return _accuracies(rows, titles)


def _accuracies(rows: Sequence[Row], titles: Mapping[str, str], paper: Sequence[Sequence[str]] = ()) -> str:
    """Cells with another number of runs than RUNS state it in brackets."""

    def show(cell: Spread) -> str:
        return str(cell) if cell.n == RUNS else f"{cell} ({cell.n})"

    return table(rows, lambda row: row.get("accuracy"), methods=titles, settings=_columns(), more=paper, show=show)


def at_every_noise(rows: Sequence[Row]) -> list[Row]:
    """Copy the runs of lines that see no noisy label to every noise, where they would be the same."""
    noises = dict.fromkeys(row["setting"]["noise"] for row in rows)
    found = {(row["method"], row["seed"]): row for row in rows if row["method"] in UNAWARE}
    same = [{**row, "setting": {"noise": noise}} for row in found.values() for noise in noises]
    return [row for row in rows if row["method"] not in UNAWARE] + same


def deep_table(rows: Sequence[Row]) -> str:
    """A deep network's accuracy with learned and with frozen weights, and 100·AUROC of weight and score."""
    found = [{**row, "value": row["accuracy"]} for row in rows]
    for row in rows:
        signals = row.get("detection", {})
        found += [{**row, "method": name, "value": 100.0 * signals[name]["auroc"]} for name in signals]
    signals = {name: f"100·AUROC of the {title}" for name, title in SIGNALS.items() if name in SIMPLE}
    lines = ("soseleto_last_layer", "soseleto_last_layer_frozen")
    learned = [row for row in found if row["method"] in lines or row["config"]["method"] == lines[0]]
    return _values(learned, {**{name: LINES[name][0] for name in lines}, **signals})


SIMPLE = ("weight", "score", "loss", "margin")


def better_half_table(rows: Sequence[Row]) -> str:
    """Percent of wrong labels in the better half of SOSELETO's source, by weight, score and the other signals."""
    mine = _of_first(rows, FITTED)
    return _signals(mine, lambda row, name: row["kept"][name][row["kept"]["fraction"].index(0.5)])


def auroc_table(rows: Sequence[Row]) -> str:
    """100·AUROC of right against wrong labels."""
    return _signals(_detecting(rows), lambda row, name: 100.0 * row["detection"][name]["auroc"])


def suspects_table(rows: Sequence[Row]) -> str:
    """True precision and recall of the suspects at a requested precision."""
    values: list[Row] = []
    titles: dict[str, str] = {}
    for row in _of_first(rows, PROBED):
        for suspects in row.get("suspects", []):
            for rate in RATES:
                title = f"requested {suspects['asked']:.0f} %: {rate}"
                titles[title] = title
                values.append({**row, "method": title, "value": suspects[rate]["truth"]})
    return _values(values, titles)


def _detecting(rows: Sequence[Row]) -> list[Row]:
    """The runs whose signals are compared: those with probes if there are any, and cleanlab's."""
    return _of_first(rows, (*PROBED, *FITTED)) + [row for row in rows if row["method"] == "cleanlab"]


FITTED = ("soseleto_usual", "soseleto")
PROBED = ("soseleto_usual_probes", "soseleto_probes")


def _of_first(rows: Sequence[Row], lines: Sequence[str]) -> list[Row]:
    """The runs of the first of these lines that has any."""
    for line in lines:
        if found := [row for row in rows if row["method"] == line]:
            return found
    return []


SIGNALS = {
    "score": "score",
    "weight": "weight",
    "loss": "running mean loss",
    "margin": "running margin",
    "final_margin": "margin at the end",
    "agreement": "nearest target examples",
    "neighbours": "nearest source examples, weighted",
    "cleanlab_self_confidence": "cleanlab, self-confidence",
    "cleanlab_margin": "cleanlab, normalised margin",
    "cleanlab_confident": "cleanlab, confident thresholds",
    "probability": "**calibrated probability**",
}


def _signals(rows: Sequence[Row], value: Any) -> str:
    found = [{**row, "method": name, "value": value(row, name)} for row in rows for name in row.get("detection", {})]
    return _values(found, SIGNALS)


def _values(rows: Sequence[Row], titles: Mapping[str, str]) -> str:
    """A table of the entry "value"."""
    return table(rows, lambda row: row["value"], methods=titles, settings=_columns())


def _columns() -> dict[str, dict[str, Any]]:
    return {title: {"noise": noise} for title, noise in SETTINGS.items()}


TABLES = {
    "accuracy": accuracy_table,
    "ingredients": ingredients_table,
    "better half": better_half_table,
    "auroc": auroc_table,
    "suspects": suspects_table,
}


page = partial(fill_page, tables=TABLES)
