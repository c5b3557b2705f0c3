"""The report page: the sections that the run's files allow, rendered through one autoescaped template."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from soseleto.report import sentences
from soseleto.report.sentences import RunFiles, count, number
from soseleto.run_folder.files import aside, readable, replacing
from soseleto.run_folder.folder import REPORT, measure_of
from soseleto.run_folder.ranking import LOW_WEIGHT, SHOWN, Ranking, most_suspicious_first, suspect_rows

PAGE = Path(__file__).parent / "page"
GROUPS = 50  # the largest, of a table of weights by label
LEFT, RIGHT, TOP, BOTTOM = 76, 408, 12, 210  # of a chart's axes, in a picture of 420 × 250
NAMES = {"right": "correctly labelled", "wrong": "mislabelled", "all": "source examples"}
Array = np.ndarray
FILTERS = (sentences.count, sentences.share, sentences.percent, sentences.number)


def write_report(run_path: str | os.PathLike[str], out: str | os.PathLike[str] | None = None) -> Path:
    """Write the report of a run to ``out`` (default: into the run folder) and return its path."""
    own = Path(run_path) / REPORT
    path = own if out is None else Path(out)
    page = render(run_path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with (replacing if os.path.realpath(path) == os.path.realpath(own) else aside)(path) as part:
        part.write_text(page, "utf-8")
    return path


def render(run_path: str | os.PathLike[str]) -> str:
    """The report of a run as one self-contained HTML page."""
    with readable(Path(run_path)):
        run, style = RunFiles(run_path), asset("style.css")
        policy = f"default-src 'none'; style-src '{digest(style)}'; img-src data:; base-uri 'none'; form-action 'none'"
        return template("report.html.j2", filters=FILTERS).render(
            run=run,
            style=Markup(style),  # a file of this package: the only text that is not escaped
            policy=policy,
            sentences=sentences.sentences(run),
            next_steps=sentences.next_steps(run),
            training=sentences.training(run),
            measure=measure_of(run.comparison) if run.comparison.get("rows") else "",
            compared_how=sentences.compared_how(run) if run.comparison.get("rows") else "",
            curves=[*filter(None, _curves(run))],
            settings=json.dumps(run.config, indent=2, ensure_ascii=False),
            low_weight=LOW_WEIGHT,
            **(_ranking_sections(run) if run.ranking and len(run.ranking["weight"]) else {}),
        )


# Templates and styles, which the review page uses too


def asset(name: str, folder: Path = PAGE) -> str:
    return (folder / name).read_text("utf-8")


def digest(text: str) -> str:
    """The source expression of an inline style or script in a content security policy."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@functools.cache
def template(name: str, folder: Path = PAGE, filters: tuple[Callable[..., str], ...] = ()) -> jinja2.Template:
    """An autoescaped template with ``filters`` under their function names; undefined names raise."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update({function.__name__: function for function in filters})
    return environment.get_template(name)


# The sections


def _curves(run: RunFiles) -> list[Figure | None]:
    about = (
        "The source loss is the unweighted mean, mislabelled examples included: it may rise while the model improves."
    )
    losses = (("source_loss", "first", "source"), ("target_loss", "second", "target"))
    return [
        metric_curves(run, "Losses", losses, "loss", about),
        metric_curves(run, "Mean weight", [("mean_weight", "all", "mean weight")]),
        metric_curves(run, "Effective sample size", [("effective_source", "all", "effective sample size")]),
    ]


def _ranking_sections(run: RunFiles) -> dict[str, Any]:
    assert run.ranking is not None
    suspects, by_suspicion = suspect_rows(run.ranking), most_suspicious_first(run.ranking)
    half = min(SHOWN, -(-len(by_suspicion) // 2))
    return {
        "weights": weight_histogram(run.ranking["weight"], run.wrong),
        "shown": SHOWN,
        "suspects_count": len(suspects),
        "best": _examples(run, np.arange(half)),
        "worst": _examples(run, suspects[:SHOWN] if len(suspects) else by_suspicion[:half]),
        "features": run.features,
        "groups": [*_groups(run.ranking)] if run.is_transfer else [],
    }


def _groups(ranking: Ranking) -> Iterator[dict[str, Any]]:
    """Weights summed up by label, or by the file that a text came from, and by quarters of length."""
    names, places, counts = np.unique(ranking["label"], return_inverse=True, return_counts=True)
    parts = [(str(names[at]), places == at) for at in np.argsort(-counts, kind="stable")[:GROUPS]]
    if len(parts) == 1:
        parts = []
    if "tokens" in ranking:
        tokens = ranking["tokens"]
        of_quarter = np.searchsorted(np.quantile(tokens, (0.25, 0.5, 0.75)), tokens)
        quarters = [mine for at in range(4) if (mine := of_quarter == at).any()]
        ends = [dict.fromkeys(f"{end:,}" for end in (tokens[mine].min(), tokens[mine].max())) for mine in quarters]
        parts += [(f"{' to '.join(both)} tokens", mine) for both, mine in zip(ends, quarters, strict=True)]
    for name, mine in parts:
        weight, score = (float(np.nanmean(ranking[column][mine])) for column in ("weight", "score"))
        yield {"name": name, "examples": int(mine.sum()), "weight": weight, "score": score}


def _examples(run: RunFiles, rows: np.ndarray) -> list[dict[str, Any]]:
    assert run.ranking is not None
    columns = {name: values[rows].tolist() for name, values in run.ranking.items()}
    columns["suggested"] = [None] * len(rows) if run.suggested is None else run.suggested[rows].tolist()
    columns["rank"] = (rows + 1).tolist()
    pictures = [base64.b64encode(run.pictures.get(name, b"")).decode() for name in columns["id"]]
    columns["picture"] = [f"data:image/jpeg;base64,{picture}" if picture else "" for picture in pictures]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


# Charts: scales and marks as paths, which the template draws as small inline SVG. Colours are CSS classes, so that the
# page's light and dark themes apply. A chart is drawn at about the size at which it is shown, so that its text stays
# readable on a phone.


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


def weight_histogram(weight: Array, wrong: Array | None) -> Figure:
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


def metric_curves(
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
