"""Small charts as inline SVG; colours are CSS classes, so that the page's light and dark themes apply.

A chart is drawn at about the size at which it is shown, so that its text stays readable on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from markupsafe import Markup, escape


def nice_ticks(low: float, high: float, most: int = 6, *, whole: bool = False) -> list[float]:
    """Round numbers in [low, high], at most ``most`` of them; ``whole`` allows integers only."""
    if not low < high:
        return [low]
    raw = (high - low) / max(most - 1, 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, math.ceil(step))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """A tick label as short as possible: ``0.25``, ``12,000``, ``−1``, ``2e-05``."""
    text = f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e6 else f"{value:.3g}"
    return text.replace("-", "−") if "e" not in text else text


class Chart:
    """A pair of axes to which marks are added; ``kind`` is the CSS class that colours a mark."""

    def __init__(
        self,
        *,
        x: tuple[float, float],
        y: tuple[float, float],
        x_label: str,
        y_label: str,
        width: float = 420,
        height: float = 250,
        whole_x: bool = False,
    ) -> None:
        self.width, self.height = width, height
        self.x_range, self.y_range = _wide(x), _wide(y)
        self.y_ticks = nice_ticks(*self.y_range, most=5)
        longest = max(len(tick_text(tick)) for tick in self.y_ticks)
        self.left, self.right, self.top, self.bottom = max(54.0, 24 + 7.5 * longest), width - 12.0, 12.0, height - 40.0
        self.labels = (x_label, y_label)
        self.whole_x = whole_x
        self.marks: list[str] = []

    def x(self, values: float | np.ndarray) -> np.ndarray:
        """x from data to SVG coordinates."""
        low, high = self.x_range
        return self.left + (np.asarray(values, dtype=float) - low) / (high - low) * (self.right - self.left)

    def y(self, values: float | np.ndarray) -> np.ndarray:
        """y from data to SVG coordinates."""
        low, high = self.y_range
        return self.bottom - (np.asarray(values, dtype=float) - low) / (high - low) * (self.bottom - self.top)

    def bars(self, edges: np.ndarray, counts: np.ndarray, kind: str) -> None:
        """Bars over bins as one path; empty bins draw nothing."""
        left, right, top = self.x(edges[:-1]) + 0.5, self.x(edges[1:]) - 0.5, self.y(counts)
        shown = np.flatnonzero(np.asarray(counts) > 0)
        low, high = _n(self.bottom), np.minimum(top, self.bottom - 1)
        path = (f"M{_n(left[i])} {low}V{_n(high[i])}H{_n(right[i])}V{low}z" for i in shown)
        self._path("bar", kind, "".join(path))

    def line(self, x: np.ndarray, y: np.ndarray, kind: str) -> None:
        """A line with a gap wherever ``y`` is not finite; a lone point is drawn as a dot."""
        for run in _finite_runs(x, y):
            points = [f"{_n(a)} {_n(b)}" for a, b in zip(self.x(x[run]), self.y(y[run]), strict=True)]
            self._path("line", kind, "M" + "L".join(points) + ("h0" if len(points) == 1 else ""))

    def band(self, x: np.ndarray, low: np.ndarray, high: np.ndarray, kind: str) -> None:
        """The area between two lines."""
        for run in _finite_runs(x, low + high):
            there = zip(self.x(x[run]), self.y(high[run]), strict=True)
            back = zip(self.x(x[run])[::-1], self.y(low[run])[::-1], strict=True)
            self._path("band", kind, "M" + "L".join(f"{_n(a)} {_n(b)}" for a, b in [*there, *back]) + "z")

    def dots(self, x: np.ndarray, y: np.ndarray, kind: str) -> None:
        """Points as one path with round caps: about a dozen bytes per point."""
        self._path("dots", kind, "".join(f"M{_n(a)} {_n(b)}h0" for a, b in self._points(x, y)))

    def crosses(self, x: np.ndarray, y: np.ndarray, kind: str, size: float = 2.6) -> None:
        """Points as crosses, distinguishable from dots without colour."""
        arms = f"l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}"
        points = self._points(x, y)
        self._path("crosses", kind, "".join(f"M{_n(a - size)} {_n(b - size)}{arms}" for a, b in points))

    def cell(self, x: tuple[float, float], y: tuple[float, float], strength: float, kind: str) -> None:
        """A filled cell of a heat map; ``strength`` in [0, 1] is its opacity."""
        (left, right), (bottom, top) = self.x(np.array(x)), self.y(np.array(y))
        size = f'width="{_n(right - left)}" height="{_n(bottom - top)}"'
        place = f'x="{_n(left)}" y="{_n(top)}"'
        self.marks.append(f'<rect class="cell {escape(kind)}" {place} {size} opacity="{strength:.2f}"/>')

    def rule(self, x: float, kind: str = "") -> None:
        """A vertical line at ``x``; the page's slider moves those of the kind "threshold"."""
        at, span = _n(float(self.x(x))), f'data-from="{_n(self.left)}" data-to="{_n(self.right)}"'
        self.marks.append(
            f'<line class="rule {escape(kind)}" {span} x1="{at}" x2="{at}" y1="{_n(self.top)}" y2="{_n(self.bottom)}"/>'
        )

    def level(self, y: float) -> None:
        """A horizontal line at ``y``."""
        at = _n(float(self.y(y)))
        self.marks.append(f'<line class="rule" x1="{_n(self.left)}" x2="{_n(self.right)}" y1="{at}" y2="{at}"/>')

    def svg(self, alt: str) -> Markup:
        """The chart as SVG; ``alt`` is its text alternative for screen readers."""
        head = f'<svg viewBox="0 0 {_n(self.width)} {_n(self.height)}" role="img" aria-label="{escape(alt)}">'
        return Markup(head + self._grid() + "".join(self.marks) + self._axis_labels() + "</svg>")

    def _grid(self) -> str:
        parts = []
        for value in self.y_ticks:
            at = _n(float(self.y(value)))
            parts.append(f'<line class="grid" x1="{_n(self.left)}" x2="{_n(self.right)}" y1="{at}" y2="{at}"/>')
            parts.append(_text(self.left - 6, float(self.y(value)) + 3.5, tick_text(value), "tick end"))
        for value in nice_ticks(*self.x_range, whole=self.whole_x):
            parts.append(_text(float(self.x(value)), self.bottom + 15, tick_text(value), "tick middle"))
        base = _n(self.bottom)
        axis = f'<line class="axis" x1="{_n(self.left)}" x2="{_n(self.right)}" y1="{base}" y2="{base}"/>'
        return "".join(parts) + axis

    def _axis_labels(self) -> str:
        x_label, y_label = self.labels
        middle = (self.top + self.bottom) / 2
        below = _text((self.left + self.right) / 2, self.height - 7, x_label, "label middle")
        beside = _text(0, 0, y_label, "label middle")
        return f'{below}<g transform="translate(10 {_n(middle)}) rotate(-90)">{beside}</g>'

    def _points(self, x: np.ndarray, y: np.ndarray) -> Sequence[tuple[float, float]]:
        return list(zip(self.x(x).tolist(), self.y(y).tolist(), strict=True))

    def _path(self, mark: str, kind: str, path: str) -> None:
        if path:
            self.marks.append(f'<path class="{mark} {escape(kind)}" d="{path}"/>')


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{_n(x)}" y="{_n(y)}">{escape(text)}</text>'


def _n(value: float) -> str:
    """A coordinate rounded to 0.1 pixels, without a trailing ``.0``."""
    return f"{value:.1f}".removesuffix(".0")


def _wide(bounds: tuple[float, float]) -> tuple[float, float]:
    """Bounds of non-zero width, to avoid a division by zero."""
    low, high = bounds
    return (low, high) if low < high else (low, low + 1.0)


def _finite_runs(x: np.ndarray, y: np.ndarray) -> list[slice]:
    """The contiguous ranges in which both are finite."""
    good = np.concatenate([[False], np.isfinite(x) & np.isfinite(y), [False]]).astype(int)
    starts, ends = np.flatnonzero(np.diff(good) == 1), np.flatnonzero(np.diff(good) == -1)
    return [slice(int(start), int(end)) for start, end in zip(starts, ends, strict=True)]
