"""The tables made from the results file; runs on held-out images are in none of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from experiments.pretrained_images.experiment import FEW_WRONG, LINES, NOISE
from experiments.results import Row, Spread, fill_page, table

RUNS = 5  # seeds
NUMBERS = {"accuracy": "accuracy, percent", "seconds": "seconds of a run"}
SIGNALS = {
    "weight": "weight",
    "score": "score",
    "loss": "running mean loss",
    "margin": "running mean margin",
    "probability": "calibrated probability",
    "cleanlab_self_confidence": "self-confidence",
    "cleanlab_margin": "normalised margin",
}
OF_FEW = {**NUMBERS, **{f"auroc {name}": f"100·AUROC, {title}" for name, title in list(SIGNALS.items())[:4]}}
LISTS = {"claimed": "precision, claimed", "truth": "precision, true", "recall": "recall, true"}
TITLES = {name: title for name, (title, _) in LINES.items()}
TITLES_OF_FEW = {**TITLES, "soseleto_usual": "**SOSELETO, settings for many wrong labels**"}
Cell = tuple[str, float | None]  # of a row: its column and its value


def numbers(row: Row) -> Iterator[Cell]:
    """Accuracy on the test images, and seconds with as many parallel processes as the file says."""
    for name in NUMBERS:
        yield name, row[name]


def signals(row: Row, measure: str) -> Iterator[Cell]:
    """100 times the AUROC or the average precision of the wrong labels."""
    for name in SIGNALS:
        if name in row.get("detection", {}):
            yield name, 100.0 * row["detection"][name][measure]


def suspects(row: Row) -> Iterator[Cell]:
    """Suspects at a requested precision of 90 %, and the issues of cleanlab, in percent."""
    for one in row.get("suspects", []):
        yield from {**one["precision"], "recall": one["recall"]["truth"]}.items()
    if issues := row.get("issues"):
        yield "truth", issues["precision"]
        yield "recall", issues["recall"]


def numbers_and_aurocs(row: Row) -> Iterator[Cell]:
    yield from numbers(row)
    for name, value in signals(row, "auroc"):
        yield f"auroc {name}", value


def lines_table(
    rows: Sequence[Row],
    cells: Callable[[Row], Iterator[Cell]],
    columns: dict[str, str],
    noise: str = NOISE,
    titles: Mapping[str, str] = TITLES,
) -> str:
    """One line per method; cells with another number of runs than RUNS state it in brackets."""

    def show(cell: Spread) -> str:
        return str(cell) if cell.n == RUNS else f"{cell} ({cell.n})"

    found = [
        {**row, "setting": {"column": column}, "value": value}
        for row in rows
        if "accuracy" in row and row["setting"]["noise"] == noise
        for column, value in cells(row)
    ]
    settings = {title: {"column": name} for name, title in columns.items()}
    return table(found, lambda row: row["value"], methods=titles, settings=settings, show=show)


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "accuracy": partial(lines_table, cells=numbers, columns=NUMBERS),
    "auroc": partial(lines_table, cells=partial(signals, measure="auroc"), columns=SIGNALS),
    "suspects": partial(lines_table, cells=suspects, columns=LISTS),
    "few": partial(lines_table, cells=numbers_and_aurocs, columns=OF_FEW, noise=FEW_WRONG, titles=TITLES_OF_FEW),
}


page = partial(fill_page, tables=TABLES)
