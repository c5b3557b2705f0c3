"""What the report says: the files of a run as plain values, number formats and summary sentences."""

from __future__ import annotations

import math
import os
import shlex
from collections.abc import Mapping
from datetime import timedelta
from typing import Any, TypeGuard

import numpy as np

from soseleto.errors import counted
from soseleto.run_folder.folder import RANKING, RunFolder, measure_of
from soseleto.run_folder.ranking import (
    LOW_WEIGHT,
    about_suspects,
    about_unknown,
    feature_columns,
    in_words,
    is_known,
    is_suspect,
    suggested_labels,
)
from soseleto.run_folder.source import load_thumbnails

Record = dict[str, Any]
_EVENTS = ("start", "epoch", "message", "end")
CHOSEN_ON = "on held-out target examples"


class RunFiles:
    """The contents of one run folder; an unfinished run is read as far as it got, and ``ranking`` is then None."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        folder = RunFolder.open(path)
        self.name, self.place = folder.path.resolve().name, shlex.quote(str(folder.path))  # as typed in commands
        self.config, records = folder.config(), folder.metrics()
        self.ranking = folder.ranking() if folder.has(RANKING) else None
        self.pictures, self.source = load_thumbnails(folder), folder.source()
        self.comparison, self.suspects = folder.comparison() or {}, folder.suspects() or {}
        by_event = {event: [r for r in records if r.get("event") == event] for event in _EVENTS}
        self.start, self.end = (next(iter(by_event[event]), Record()) for event in ("start", "end"))
        self.epochs, texts = by_event["epoch"], [str(record.get("text", "")) for record in by_event["message"]]
        self.messages = list(dict.fromkeys([*folder.problems(), *texts]))
        self.suggested = None if self.ranking is None else suggested_labels(self.ranking)
        self.features = feature_columns(self.ranking or {}, self.source)  # x0, x1, ... -> names in the source
        # A teacher judged the labels: weights are probabilities, and there are no alignments.
        self.is_transfer = self.config.get("mode") == "transfer"  # weights are not about wrong labels

    def series(self, key: str) -> np.ndarray:
        """One metric of every epoch, NaN where it is missing; (E,)."""
        values = (record.get(key) for record in self.epochs)
        return np.array([value if isinstance(value, int | float) else math.nan for value in values], dtype=float)

    @property
    def wrong(self) -> np.ndarray | None:
        """Which labels are wrong, where every true label is known."""
        if self.ranking is None or "true_label" not in self.ranking:
            return None
        truth = self.ranking["true_label"]
        unknown = np.isnan(truth) if truth.dtype.kind == "f" else truth < 0 if truth.dtype.kind == "i" else truth == ""
        return None if unknown.any() else self.ranking["wrong"]


# Number formats


def count(value: float) -> str:
    """``12,345``."""
    return f"{round(value):,}"


def share(value: float) -> str:
    """A fraction in percent, or a dash for NaN; 0 % and 100 % only where exact."""
    if math.isnan(value):
        return "–"
    percent = 100 * value
    if percent <= 0 or percent >= 100:  # an explained variance can be below 0
        return f"{percent:.0f} %"
    return f"{min(max(percent, 0.1), 99.9):.1f} %"


def percent(value: float) -> str:
    """A number that is already in percent, as accuracies in a run's records are."""
    return share(value / 100)


def number(value: object) -> str:
    """Three significant digits, or a dash for anything that is not a finite number."""
    if not _is_number(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:.2e}"


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)


# Sentences


def sentences(run: RunFiles) -> list[str]:
    """What was asked, in full sentences: the accuracy beside other methods, and how many labels are wrong."""
    answers = [sentence for sentence in (verdict(run.comparison), *about_labels(run)) if sentence]
    return [*answers, training(run)] if run.end else [training(run), *answers]


def training(run: RunFiles) -> str:
    """On how many examples the run was trained, and for how long."""
    source, target = run.start.get("n_source"), run.start.get("n_target")
    data = f" on {count(source)} source and {count(target)} target examples" if source and target else ""
    if not run.epochs:
        return f"Training{data} has not finished its first epoch."
    epochs = counted(max(1, round(float(run.series("epoch").max()))), "epoch")
    if not run.end:
        return f"Training{data} has not finished: this report covers the first {epochs}."
    took = run.end.get("seconds")
    return f"Trained{data} for {epochs}{f' in {timedelta(seconds=round(took))}' if _is_number(took) else ''}."


def next_steps(run: RunFiles) -> list[tuple[str, str]]:
    """(command, what it does); none while the run has no ranking."""
    if run.ranking is None:
        return []
    rank = [(f"soseleto rank {run.place}", "lists all source examples, best first, as CSV, JSON or Parquet.")]
    if run.is_transfer:
        return rank
    review = f"soseleto review {run.place}"
    steps = []
    if is_suspect(run.ranking).any():
        steps.append((review, "shows the suspects in the browser, to keep, drop or relabel them."))
    if "audited" not in [run.suspects.get(name, {}).get("basis") for name in ("precision", "wrong_share")]:
        audit = "measures on a random sample how many labels are wrong, and precision and recall of the suspects."
        steps.append((f"soseleto audit {run.place}", audit))
    exported = (f"{review} --export clean.csv", "writes the source with your decisions.")
    return [*steps, *([exported] if run.source else []), *rank]


def compared_how(run: RunFiles) -> str:
    """The caption of the comparison."""
    on = f"target examples ({run.comparison.get('folds')}-fold cross-validation)"
    if run.comparison.get("judged_on") == "test":
        on = "test examples"
    measure = measure_of(run.comparison).replace("_", " ")
    return f"Held-out {measure} on {count(run.comparison['rows'][0]['examples'])} {on}"


def verdict(comparison: Mapping[str, Any]) -> str:
    """Which model is kept and how the best rival compares with SOSELETO; empty without rivals.

    Other training on the features of a first answer is never kept, see ``winner`` in ``comparison/accuracy.py``.
    """
    rows = comparison.get("held_out", comparison.get("rows")) or []  # held_out beside a test set, which chooses nothing
    rivals = [row for row in rows if "minus_soseleto" in row and "scan_" not in row["method"]]
    if not rivals:
        chosen = rows or not comparison.get("rows")
        return "" if chosen else "SOSELETO's model is kept: without folds there is no choice."
    kept = comparison.get("kept", "soseleto")
    best = next(
        (row for row in rivals if row["method"] == kept), max(rivals, key=lambda row: row[measure_of(comparison)])
    )
    method, difference = best["title"], best["minus_soseleto"]
    value, low, high = (difference[name] for name in ("value", "low", "high"))
    if kept == "scan":
        change = f"{-value:+.1f} points, {_interval(-high, -low)}"
        return f"The first answer is kept: training the network did not clearly add to it ({change}, {CHOSEN_ON})."
    against = f"{value:+.1f} points against SOSELETO's, {_interval(low, high)}, {CHOSEN_ON}"
    if kept == "soseleto":
        return f"SOSELETO's model is kept; the best of the others is that of {method} ({against})."
    return f"Selection did not pay here: the model of {method} is kept ({against})."


def _interval(low: float, high: float) -> str:
    return f"95 % interval {low:+.1f} to {high:+.1f}"


def about_wrong(suspects: Mapping[str, Any], n_source: int) -> str:
    """How many labels are wrong; empty where nothing has estimated it."""
    share = suspects.get("wrong_share")
    return f"{in_words(share)} of the {n_source:,} labels are wrong." if is_known(share) else ""


def about_labels(run: RunFiles) -> tuple[str, ...]:
    """How many labels are wrong, how many are suspected, and of how many nothing is known."""
    if run.ranking is None:
        return ()
    unknown = about_unknown(run.ranking)
    if "is_label_issue" not in run.ranking:
        low = counted(int((run.ranking["weight"] < LOW_WEIGHT).sum()), "source example has", "source examples have")
        return f"{low} a weight below {LOW_WEIGHT:g}.", unknown
    about = about_suspects(run.ranking, run.suspects)
    return about_wrong(run.suspects, len(run.ranking["weight"])), f"{about[0].upper()}{about[1:]}.", unknown
