"""The report's charts: small inline SVG, each with its title, caption, legend and text alternative.

Colours are CSS classes, so that the page's light and dark themes apply. A chart is drawn at about the size at which it
is shown, so that its text stays readable on a phone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup, escape

from soseleto.report.sentences import RunFiles, count, number
from soseleto.run_folder.ranking import LOW_WEIGHT

WIDTH, HEIGHT = 420, 250
NAMES = {"right": "correctly labelled", "wrong": "mislabelled", "all": "source examples"}
Array = np.ndarray
Legend = tuple[tuple[str, str, str], ...]  # (mark, kind, text)


@dataclass(frozen=True)
class Figure:
    """One chart with its title, caption and legend."""

    title: str
    picture: Markup
    caption: str = ""
    legend: Legend = ()


# A chart


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers in [low, high], at most ``most`` of them."""
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A tick label as short as possible: ``0.25``, ``12,000``, ``−1``, ``2e-05``."""
    text = f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
    return text.replace("-", "−") if "e" not in text else text


class Chart:
    """A pair of axes to which marks are added; ``kind`` is the CSS class that colours a mark."""

    def __init__(self, x: tuple[float, float], y: tuple[float, float], x_label: str, y_label: str) -> None:
        self.x_range, self.y_range = ((low, high) if low < high else (low, low + 1.0) for low, high in (x, y))
        self.y_ticks = nice_ticks(*self.y_range, most=5)
        longest = max(len(tick_text(tick)) for tick in self.y_ticks)
        self.left, self.right = max(54.0, 24 + 7.5 * longest), WIDTH - 12.0
        self.top, self.bottom = 12.0, HEIGHT - 40.0
        self.labels = (x_label, y_label)
        self.marks: list[str] = []

    def x(self, values: float | Array) -> Array:
        low, high = self.x_range
        return self.left + (np.asarray(values, dtype=float) - low) / (high - low) * (self.right - self.left)

    def y(self, values: float | Array) -> Array:
        low, high = self.y_range
        return self.bottom - (np.asarray(values, dtype=float) - low) / (high - low) * (self.bottom - self.top)

    def bars(self, edges: Array, counts: Array, kind: str) -> None:
        """Bars over bins as one path; empty bins draw nothing."""
        left, right = self.x(edges[:-1]) + 0.5, self.x(edges[1:]) - 0.5
        low, high = _n(self.bottom), np.minimum(self.y(counts), self.bottom - 1)
        bars = (f"M{_n(left[i])} {low}V{_n(high[i])}H{_n(right[i])}V{low}z" for i in np.flatnonzero(counts > 0))
        self._path("bar", kind, "".join(bars))

    def line(self, x: Array, y: Array, kind: str) -> None:
        """A line through the values that are finite; a lone point is drawn as a dot."""
        known = np.isfinite(y)
        points = [f"{_n(a)} {_n(b)}" for a, b in zip(self.x(x[known]), self.y(y[known]), strict=True)]
        self._path("line", kind, "M" + "L".join(points) + ("h0" if len(points) == 1 else ""))

    def rule(self, x: float) -> None:
        at = _n(float(self.x(x)))
        self.marks.append(f'<line class="rule" x1="{at}" x2="{at}" y1="{_n(self.top)}" y2="{_n(self.bottom)}"/>')

    def level(self, y: float, kind: str) -> None:
        at = _n(float(self.y(y)))
        self.marks.append(f'<line class="{kind}" x1="{_n(self.left)}" x2="{_n(self.right)}" y1="{at}" y2="{at}"/>')

    def svg(self, alt: str) -> Markup:
        """The chart as SVG; ``alt`` is its text alternative for screen readers."""
        marks, self.marks = self.marks, []
        for value in self.y_ticks:
            self.level(value, "grid")
            self._text(self.left - 6, float(self.y(value)) + 3.5, tick_text(value), "tick end")
        for value in nice_ticks(*self.x_range):
            if self.labels[0] == "epoch" and not value.is_integer():
                continue
            self._text(float(self.x(value)), self.bottom + 15, tick_text(value), "tick middle")
        self.level(self.y_range[0], "axis")
        self.marks += marks
        self._text((self.left + self.right) / 2, HEIGHT - 7, self.labels[0], "label middle")
        self.marks.append(f'<g transform="translate(10 {_n((self.top + self.bottom) / 2)}) rotate(-90)">')
        self._text(0, 0, self.labels[1], "label middle")
        head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(alt)}">'
        return Markup(head + "".join(self.marks) + "</g></svg>")

    def _text(self, x: float, y: float, text: str, kind: str) -> None:
        self.marks.append(f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}">{escape(text)}</text>')

    def _path(self, mark: str, kind: str, path: str) -> None:
        if path:
            self.marks.append(f'<path class="{mark} {escape(kind)}" d="{path}"/>')


def _n(value: float) -> str:
    """A coordinate rounded to 0.1 pixels, without a trailing ``.0``."""
    return f"{value:.1f}".removesuffix(".0")


# The figures


def weights(weight: Array, wrong: Array | None) -> Figure:
    """A histogram of all examples, or of correctly labelled and mislabelled ones overlaid."""
    edges = np.linspace(0.0, 1.0, 41)
    parts = {"all": weight} if wrong is None else {"right": weight[~wrong], "wrong": weight[wrong]}
    bins = {kind: np.histogram(part, edges)[0] for kind, part in parts.items()}
    top = max(int(counts.max()) for counts in bins.values())
    chart = Chart((0, 1), (0, top * 1.05), "weight", "examples")
    for kind, counts in bins.items():
        chart.bars(edges, counts, kind)
    chart.rule(float(LOW_WEIGHT))
    peaks = (f"{NAMES[kind]} peak near {number(float(edges[int(bins[kind].argmax())]))}" for kind in bins)
    legend = tuple(("bar", kind, NAMES[kind]) for kind in bins) if len(bins) > 1 else ()
    caption = f"Dashed line: the threshold of {LOW_WEIGHT:g} below which a weight is low."
    return Figure("Weights", chart.svg(f"Histogram of weights: {'; '.join(peaks)}."), caption, legend)


@dataclass(frozen=True)
class Curve:
    """Metrics per epoch as lines; ``lines`` is (key, kind, text)."""

    title: str
    y_label: str
    lines: tuple[tuple[str, str, str], ...]
    caption: str = ""


def curves(run: RunFiles, curve: Curve) -> Figure | None:
    """None where the run has none of the metrics."""
    series = {key: run.series(key) for key, _, _ in curve.lines}
    lines = tuple(line for line in curve.lines if np.isfinite(series[line[0]]).any())
    if not lines:
        return None
    epochs = run.series("epoch")
    values = np.concatenate([[0.0], *(series[key] for key, _, _ in lines)])
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    margin = 0.05 * (high - low)
    span = (low - margin * (low != 0), high + margin * (high != 0))
    chart = Chart((float(epochs.min()), float(epochs.max())), span, "epoch", curve.y_label)
    for key, kind, _ in lines:
        chart.line(epochs, series[key], kind)
    changes = "; ".join(_from_to(text, series[key]) for key, _, text in lines)
    legend = tuple(("line", kind, text) for _, kind, text in lines) if len(lines) > 1 else ()
    alt = f"{curve.title} over {len(epochs)} epochs: {changes}."
    return Figure(curve.title, chart.svg(alt), curve.caption, legend)


def _from_to(text: str, values: Array) -> str:
    known = values[np.isfinite(values)]
    form = count if known.max() >= 1000 else number
    return f"{text} from {form(float(known[0]))} to {form(float(known[-1]))}"
