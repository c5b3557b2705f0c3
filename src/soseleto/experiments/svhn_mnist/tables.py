"""The words of ``python -m soseleto.experiments.svhn_mnist``, and the tables made from what it wrote."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from soseleto.errors import UsageError
from soseleto.experiments import arguments as common
from soseleto.experiments.arguments import setting
from soseleto.experiments.results import Row, Spread, load, put_between, table
from soseleto.experiments.svhn_mnist.data import SOURCES
from soseleto.experiments.svhn_mnist.experiment import LINES, SOURCE_LINES, Config, configuration, everything, run_all

# Entries of the configuration that may be changed from outside.
NUMBERS = {
    "epochs": int,
    "n_source": int,
    "batch_size": int,
    "target_batch_size": int,
    "lr": float,
    "momentum": float,
    "weight_decay": float,
    "schedule": str,
    "classifier": str,
    "aligned": str,
    "rotate": float,
    "scale": float,
    "shift": float,
    "shear": float,
    "elastic": float,
    "n_heldout": int,
}


def parser() -> argparse.ArgumentParser:
    words = common.parser("svhn_mnist", __doc__, lines=LINES, seeds=20, numbers=NUMBERS)
    words.add_argument("--n-target", nargs="+", type=int, default=[20, 25])
    words.add_argument("--source", nargs="+", default=["0-4"], help=f"of {', '.join(SOURCES)}")
    words.add_argument("--plain", action="store_true", help="no augmentation, standardised by the source's statistics")
    words.add_argument("--everything", action="store_true", help="every cell of the tables, for these seeds")
    words.add_argument("--rounds", nargs="+", default=[], metavar="NAME=VALUE", help="settings of Unlabelled")
    return words


def configs(given: argparse.Namespace) -> list[Config]:
    """Every combination, those of a seed together, so that early rows already cover all methods."""
    changes: dict[str, Any] = {name: value for name in NUMBERS if (value := getattr(given, name)) is not None}
    if given.select:
        changes |= {"select": True, "n_heldout": given.n_heldout or 5000}
    if given.rounds:
        changes["rounds"] = tuple(setting(word) for word in given.rounds)
    if given.set:
        changes["settings"] = tuple(setting(word) for word in given.set)
    if given.everything:
        if changes:
            raise UsageError(f"--everything runs the configurations as they are: leave out {', '.join(changes)}.")
        return everything(given.seeds)
    return [
        configuration(method, n_target=n, source=source, plain=given.plain, seed=seed, small=given.small, **changes)
        for seed in given.seeds
        for n in given.n_target
        for source in given.source
        for method in given.methods
    ]


def main(argv: Sequence[str] | None = None) -> None:
    common.run_words(parser(), configs, run_all, argv)


PAPER = (
    ("paper: target only", "80.1", "84.0"),
    ("paper: fine-tuning", "80.2", "83.0"),
    ("paper: SOSELETO", "83.2", "87.9"),
    ("paper: Matching Networks", "56.6", "51.3"),
    ("paper: Matching Networks, fine-tuned", "79.3", "82.7"),
    ("paper: Luo et al. 2017", "80.4", "83.1"),
    ("paper: Luo et al. 2017, label-efficient", "94.2", "95.0"),
    ("paper: SOSELETO, unlabelled data", "", "92"),
)
TITLES = {name: title for name, (title, _) in LINES.items()}


def accuracy_table(rows: Sequence[Row]) -> str:
    """SVHN 0-4: accuracy by the number of labelled images, with augmentation and in the paper's plain setting."""
    columns = {"20 images": 20, "25 images": 25, "20, plain": (20, "plain"), "25, plain": (25, "plain")}
    mine = [_at(row, _column(row)) for row in rows if row["setting"]["source"] == "0-4"]
    there = [title for title, at in columns.items() if any(row["setting"] == {"at": at} for row in mine)]
    paper = [[line[0], *(line[1 + n] if n < 2 else "" for n, _ in enumerate(there))] for line in PAPER]
    settings = {title: {"at": at} for title, at in columns.items()}
    return _table(mine, lambda row: row.get("accuracy"), TITLES, settings, paper)


def sources_table(rows: Sequence[Row]) -> str:
    """25 labelled images, every source: accuracy."""
    titles = {
        "SVHN 0-4": "0-4",
        "SVHN 0-9": "0-9",
        "half its labels shuffled": "shuffled",
        "half grey CIFAR-10": "grey-cifar",
    }
    mine = [_at(row, row["setting"]["source"]) for row in rows if row["setting"]["n_target"] == 25 and _plainly(row)]
    shown = {name: TITLES[name] for name in LINES if any(name in lines for lines in SOURCE_LINES.values())}
    settings = {title: {"at": source} for title, source in titles.items()}
    return _table(mine, lambda row: row.get("accuracy"), shown, settings)


def detection_table(rows: Sequence[Row]) -> str:
    """100·AUROC of useful against useless source examples, where it is known which are which."""
    spread = [
        {**_at(row, row["setting"]["source"]), "method": f"{row['method']} {signal}", "value": 100.0 * found["auroc"]}
        for row in rows
        if row["method"] == "soseleto_alone"
        for signal, found in row.get("detection", {}).items()
    ]
    titles = {"soseleto_alone score": "score", "soseleto_alone weight": "weight"}
    settings = {"half its labels shuffled": {"at": "shuffled"}, "half grey CIFAR-10": {"at": "grey-cifar"}}
    return _table(spread, lambda row: row["value"], titles, settings)


def classes_table(rows: Sequence[Row]) -> str:
    """SVHN 0-9: percent of a class's examples whose weight is above 0.8."""
    spread = [
        {**_at(row, one["class"]), "value": one["useful"]}
        for row in rows
        if row["method"] == "soseleto"
        for one in row.get("classes", ())
    ]
    settings = {str(digit): {"at": str(digit)} for digit in range(10)}
    return _table(spread, lambda row: row["value"], {"soseleto": "weight above 0.8"}, settings)


def paired_table(rows: Sequence[Row]) -> str:
    """SOSELETO's accuracy minus another line's, draw by draw: draws differ far more than methods do."""
    over = {
        "target_only": "target only",
        "fine_tuning": "fine-tuning",
        "soseleto_frozen": "its weights frozen at 1",
        "soseleto_shuffled": "its weights shuffled",
    }
    columns = {"20 images": 20, "25 images": 25}
    mine = [row for row in rows if row["setting"]["source"] == "0-4" and _plainly(row)]
    found = [
        {**row, "setting": {"at": n}, "value": difference}
        for n in columns.values()
        for row, difference in _differences([r for r in mine if r["setting"]["n_target"] == n], "soseleto", over)
    ]
    return _table(found, lambda row: row["value"], over, {title: {"at": n} for title, n in columns.items()})


def paired_sources_table(rows: Sequence[Row]) -> str:
    """The trunk from the source alone, learned weights over frozen ones, draw by draw."""
    columns = {"SVHN 0-4": "0-4", "half its labels shuffled": "shuffled", "half grey CIFAR-10": "grey-cifar"}
    over = {"soseleto_alone_frozen": "learned weights over weights frozen at 1"}
    found = [
        {**_at(row, source), "value": difference}
        for source in columns.values()
        for row, difference in _differences(
            [row for row in rows if row["setting"]["source"] == source], "soseleto_alone", over
        )
    ]
    return _table(found, lambda row: row["value"], over, {title: {"at": source} for title, source in columns.items()})


def _differences(rows: Sequence[Row], method: str, others: Mapping[str, str]) -> list[tuple[Row, float]]:
    """Each row of the other methods, with how much better ``method`` did in the same draw."""
    ours = {row["seed"]: row["accuracy"] for row in rows if row["method"] == method}
    return [
        (row, ours[row["seed"]] - row["accuracy"]) for row in rows if row["method"] in others and row["seed"] in ours
    ]


TABLES = {
    "paired": paired_table,
    "paired sources": paired_sources_table,
    "accuracy": accuracy_table,
    "sources": sources_table,
    "detection": detection_table,
    "classes": classes_table,
}


def page(text: str, results: str | Path) -> str:
    """A page of docs with its tables made anew from a results file."""
    rows = load(results).rows
    for mark, make in TABLES.items():
        text = put_between(text, mark, make(rows))
    return text


def _column(row: Row) -> Any:
    n = row["setting"]["n_target"]
    return (n, "plain") if row["setting"].get("plain") else n


def _plainly(row: Row) -> bool:
    return not row["setting"].get("plain") and not row["setting"]["unlabelled"]


def _at(row: Row, column: Any) -> Row:
    return {**row, "setting": {"at": column}}


def _table(
    rows: Sequence[Row], value: Any, methods: Mapping[str, str], settings: Mapping[str, Any], more: Any = ()
) -> str:
    return table(rows, value, methods=methods, settings=settings, more=more, show=Spread.with_error)
