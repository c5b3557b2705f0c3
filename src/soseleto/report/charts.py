"""The report's charts: scales and marks as paths, which the template draws as small inline SVG.

Colours are CSS classes, so that the page's light and dark themes apply. A chart is drawn at about the size at which it
is shown, so that its text stays readable on a phone.
"""

from __future__ import annotations

import math
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
        """Positions and texts of five or six round numbers."""
        values = nice_ticks(self.low, self.high if self.high > self.low else self.low + 1)
        return [(_n(float(self(value))), tick_text(value)) for value in values if self._has(value)]

    def _has(self, value: float) -> bool:
        return self.label != "epoch" or float(value).is_integer()


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


def nice_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Round numbers in [low, high], at most ``most`` of them."""
    raw = (high - low) / (most - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A tick label as short as possible: ``0.25``, ``12,000``, ``−1``, ``2e-05``."""
    text = f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
    return text.replace("-", "−") if "e" not in text else text


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
    x = Scale("epoch", float(epochs.min()), float(epochs.max()), LEFT, RIGHT)
    y = Scale(curve.y_label, low - margin * (low != 0), high + margin * (high != 0), BOTTOM, TOP)
    changes = "; ".join(_from_to(text, series[key]) for key, _, text in lines)
    return Figure(
        curve.title,
        x,
        y,
        tuple(("line", kind, _line(x(epochs), y(series[key]))) for key, kind, _ in lines),
        f"{curve.title} over {len(epochs)} epochs: {changes}.",
        _legend("line", ((kind, text) for _, kind, text in lines)),
        curve.caption,
    )


def _from_to(text: str, values: Array) -> str:
    known = values[np.isfinite(values)]
    form = count if known.max() >= 1000 else number
    return f"{text} from {form(float(known[0]))} to {form(float(known[-1]))}"
