"""The paper's Figure 1, panels (a) to (e), for a source with two features and known true labels."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from soseleto.report.charts import Figure, groups, precision_and_recall
from soseleto.report.files import RunFiles
from soseleto.report.sentences import count
from soseleto.report.svg import Chart
from soseleto.report.tables import PAPER_THRESHOLD, kept

MOST_POINTS = 3000
Mark = Callable[[np.ndarray, np.ndarray, str], None]


def panels(run: RunFiles) -> list[Figure]:
    """The five panels; empty where the run has no such source."""
    weight, wrong, label = run.column("weight"), run.wrong, run.column("label")
    if list(run.features) != ["x0", "x1"] or weight is None or wrong is None or label is None:
        return []
    over_time = groups(run, "(d) Mean weight, correctly and incorrectly labelled")
    low = weight < np.float32(PAPER_THRESHOLD)
    scatters = [_source(run, label, wrong), _clean(run, low, wrong), _flipped(run, low, wrong)]
    return [
        *scatters,
        *([over_time] if over_time else []),
        precision_and_recall(kept(weight, wrong), "(e) Precision and recall by weight threshold"),
    ]


def _source(run: RunFiles, label: np.ndarray, wrong: np.ndarray) -> Figure:
    chart = _plane(run)
    names = sorted(set(label.tolist()), key=str)
    kinds = ("first", "second", "third", "fourth")
    for position, name in enumerate(names):
        kind = kinds[position % len(kinds)]
        _draw(chart, run, (label == name) & ~wrong, kind, chart.dots)
        _draw(chart, run, (label == name) & wrong, kind, chart.crosses)
    legend = [("dots", kinds[i % len(kinds)], f"label {name}") for i, name in enumerate(names)]
    alt = f"{count(len(wrong))} source points in the plane, {count(wrong.sum())} of them with a flipped label."
    return Figure(
        "(a) Source points",
        chart.svg(alt),
        "Colour: given label. Crosses: flipped labels." + _sampled(len(label)),
        (*legend, ("crosses", "plain", "flipped")),
    )


def _clean(run: RunFiles, low: np.ndarray, wrong: np.ndarray) -> Figure:
    above, below = ~low & ~wrong, low & ~wrong
    return _classified(run, "(b) Clean points", above, below, ("at or above", "below"), "clean")


def _flipped(run: RunFiles, low: np.ndarray, wrong: np.ndarray) -> Figure:
    below, above = low & wrong, ~low & wrong
    return _classified(run, "(c) Flipped points", below, above, ("below", "at or above"), "flipped")


def _classified(
    run: RunFiles, title: str, good: np.ndarray, bad: np.ndarray, sides: tuple[str, str], group: str
) -> Figure:
    chart = _plane(run)
    _draw(chart, run, good, "right", chart.dots)
    _draw(chart, run, bad, "wrong", chart.crosses)
    correct, wrong = count(good.sum()), count(bad.sum())
    legend = (
        ("dots", "right", f"{sides[0]} {PAPER_THRESHOLD}: {correct}"),
        ("crosses", "wrong", f"{sides[1]} {PAPER_THRESHOLD}: {wrong}"),
    )
    alt = f"{correct} {group} points have a weight {sides[0]} {PAPER_THRESHOLD}, {wrong} {sides[1]} it."
    return Figure(title, chart.svg(alt), f"{correct} classified correctly, {wrong} incorrectly.", legend)


def _plane(run: RunFiles) -> Chart:
    (left, right), (low, high) = (_bounds(run, name) for name in ("x0", "x1"))
    return Chart(x=(left, right), y=(low, high), x_label="x0", y_label="x1", width=320, height=320)


def _bounds(run: RunFiles, name: str) -> tuple[float, float]:
    values = run.column(name)
    assert values is not None  # checked in panels()
    low, high = float(values.min()), float(values.max())
    margin = 0.03 * (high - low)
    return low - margin, high + margin


def _draw(chart: Chart, run: RunFiles, mask: np.ndarray, kind: str, mark: Mark) -> None:
    x, y = run.column("x0"), run.column("x1")
    assert x is not None
    assert y is not None
    every = -(-len(mask) // MOST_POINTS)
    index = np.flatnonzero(mask)[::every]
    mark(x[index], y[index], kind)


def _sampled(total: int) -> str:
    return "" if total <= MOST_POINTS else f" 1 in {-(-total // MOST_POINTS)} points is drawn."
