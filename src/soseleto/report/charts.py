"""The report's charts: scales and marks as paths, which the template draws as small inline SVG.

Colours are CSS classes, so that the page's light and dark themes apply. A chart is drawn at about the size at which it
is shown, so that its text stays readable on a phone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from soseleto.report.sentences import RunFiles, count, number
from soseleto.run_folder.ranking import LOW_WEIGHT

LEFT, RIGHT, TOP, BOTTOM = 76, 408, 12, 210  # of the axes, in a picture of 420 × 250
NAMES = {"right": "correctly labelled", "wrong": "mislabelled", "all": "source examples"}
Array = np.ndarray


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` on the pixels from ``start`` to ``end``."""

    label: str
    low: float
    high: float
    start: float
    end: float

    def __call__(self, values: float | Array) -> Array:
        share = (np.asarray(values, dtype=float) - self.low) / (self.high - self.low or 1.0)
        return self.start + share * (self.end - self.start)

    @property
    def ticks(self) -> list[tuple[str, str]]:
        """Positions and texts of at most five numbers; epochs and counts are whole."""
        whole = self.label in ("epoch", "examples")
        values = np.unique(np.linspace(self.low, self.high, 5).round(0 if whole else 12))
        return [(_n(float(self(value))), number(float(value))) for value in values]


@dataclass(frozen=True)
class Figure:
    """One chart with its title, text alternative, legend and caption.

    marks: (mark, kind, path), both CSS classes; legend: (mark, kind, text); rule: x of a dashed line
    """

    title: str
    x: Scale
    y: Scale
    marks: tuple[tuple[str, str, str], ...]
    alt: str
    legend: tuple[tuple[str, str, str], ...] = ()
    caption: str = ""
    rule: str = ""


def _bars(x: Scale, y: Scale, edges: Array, counts: Array) -> str:
    """Bars over bins as one path; empty bins draw nothing."""
    left, right = x(edges[:-1]) + 0.5, x(edges[1:]) - 0.5
    high = np.minimum(y(counts), BOTTOM - 1)
    bars = (f"M{_n(left[i])} {BOTTOM}V{_n(high[i])}H{_n(right[i])}V{BOTTOM}z" for i in np.flatnonzero(counts > 0))
    return "".join(bars)


def _line(x: Array, y: Array) -> str:
    """A line through the values that are finite; a lone point is drawn as a dot."""
    known = np.isfinite(y)
    points = [f"{_n(a)} {_n(b)}" for a, b in zip(x[known], y[known], strict=True)]
    return "M" + "L".join(points) + ("h0" if len(points) == 1 else "")


def _n(value: float) -> str:
    """A coordinate rounded to 0.1 pixels, without a trailing ``.0``."""
    return f"{value:.1f}".removesuffix(".0")


def _legend(mark: str, texts: Iterable[tuple[str, str]]) -> tuple[tuple[str, str, str], ...]:
    """None for a single mark."""
    named = tuple((mark, kind, text) for kind, text in texts)
    return named if len(named) > 1 else ()


def weights(weight: Array, wrong: Array | None) -> Figure:
    """A histogram of all examples, or of correctly labelled and mislabelled ones overlaid."""
    edges = np.linspace(0.0, 1.0, 41)
    parts = {"all": weight} if wrong is None else {"right": weight[~wrong], "wrong": weight[wrong]}
    bins = {kind: np.histogram(part, edges)[0] for kind, part in parts.items()}
    top = 1.05 * max(int(counts.max()) for counts in bins.values())
    x, y = Scale("weight", 0.0, 1.0, LEFT, RIGHT), Scale("examples", 0.0, top, BOTTOM, TOP)
    peaks = (f"{NAMES[kind]} peak near {number(float(edges[int(bins[kind].argmax())]))}" for kind in bins)
    return Figure(
        "Weights",
        x,
        y,
        tuple(("bar", kind, _bars(x, y, edges, counts)) for kind, counts in bins.items()),
        f"Histogram of weights: {'; '.join(peaks)}.",
        _legend("bar", ((kind, NAMES[kind]) for kind in bins)),
        f"Dashed line: the threshold of {LOW_WEIGHT:g} below which a weight is low.",
        rule=_n(float(x(float(LOW_WEIGHT)))),
    )


def curves(
    run: RunFiles, title: str, lines: Iterable[tuple[str, str, str]], y_label: str = "", caption: str = ""
) -> Figure | None:
    """Metrics per epoch as lines, each (key, kind, text); None where the run has none of the metrics."""
    series = {key: run.series(key) for key, _, _ in lines}
    lines = [line for line in lines if np.isfinite(series[line[0]]).any()]
    if not lines:
        return None
    epochs = run.series("epoch")
    values = np.concatenate([[0.0], *(series[key] for key, _, _ in lines)])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = 0.05 * (high - low)
    x = Scale("epoch", float(epochs.min()), float(epochs.max()), LEFT, RIGHT)
    y = Scale(y_label or title.lower(), low - margin * (low != 0), high + margin * (high != 0), BOTTOM, TOP)
    changes = "; ".join(_from_to(text, series[key]) for key, _, text in lines)
    return Figure(
        title,
        x,
        y,
        tuple(("line", kind, _line(x(epochs), y(series[key]))) for key, kind, _ in lines),
        f"{title} over {epochs.max():g} epochs: {changes}.",
        _legend("line", ((kind, text) for _, kind, text in lines)),
        caption,
    )


def _from_to(text: str, values: Array) -> str:
    known = values[np.isfinite(values)]
    form = count if known.max() >= 1000 else number
    return f"{text} from {form(float(known[0]))} to {form(float(known[-1]))}"
