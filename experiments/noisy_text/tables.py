"""The tables made from the results file; runs on held-out texts are in none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from experiments.noisy_text.configuration import ENCODERS, LINES, TRUSTED
from experiments.results import Row, Spread, fill_page, table

NEWS = {"ag_news": "NoisyAG-News", "hausa": "Hausa"}
USED = {"trained": "fine-tuned", "frozen": "frozen"}
RUNS = 5  # seeds
# Signals that rank labels: the line, the entry of its row, and the title.
SIGNALS = (
    ("ordinary", "margin", "ordinary training, running margin"),
    ("target_only", "margin", "target only, running margin"),
    ("mixed", "margin", "noisy and trusted mixed, running margin"),
    ("cleanlab", "cleanlab_self_confidence", "cleanlab, self-confidence"),
    ("logistic_right", "right labels", "oracle: logistic regression, right labels of four other fifths"),
    ("soseleto", "weight", "SOSELETO, weight"),
    ("soseleto", "score", "SOSELETO, score"),
    ("soseleto_usual", "weight", "SOSELETO, default for many wrong labels, weight"),
    ("soseleto_usual", "score", "SOSELETO, default for many wrong labels, score"),
    ("soseleto_usual", "margin", "… running margin"),
    ("strong", "weight", "strong recipe, weight"),
    ("soseleto_probes", "probability", "**SOSELETO, calibrated probability**"),
    ("soseleto_probes_alone", "probability", "… earlier labels unknown"),
    ("soseleto_shared_probes", "probability", "**SOSELETO, target gradient in θ's step, calibrated probability**"),
    ("soseleto_doubting_probes", "probability", "**SOSELETO, labels doubted, calibrated probability**"),
    ("soseleto_usual_probes", "probability", "**SOSELETO, default for many wrong labels, calibrated probability**"),
    ("strong_probes", "probability", "**strong recipe, calibrated probability**"),
)
PROBES = {
    "soseleto_probes": "SOSELETO",
    "soseleto_probes_alone": "SOSELETO, earlier labels unknown",
    "soseleto_shared_probes": "SOSELETO, target gradient in θ's step",
    "soseleto_doubting_probes": "SOSELETO, labels doubted",
    "soseleto_usual_probes": "SOSELETO, default for many wrong labels",
    "strong_probes": "strong recipe",
}
LISTS = {"claimed": "precision, claimed", "truth": "precision, true", "recall": "recall, true"}


def accuracy_table(rows: Sequence[Row], encoder: str) -> str:
    """Accuracy on the test texts in percent."""
    found = [{**row, "value": row["accuracy"]} for row in _tested(rows)]
    return _table(found, {name: title for name, (title, _) in LINES.items()}, (encoder,))


def signals_table(rows: Sequence[Row], measure: str) -> str:
    """100 times the AUROC or the average precision of the wrong labels, by line and signal."""
    found = [
        {**row, "method": f"{line} {signal}", "value": 100.0 * row["detection"][signal][measure]}
        for row in _tested(rows)
        for line, signal, _ in SIGNALS
        if row["method"] == line and signal in row.get("detection", {})
    ]
    return _table(found, {f"{line} {signal}": title for line, signal, title in SIGNALS})


def suspects_table(rows: Sequence[Row]) -> str:
    """Suspects at a requested precision of 90 %, and the issues of cleanlab, in percent."""
    found = []
    for row in _tested(rows):
        if row["method"] == "cleanlab":
            found += [{**row, "method": f"cleanlab {name}", "value": row["issues"][field]}
                      for name, field in (("truth", "precision"), ("recall", "recall"))]  # fmt: skip
        for one in row.get("suspects", []):
            values = {**one["precision"], "recall": one["recall"]["truth"]}
            found += [{**row, "method": f"{row['method']} {name}", "value": values[name]} for name in LISTS]
    lines = {"cleanlab": "cleanlab", **PROBES}
    titles = {f"{line} {name}": f"{title}: {what}" for line, title in lines.items() for name, what in LISTS.items()}
    return _table(found, titles)


def _tested(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if "accuracy" in row]


def _table(rows: Sequence[Row], titles: Mapping[str, str], encoders: Sequence[str] = tuple(ENCODERS)) -> str:
    """A table of the entry "value"; cells with another number of runs than RUNS state it in brackets."""

    def show(cell: Spread) -> str:
        return str(cell) if cell.n == RUNS else f"{cell} ({cell.n})"

    return table(rows, lambda row: row["value"], methods=titles, settings=_columns(encoders), show=show)


def _columns(encoders: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Settings by title; the title names the encoder where there are both."""
    return {
        f"{NEWS[noise]}, {n} trusted{f', {USED[encoder]}' if len(encoders) > 1 else ''}": {
            "noise": noise,
            "n_trusted": n,
            "encoder": encoder,
        }
        for encoder in encoders
        for noise, sizes in TRUSTED.items()
        for n in sizes
    }


TABLES: dict[str, Callable[[Sequence[Row]], str]] = {
    "fine-tuned": partial(accuracy_table, encoder="trained"),
    "frozen": partial(accuracy_table, encoder="frozen"),
    "auroc": partial(signals_table, measure="auroc"),
    "suspects": suspects_table,
}


page = partial(fill_page, tables=TABLES)
