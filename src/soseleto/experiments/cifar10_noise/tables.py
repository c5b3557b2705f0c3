"""The words of ``python -m soseleto.experiments.cifar10_noise``, and the tables made from what it wrote."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from soseleto.errors import UsageError
from soseleto.experiments import arguments as common
from soseleto.experiments.arguments import setting
from soseleto.experiments.cifar10_noise.experiment import LINES, NOISE, Config, configuration, run_all
from soseleto.experiments.results import Row, Spread, load, put_between, table
from soseleto.training.optimizers import SCHEDULES

SETTINGS = {
    "30 %": 0.3,
    "40 %": 0.4,
    "50 %": 0.5,
    "CIFAR-10N worse": "worse_label",
    "CIFAR-10N aggregate": "aggre_label",
}
PAPER = (
    ("paper: ordinary training", "65.57", "62.38", "57.36"),
    ("paper: Sukhbaatar et al., 10,000 clean", "69.73", "66.66", "63.39"),
    ("paper: Xiao et al., 10,000 clean", "69.81", "66.76", "63.00"),
    ("paper: SOSELETO", "72.41", "69.98", "66.33"),
)
UNAWARE = ("target_only", "oracle")
VARIANT = "…"  # how the titles of SOSELETO's variants begin
RUNS = 5  # seeds
NEAR = 3.0  # points
# Entries of the configuration that may be changed from outside.
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
}


def parser() -> argparse.ArgumentParser:
    words = common.parser("cifar10_noise", __doc__, lines=LINES, seeds=5, numbers=NUMBERS)
    words.add_argument("--noise", nargs="+", default=[str(n) for n in NOISE])
    words.add_argument("--probes", type=_noise, help="share of the clean images planted as probes, or auto")
    words.add_argument("--flip", action="store_true", default=None)
    words.add_argument("--no-record", dest="record", action="store_false", default=None)
    return words


def configs(given: argparse.Namespace) -> list[Config]:
    """Every combination, the cheap ones of a seed together, so that early rows already cover all methods."""
    names = (*NUMBERS, "probes", "flip", "record", "select")
    changes: dict[str, Any] = {name: value for name in names if (value := getattr(given, name)) is not None}
    if given.select and given.n_heldout is None:
        changes["n_heldout"] = 1000
    if given.schedule is not None and given.schedule not in SCHEDULES:
        raise UsageError(f"schedule must be one of {', '.join(SCHEDULES)}, got {given.schedule!r}.")
    if given.set:
        changes["settings"] = tuple(setting(word) for word in given.set)
    return [
        configuration(method, noise=_noise(noise), seed=seed, small=given.small, **changes)
        for seed in given.seeds
        for noise in given.noise
        for method in given.methods
    ]


def main(argv: Sequence[str] | None = None) -> None:
    common.run_words(parser(), configs, run_all, argv)


def accuracy_table(rows: Sequence[Row]) -> str:
    """Accuracy of every method after the last epoch, with the paper's numbers on top."""
    titles = {name: title for name, (title, _) in LINES.items() if not title.startswith(VARIANT)}
    settings = {title: {"noise": noise} for title, noise in SETTINGS.items()}
    there = {row["setting"]["noise"] for row in rows}
    symmetric = [n for n in SETTINGS.values() if isinstance(n, float)]
    blank = [""] * sum(n in there for n in SETTINGS.values() if isinstance(n, str))
    paper = [[line[0], *(line[1 + i] for i, n in enumerate(symmetric) if n in there), *blank] for line in PAPER]
    return _accuracies(_at_every_noise(rows), titles, settings, paper)


def ingredients_table(rows: Sequence[Row]) -> str:
    """SOSELETO's accuracy with one thing changed."""
    titles = {name: title for name, (title, _) in LINES.items() if title.startswith(VARIANT) or name == "soseleto"}
    rows = [row for row in rows if row["method"] in titles]
    return _accuracies(rows, titles, _columns(), [])


def _accuracies(
    rows: Sequence[Row], titles: Mapping[str, str], settings: Mapping[str, Any], more: Sequence[Sequence[str]]
) -> str:
    """A cell that is of other than five runs says of how many."""

    def show(cell: Spread) -> str:
        return str(cell) if cell.n == RUNS else f"{cell} ({cell.n})"

    return table(rows, lambda row: row.get("accuracy"), methods=titles, settings=settings, more=more, show=show)


def _at_every_noise(rows: Sequence[Row]) -> list[Row]:
    """Lines that see no noisy label are the same run at every noise, which need not be run again."""
    there = dict.fromkeys(row["setting"]["noise"] for row in rows)
    found = {(row["method"], row["seed"]): row for row in rows if row["method"] in UNAWARE}
    same = [{**row, "setting": {"noise": noise}} for row in found.values() for noise in there]
    return [row for row in rows if row["method"] not in UNAWARE] + same


def better_half_table(rows: Sequence[Row]) -> str:
    """Percent of wrong labels in the better half of SOSELETO's source, by weight, by score, and by the free signals."""
    mine = [row for row in rows if row["method"] == "soseleto"]
    return _signals(mine, lambda row, name: row["kept"][name][row["kept"]["fraction"].index(0.5)])


def auroc_table(rows: Sequence[Row]) -> str:
    """100·AUROC of right against wrong labels."""
    return _signals(_detecting(rows), lambda row, name: 100.0 * row["detection"][name]["auroc"])


def precision_table(rows: Sequence[Row]) -> str:
    """Percent of wrong labels among the k least trusted, k the true number of wrong labels."""
    return _signals(_detecting(rows), lambda row, name: 100.0 * row["detection"][name]["precision"])


def knowledge_table(rows: Sequence[Row]) -> str:
    """100·AUROC of SOSELETO's score beside that of the running mean loss, by what the loss's network has seen."""
    titles = {"score": "SOSELETO's score", **{name: f"loss, {title}" for name, title in LOSS_OF.items()}}
    scored = [{**row, "method": "score", "signal": "score"} for row in rows if row["method"] == "soseleto"]
    lost = [{**row, "signal": "loss"} for row in rows if row["method"] in LOSS_OF and "detection" in row]
    return table(
        [*scored, *lost],
        lambda row: 100.0 * row["detection"][row["signal"]]["auroc"],
        methods=titles,
        settings=_columns(),
    )


LOSS_OF = {
    "target_only": "trained on the target alone",
    "ordinary": "trained on the source alone",
    "mixed": "trained on both",
    "soseleto": "trained by SOSELETO",
}


def suspects_table(rows: Sequence[Row]) -> str:
    """Precision and recall as the probes estimate them and as they are, and how far these are apart."""
    spread = [
        {**row, "method": f"{told['asked']:.0f} {name} {kind}", "value": _told(told[name], kind)}
        for row in rows
        for told in row.get("suspects", [])
        for name in ("precision", "recall")
        for kind in ("estimate", "truth", "error")
    ]
    titles = {
        f"{asked} {name} {kind}": f"asked {asked} %: {name}, {kind}"
        for asked in dict.fromkeys(f"{told['asked']:.0f}" for row in rows for told in row.get("suspects", []))
        for name in ("precision", "recall")
        for kind in ("estimate", "truth", "error")
    }
    for row in rows:
        errors = [_told(told[name], "error") for told in row.get("suspects", []) for name in ("precision", "recall")]
        if errors:
            spread.append({**row, "method": "near", "value": 100 * sum(e <= NEAR for e in errors) / len(errors)})
    titles["near"] = f"estimates of a run within {NEAR:.0f} points of the truth"
    return table(spread, lambda row: row["value"], methods=titles, settings=_columns())


def _told(estimate: Mapping[str, float], kind: str) -> float:
    error = abs(estimate["value"] - estimate["truth"])
    return {"estimate": estimate["value"], "truth": estimate["truth"], "error": error}[kind]


def _detecting(rows: Sequence[Row]) -> list[Row]:
    """The runs whose signals stand side by side: those with probes where there are any, and cleanlab's."""
    probes = any(row["method"] == "soseleto_probes" for row in rows)
    return [row for row in rows if row["method"] in ("soseleto_probes" if probes else "soseleto", "cleanlab")]


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
    spread = [{**row, "method": name, "value": value(row, name)} for row in rows for name in row.get("detection", {})]
    return table(spread, lambda row: row["value"], methods=SIGNALS, settings=_columns())


def _columns() -> dict[str, dict[str, Any]]:
    return {title: {"noise": noise} for title, noise in SETTINGS.items()}


TABLES = {
    "accuracy": accuracy_table,
    "ingredients": ingredients_table,
    "better half": better_half_table,
    "auroc": auroc_table,
    "precision": precision_table,
    "knowledge": knowledge_table,
    "suspects": suspects_table,
}


def page(text: str, results: str | Path) -> str:
    """A page of docs with its tables made anew from a results file."""
    rows = load(results).rows
    for mark, make in TABLES.items():
        text = put_between(text, mark, make(rows))
    return text


def _noise(word: str) -> float | str:
    try:
        return float(word)
    except ValueError:
        return word
