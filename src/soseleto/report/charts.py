"""The report's charts, each with its title, caption, legend and text alternative."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup

from soseleto.report.files import Record, RunFiles, as_number
from soseleto.report.sentences import count, number, share
from soseleto.report.svg import Chart
from soseleto.report.tables import PAPER_THRESHOLD, THRESHOLDS, Histogram, Kept, noise_curve, precision_recall

NAMES = {"right": "correctly labelled", "wrong": "mislabelled", "all": "source examples"}
CURVE = ("threshold", "precision", "recall")  # of suspects.json
Legend = tuple[tuple[str, str, str], ...]  # (mark, kind, text)
PRECISION_RECALL: Legend = (("line", "first", "precision"), ("line", "second", "recall"))


@dataclass(frozen=True)
class Figure:
    """One chart with its title, caption and legend."""

    title: str
    picture: Markup
    caption: str = ""
    legend: Legend = ()


def histogram(
    table: Histogram, *, title: str, x_label: str, caption: str, threshold: bool = False, rule: float | None = None
) -> Figure:
    """Bars of one group, or of correctly labelled and mislabelled examples overlaid.

    ``threshold`` draws the line that the page's slider moves, ``rule`` a fixed line.
    """
    top = max(int(counts.max(initial=0)) for counts in table.counts.values())
    chart = Chart(x=(table.edges[0], table.edges[-1]), y=(0, top * 1.05), x_label=x_label, y_label="examples")
    for kind, counts in table.counts.items():
        chart.bars(table.edges, counts, kind)
    if threshold:
        chart.rule(PAPER_THRESHOLD, "threshold")
    elif rule is not None and table.edges[0] < rule < table.edges[-1]:
        chart.rule(rule)
    peaks = [
        f"{NAMES[kind]} peak near {number(float(table.edges[int(counts.argmax())]))}"
        for kind, counts in table.counts.items()
    ]
    legend = tuple(("bar", kind, NAMES[kind]) for kind in table.counts) if len(table.counts) > 1 else ()
    return Figure(title, chart.svg(f"Histogram of {x_label}: {'; '.join(peaks)}."), caption, legend)


def curves(
    run: RunFiles,
    title: str,
    y_label: str,
    lines: Legend,
    *,
    caption: str = "",
    from_zero: bool = True,
    level: float | None = None,
) -> Figure | None:
    """Metrics per epoch as lines; ``lines`` is (key, kind, text). None where the run has none of them.

    ``level`` draws a dashed horizontal line.
    """
    series = {key: run.series(key) for key, _, _ in lines}
    shown = tuple(line for line in lines if np.isfinite(series[line[0]]).any())
    if not shown:
        return None
    epochs = run.series("epoch")
    values = np.concatenate([series[key] for key, _, _ in shown])
    chart = _over_epochs(epochs, _bounds(values, from_zero, level), y_label)
    if level is not None:
        chart.level(level)
    for key, kind, _ in shown:
        chart.line(epochs, series[key], kind)
    changes = [_from_to(text, series[key]) for key, _, text in shown]
    legend = tuple(("line", kind, text) for _, kind, text in shown) if len(shown) > 1 else ()
    return Figure(title, chart.svg(f"{title} over {len(epochs)} epochs: {'; '.join(changes)}."), caption, legend)


def _bounds(values: np.ndarray, from_zero: bool, level: float | None) -> tuple[float, float]:
    """Axis bounds with a margin, including 0 and the level where requested."""
    included = [float(np.nanmin(values)), float(np.nanmax(values))]
    included += [0.0] * from_zero + [level] * (level is not None)  # type: ignore[list-item]
    low, high = min(included), max(included)
    margin = 0.05 * (high - low)
    return low - margin * (low != 0), high + margin * (high != 0)


def groups(
    run: RunFiles,
    title: str = "Mean weight of correctly and incorrectly labelled examples",
    *,
    among: str = "groups",
    caption: str = "",
) -> Figure | None:
    """Mean weight of both groups per epoch with 95 % confidence intervals: Figure 1 (d).

    ``among`` is the metrics key: "groups" of all examples, or "probe_groups".
    """
    epochs = run.series("epoch")
    means = {kind: run.group(kind, "mean", among) for kind in ("right", "wrong")}
    if not any(np.isfinite(mean).any() for mean in means.values()):
        return None
    chart = _over_epochs(epochs, (0, 1), "mean weight")
    for kind, mean in means.items():
        chart.band(epochs, run.group(kind, "low", among), run.group(kind, "high", among), kind)
        chart.line(epochs, mean, kind)
    changes = [_from_to(NAMES[kind], mean) for kind, mean in means.items() if np.isfinite(mean).any()]
    return Figure(
        title,
        chart.svg(f"Mean weight over {len(epochs)} epochs: {'; '.join(changes)}."),
        f"{caption}Bands are 95 % confidence intervals of the means.",
        tuple(("line", kind, NAMES[kind]) for kind in means),
    )


def precision_and_recall(table: Kept, title: str = "Precision and recall of a weight threshold") -> Figure:
    """Of "weight below the threshold" as a detector of mislabelled examples: Figure 1 (e)."""
    precision, recall = precision_recall(table)
    chart = _precision_recall_chart((THRESHOLDS, precision, recall), "weight threshold")
    chart.rule(PAPER_THRESHOLD, "threshold")
    at = {threshold: round(threshold * 100) for threshold in (0.1, 0.5, 0.9)}
    points = [
        f"at {threshold} precision {number(precision[index])}, recall {number(recall[index])}"
        for threshold, index in at.items()
    ]
    caption = "Examples with a weight below the threshold are predicted to be mislabelled."
    return Figure(title, chart.svg(f"Precision and recall: {'; '.join(points)}."), caption, PRECISION_RECALL)


def _precision_recall_chart(curve: tuple[np.ndarray, np.ndarray, np.ndarray], x_label: str) -> Chart:
    """``curve`` is (threshold, precision, recall)."""
    threshold, precision, recall = curve
    chart = Chart(x=(0, 1), y=(0, 1), x_label=x_label, y_label="precision, recall")
    chart.line(threshold, precision, "first")
    chart.line(threshold, recall, "second")
    return chart


def noise(wrong: np.ndarray) -> Figure:
    """The noise rate among the top of the ranking, by the share that is kept."""
    part, left = noise_curve(wrong)
    overall = float(wrong.mean())
    chart = Chart(
        x=(0, 100),
        y=(0, max(float(left.max()), overall) * 105),
        x_label="top % of the ranking kept",
        y_label="% mislabelled",
    )
    chart.level(100 * overall)
    chart.line(100 * part, 100 * left, "wrong")
    points = [f"{share(left[np.searchsorted(part, at)])} of the top {at:.0%}" for at in (0.25, 0.5, 0.75)]
    caption = f"Dashed line: noise rate of the whole source, {share(overall)}."
    return Figure(
        "Noise rate among the top-ranked examples", chart.svg(f"Mislabelled: {', '.join(points)}. {caption}"), caption
    )


def estimated(suspects: Record) -> Figure | None:
    """Precision and recall of the suspects at every threshold, estimated from the probes."""
    curve = suspects.get("curve")
    if not curve:
        return None
    defined = np.array(curve.get("count", curve["threshold"])) > 0
    if not defined.any():
        return None
    threshold, precision, recall = (np.array([as_number(value) for value in curve[key]])[defined] for key in CURVE)
    chart = _precision_recall_chart((threshold, precision, recall), "threshold on the probability of being mislabelled")
    chart.rule(as_number(suspects.get("threshold")))
    ends = [f"precision {number(float(precision[i]))}, recall {number(float(recall[i]))}" for i in (0, -1)]
    return Figure(
        "Estimated precision and recall of the suspects",
        chart.svg(f"At the lowest threshold {ends[0]}; at the highest {ends[1]}."),
        f"Estimated from {count(suspects.get('n_probes', 0))} probes: target examples added to the source, some with a "
        f"{_wrong_label(suspects)} label. Dashed line: the chosen threshold.",
        PRECISION_RECALL,
    )


def _wrong_label(suspects: Record) -> str:
    """How probes got their wrong labels: the basis of the estimates."""
    basis = str(suspects.get("probability_basis"))
    kinds = {"from earlier labels": "wrong earlier", "assumes estimated mistakes": "probable wrong"}
    return kinds.get(basis, "randomly drawn wrong")


def weights_over_time(run: RunFiles, columns: int = 60) -> Figure | None:
    """Heat map of the weight histograms per epoch."""
    records = [(record["epoch"], record["histogram"]) for record in run.epochs if record.get("histogram")]
    if len(records) < 2:
        return None
    shown = [records[i] for i in np.linspace(0, len(records) - 1, min(columns, len(records))).round().astype(int)]
    edges = np.linspace(0, 1, len(shown[0][1]) + 1)
    chart = _over_epochs(np.array([epoch for epoch, _ in records]), (0, 1), "weight")
    places = np.linspace(*chart.x_range, len(shown) + 1)
    for left, right, (_, counts) in zip(places[:-1], places[1:], shown, strict=True):
        part = np.array(counts, dtype=float) / max(sum(counts), 1)
        for row in np.flatnonzero(part > 0):
            strength = max(0.04, float(part[row]) ** 0.5)
            chart.cell((left, right), (edges[row], edges[row + 1]), strength, "all")
    first, last = shown[0][1], shown[-1][1]
    alt = (
        f"Share of weights above {edges[-2]:.2f}: {share(first[-1] / max(sum(first), 1))} after the first "
        f"epoch, {share(last[-1] / max(sum(last), 1))} after the last; below {edges[1]:.2f}: "
        f"{share(last[0] / max(sum(last), 1))} after the last."
    )
    return Figure(
        "Distribution of the weights per epoch", chart.svg(alt), "Stronger colour: larger share of the source examples."
    )


def _over_epochs(epochs: np.ndarray, y: tuple[float, float], y_label: str) -> Chart:
    return Chart(x=(float(epochs.min()), float(epochs.max())), y=y, x_label="epoch", y_label=y_label, whole_x=True)


def _from_to(text: str, values: np.ndarray) -> str:
    known = values[np.isfinite(values)]
    if known.max() >= 1000:
        return f"{text} from {count(known[0])} to {count(known[-1])}"
    return f"{text} from {number(float(known[0]))} to {number(float(known[-1]))}"
