"""The report page: the sections that the run's files allow, rendered through one autoescaped template."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from soseleto.report import charts, figure1, gallery, sentences, tables
from soseleto.report.assets import asset, digest, template
from soseleto.report.charts import Figure
from soseleto.report.files import RunFiles, read
from soseleto.report.gallery import ClassGallery
from soseleto.run_folder.files import aside, readable, replacing
from soseleto.run_folder.folder import REPORT
from soseleto.run_folder.ranking import most_suspicious_first, suspect_rows

EXAMPLES_SHOWN = 20
FILTERS = (sentences.count, sentences.share, sentences.percent, sentences.number)
TABLE_THRESHOLDS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9)


def write_report(run_path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run to ``out`` (default: into the run folder) and return its path."""
    path = Path(run_path) / REPORT if out is None else Path(out)
    page = render(run_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    inside = os.path.realpath(path) == os.path.realpath(Path(run_path) / REPORT)
    with (replacing if inside else aside)(path) as part:
        part.write_text(page, "utf-8")
    return path


def render(run_path: str | os.PathLike[str]) -> str:
    """The report of a run as one self-contained HTML page."""
    with readable(Path(run_path)):
        return _render(read(run_path))


def _render(run: RunFiles) -> str:
    style, script = asset("style.css"), asset("report.js")
    return template("report.html.j2", filters=FILTERS).render(
        run=run,
        style=Markup(style),  # files of this package: the only text that is not escaped
        script=Markup(script),
        policy=_policy(style, script),
        sentences=sentences.sentences(run),
        figures=sentences.key_figures(run),
        compared=sentences.compared(run),
        compared_how=sentences.compared_how(run),
        evaluated_on=sentences.evaluated_on(run) if sentences.compared(run) else "",
        panels=figure1.panels(run),
        curves=_curves(run),
        settings=_flat(run.config),
        **(_ranking_sections(run) if run.ranking and len(run.ranking["weight"]) else {}),
    )


def _ranking_sections(run: RunFiles) -> dict[str, Any]:
    """The sections made from the ranking: suspects, histograms, thresholds, labels, examples."""
    assert run.ranking is not None
    weight, wrong = run.ranking["weight"], run.wrong
    table = tables.kept(weight, wrong)
    labels, more_labels = tables.by_label(run.ranking["label"], weight)
    classes, more_classes = gallery.by_class(run)
    return {
        "histograms": _histograms(run, weight, wrong),
        "truth": [] if wrong is None else _truth(run, table),
        "thresholds": _threshold_rows(table),
        "labels": labels if len(labels) > 1 else [],
        "more_labels": more_labels,
        "start": tables.PAPER_THRESHOLD,
        "data": Markup(_slider_data(table, labels)),
        "strongest": gallery.strongest_suspects(run),
        "suspects": sentences.suspect_figures(run),
        "suspects_count": len(suspect_rows(run.ranking)),
        "worst_name": "Lowest-ranked" if run.is_transfer else "Most suspicious",
        "suspect_charts": _suspect_charts(run, wrong),
        "classes": classes or [_all_examples(run)],
        "more_classes": more_classes,
        "features": run.features,
        "has_suggestions": run.suggested is not None,
        "show_paths": _paths_differ_from_ids(run.ranking),
        "forms": {
            name: sentences.decimals(run.ranking[name])
            for name in ("score", *run.features)
            if run.ranking[name].dtype.kind == "f"
        },
    }


def _all_examples(run: RunFiles) -> ClassGallery:
    """The whole ranking as one gallery, where labels are not classes."""
    assert run.ranking is not None
    order = most_suspicious_first(run.ranking)
    shown = min(EXAMPLES_SHOWN, -(-len(order) // 2))
    best, worst = np.arange(shown), order[:shown]
    suspects = len(suspect_rows(run.ranking))
    return ClassGallery("", len(order), suspects, gallery.examples(run, best), gallery.examples(run, worst))


def _paths_differ_from_ids(ranking: dict[str, np.ndarray]) -> bool:
    """Whether paths are worth showing: ids are often the end of the path."""
    if "path" not in ranking:
        return False
    return any(not str(path).endswith(str(name)) for path, name in zip(ranking["path"], ranking["id"], strict=True))


def _histograms(run: RunFiles, weight: np.ndarray, wrong: np.ndarray | None) -> list[Figure]:
    figures = [
        charts.histogram(
            tables.weight_histogram(weight, wrong),
            title="Weights",
            x_label="weight",
            caption="Dashed line: the weight threshold selected below.",
            threshold=True,
        )
    ]
    score = run.column("score")
    table = None if score is None else tables.score_histogram(score, wrong)
    if table is not None:
        beyond = f" The outermost bars include {sentences.count(table.beyond)} outliers." if table.beyond else ""
        caption = f"{sentences.of_scores(run)}{beyond}"
        rule = None if run.is_strong else 0.0
        figures.append(charts.histogram(table, title="Scores", x_label="score", caption=caption, rule=rule))
    return figures


def _suspect_charts(run: RunFiles, wrong: np.ndarray | None) -> list[Figure]:
    """The probabilities of being mislabelled, and estimated precision and recall."""
    probability = run.column("mislabelled_probability")
    if probability is None:
        return []
    figure = charts.histogram(
        tables.weight_histogram(probability, wrong),
        title="Probability of being mislabelled",
        x_label="probability",
        caption=f"Dashed line: examples at or above this threshold are suspects.{_of_probabilities(run)}",
        rule=run.suspects.get("threshold"),
    )
    return [one for one in (figure, charts.estimated(run.suspects)) if one]


def _of_probabilities(run: RunFiles) -> str:
    basis = run.suspects.get("probability_basis")
    return f" Basis of the probabilities: {basis}." if basis else ""


def _truth(run: RunFiles, table: tables.Kept) -> list[Figure]:
    """Charts against the true labels, without those that Figure 1 shows already."""
    wrong = run.wrong
    assert wrong is not None
    if figure1.panels(run):
        return [charts.noise(wrong)]
    return [
        figure for figure in (charts.groups(run), charts.precision_and_recall(table), charts.noise(wrong)) if figure
    ]


def _curves(run: RunFiles) -> list[Figure]:
    """The metrics per epoch."""
    losses = (("source_loss", "first", "source"), ("target_loss", "second", "target"), ("test_loss", "third", "test"))
    changes = (("predicted_change", "first", "first-order prediction"), ("actual_change", "second", "measured"))
    condition = (("condition", "all", "ratio"),)
    figures = [
        charts.curves(run, "Losses", "loss", losses, caption=_UNWEIGHTED),
        charts.curves(
            run,
            "Test accuracy",
            "accuracy (%)",
            (("test_accuracy", "third", "test accuracy"),),
            from_zero=False,
        ),
        charts.curves(run, "Mean weight", "mean weight", (("mean_weight", "all", "mean weight"),)),
        charts.curves(
            run, "Effective sample size", "examples", (("effective_source", "all", "effective sample size"),)
        ),
        charts.groups(run, "Mean weight of the probes", among="probe_groups", caption=_PROBES),
        charts.weights_over_time(run),
        charts.curves(run, "Change of the target loss per step", "change", changes, caption=_FIRST_ORDER, level=0.0),
        charts.curves(run, "The paper’s sufficient condition", "ratio", condition, caption=_CONDITION, level=1.0),
    ]
    return [figure for figure in figures if figure]


_UNWEIGHTED = (
    "The source loss is the unweighted mean, mislabelled examples included: it may rise while the model improves."
)
_PROBES = "Probes are target examples added to the source; which of their labels are wrong is known. "
_FIRST_ORDER = "Where the lines diverge, the step is too long for the first-order approximation."
_CONDITION = (
    "λ_α divided by the paper’s bound. At 1 or above, the target loss is guaranteed to fall to first order; "
    "the condition is sufficient, not necessary."
)


def _threshold_rows(table: tables.Kept) -> list[dict[str, Any]]:
    """The slider's numbers at selected thresholds, for print and for browsers without JavaScript."""
    rows = []
    for threshold in TABLE_THRESHOLDS:
        at = round(threshold * 100)
        wrong = None if table.wrong is None else int(table.wrong[at])
        rows.append(
            {
                "at": threshold,
                "count": int(table.count[at]),
                "effective": float(table.effective[at]),
                "wrong": wrong,
            }
        )
    return rows


def _slider_data(table: tables.Kept, labels: list[tables.LabelRow]) -> str:
    """101 numbers per row instead of one per example, so that the page does not grow with the data."""
    data = {
        "kept": table.count.tolist(),
        "effective": [round(value, 1) for value in table.effective.tolist()],
        "wrong": None if table.wrong is None else table.wrong.tolist(),
        "labels": [row.kept.tolist() for row in labels],
    }
    return json.dumps(data, separators=(",", ":"))  # numbers only: cannot close the script element


def _flat(config: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value:
            rows += _flat(value, f"{prefix}{key}.")
        elif key != "format":
            rows.append((prefix + key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)))
    return rows


def _policy(style: str, script: str) -> str:
    """A content security policy that allows only the page's own style and script and inline images."""
    own = f"style-src '{digest(style)}'; script-src '{digest(script)}'"
    return f"default-src 'none'; {own}; img-src data:; base-uri 'none'; form-action 'none'"
