"""Command line of ``python -m experiments.svhn_mnist``, and the tables made from its results file."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from experiments import arguments
from experiments.results import Row, Spread, fill_page, table
from experiments.svhn_mnist.data import SOURCES
from experiments.svhn_mnist.experiment import LINES, SOURCE_LINES, Config, configuration, everything, run_all
from soseleto.errors import UsageError

# Configuration fields that have a command-line option.
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
    "dropout": float,
    "rotate": float,
    "scale": float,
    "shift": float,
    "shear": float,
    "elastic": float,
    "n_heldout": int,
}


def parser() -> argparse.ArgumentParser:
    made = arguments.parser("svhn_mnist", __doc__, lines=LINES, seeds=20, numbers=NUMBERS)
    made.add_argument("--n-target", nargs="+", type=int, default=[20, 25])
    made.add_argument("--source", nargs="+", default=["0-4"], help=f"of {', '.join(SOURCES)}")
    made.add_argument("--plain", action="store_true", help="the paper's setting, without augmentation")
    made.add_argument("--everything", action="store_true", help="every cell of the tables, for these seeds")
    made.add_argument("--rounds", nargs="+", default=[], metavar="NAME=VALUE", help="settings of Unlabelled")
    return made


def configs(given: argparse.Namespace) -> list[Config]:
    """Every combination, ordered by seed, so that the first rows already cover all methods."""
    changes = arguments.changes(given, NUMBERS, n_heldout=5000)
    if given.rounds:
        changes["rounds"] = tuple(arguments.setting(text) for text in given.rounds)
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
    arguments.run(parser(), configs, run_all, argv)


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
IMAGES = {"20 images": 20, "25 images": 25}
PLAIN_IMAGES = {"20, plain": (20, "plain"), "25, plain": (25, "plain")}
RUNS = 20  # draws of a cell
USELESS = {"half its labels shuffled": "shuffled", "half grey CIFAR-10": "grey-cifar"}


def accuracy_table(rows: Sequence[Row]) -> str:
    """SVHN 0-4: accuracy by the number of labelled images, with augmentation and in the paper's plain setting."""
    columns = {**IMAGES, **PLAIN_IMAGES}
    mine = [_at(row, _column(row)) for row in rows if row["setting"]["source"] == "0-4"]
    shown = [title for title, at in columns.items() if any(row["setting"] == {"at": at} for row in mine)]
    paper = [[line[0], *(line[1 if title.startswith("20") else 2] for title in shown)] for line in PAPER]
    return _table(mine, TITLES, columns, more=paper)


def sources_table(rows: Sequence[Row]) -> str:
    """25 labelled images, every source: accuracy."""
    columns = {"SVHN 0-4": "0-4", "SVHN 0-9": "0-9", **USELESS}
    mine = [row for row in rows if row["setting"]["n_target"] == 25 and _augmented(row)]
    shown = {name: TITLES[name] for name in LINES if any(name in lines for lines in SOURCE_LINES.values())}
    return _table([_at(row, row["setting"]["source"]) for row in mine], shown, columns)


def detection_table(rows: Sequence[Row]) -> str:
    """100·AUROC of useful against useless source examples, where it is known which are which."""
    found = [
        {**_at(row, row["setting"]["source"]), "method": signal, "value": 100.0 * numbers["auroc"]}
        for row in rows
        if row["method"] == "soseleto_alone"
        for signal, numbers in row.get("detection", {}).items()
    ]
    return _table(found, {"score": "score", "weight": "weight"}, USELESS, value="value")


def classes_table(rows: Sequence[Row]) -> str:
    """SVHN 0-9: percent of a class's examples whose weight is above 0.8."""
    found = [
        {**_at(row, facts["class"]), "value": facts["useful"]}
        for row in rows
        if row["method"] == "soseleto"
        for facts in row.get("classes", ())
    ]
    columns = {str(digit): str(digit) for digit in range(10)}
    return _table(found, {"soseleto": "weight above 0.8"}, columns, value="value")


def paired_table(rows: Sequence[Row]) -> str:
    """SOSELETO's accuracy minus another line's, draw by draw: draws differ far more than methods do."""
    over = {
        "target_only": "target only",
        "fine_tuning": "fine-tuning",
        "soseleto_frozen": "its weights frozen at 1",
        "soseleto_shuffled": "its weights shuffled",
    }
    mine = [row for row in rows if row["setting"]["source"] == "0-4" and _augmented(row)]
    return _paired([_at(row, row["setting"]["n_target"]) for row in mine], "soseleto", over, IMAGES)


def paired_plain_table(rows: Sequence[Row]) -> str:
    """The paper's setting: accuracy of Algorithm 1 as printed, weights from 1, minus another line's, draw by draw."""
    over = {
        "target_only": "target only",
        "fine_tuning": "fine-tuning",
        "soseleto_paper": "its weights from 0.5",
        "soseleto_paper_frozen": "its weights frozen at 1",
    }
    mine = [_at(row, _column(row)) for row in rows if row["setting"].get("plain")]
    return _paired(mine, "soseleto_paper_one", over, PLAIN_IMAGES)


def paired_sources_table(rows: Sequence[Row]) -> str:
    """Trunk trained by the source alone: accuracy with learned weights minus that with frozen ones, draw by draw."""
    over = {"soseleto_alone_frozen": "learned weights over weights frozen at 1"}
    mine = [_at(row, row["setting"]["source"]) for row in rows]
    return _paired(mine, "soseleto_alone", over, {"SVHN 0-4": "0-4", **USELESS})


TABLES = {
    "paired": paired_table,
    "paired plain": paired_plain_table,
    "paired sources": paired_sources_table,
    "accuracy": accuracy_table,
    "sources": sources_table,
    "detection": detection_table,
    "classes": classes_table,
}
page = partial(fill_page, tables=TABLES)


def _column(row: Row) -> Any:
    n = row["setting"]["n_target"]
    return (n, "plain") if row["setting"].get("plain") else n


def _augmented(row: Row) -> bool:
    """Whether a run is with augmentation and without unlabelled data."""
    return not row["setting"].get("plain") and not row["setting"]["unlabelled"]


def _at(row: Row, column: Any) -> Row:
    """The row in a column of the table, in place of its setting."""
    return {**row, "setting": {"at": column}}


def _paired(rows: Sequence[Row], method: str, over: Mapping[str, str], columns: Mapping[str, Any]) -> str:
    """By how much ``method`` is better than each of the lines ``over`` in the same column and draw."""
    ours = {(row["setting"]["at"], row["seed"]): row["accuracy"] for row in rows if row["method"] == method}
    found = [
        {**row, "value": ours[draw] - row["accuracy"]}
        for row in rows
        if row["method"] in over and (draw := (row["setting"]["at"], row["seed"])) in ours
    ]
    return _table(found, over, columns, value="value")


def _table(
    rows: Sequence[Row],
    methods: Mapping[str, str],
    columns: Mapping[str, Any],
    *,
    value: str = "accuracy",
    more: Sequence[Sequence[str]] = (),
) -> str:
    """Mean and standard error of the entry ``value``, in the columns (title -> column of ``_at``).

    Cells with another number of draws than RUNS state it in brackets.
    """
    settings = {title: {"at": at} for title, at in columns.items()}

    def show(cell: Spread) -> str:
        return cell.with_error() if cell.n == RUNS else f"{cell.with_error()} ({cell.n})"

    return table(rows, lambda row: row.get(value), methods=methods, settings=settings, more=more, show=show)
