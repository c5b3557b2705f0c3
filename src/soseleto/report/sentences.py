"""Numbers and findings in plain words."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np

from soseleto.report.files import RunFiles
from soseleto.report.tables import PAPER_THRESHOLD
from soseleto.run_folder.ranking import suspect_rows


def count(value: float) -> str:
    """``12,345``."""
    return f"{round(value):,}"


def share(value: float) -> str:
    """A fraction as a percentage; it never rounds to 0 or 100 that it has not reached."""
    percent = 100 * value
    if percent in (0, 100):
        return f"{percent:.0f} %"
    return f"{min(max(percent, 0.1), 99.9):.1f} %"


def percent(value: float) -> str:
    """What is a percentage already, as accuracies in a run's records are."""
    return share(value / 100)


def number(value: object) -> str:
    """Three significant digits, or a dash where there is no number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:.2e}"


def decimals(values: np.ndarray) -> str:
    """A format under which a column of numbers lines up, the largest with three significant digits."""
    known = np.abs(values[np.isfinite(values)])
    largest = float(known.max(initial=0))
    if not 1e-6 <= largest < 1e6:
        return "%.2e" if largest else "%.0f"
    return f"%.{max(0, 2 - math.floor(math.log10(largest)))}f"


def duration(seconds: float) -> str:
    """``8 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def key_figures(run: RunFiles) -> list[tuple[str, str, str]]:
    """(name, figure, remark) of what a reader asks first; a figure the run does not have is left out."""
    last, total = run.last, run.start.get("n_source")
    rows = [
        ("Source examples", total, count, f"{count(run.start.get('n_target', 0))} trusted target examples"),
        (
            "Effective number",
            last.get("effective_source"),
            count,
            _of_total(last.get("effective_source"), total),
        ),
        ("Mean weight", last.get("mean_weight"), number, "0 is ignored, 1 counts in full"),
        ("Weights at 0", last.get("share_at_zero"), share, "examples left out"),
        ("Weights at 1", last.get("share_at_one"), share, "examples that count in full"),
        ("Test accuracy", last.get("test_accuracy"), percent, "after the last epoch"),
    ]
    return [(name, form(value), remark) for name, value, form, remark in rows if _is_number(value)]


def suspect_figures(run: RunFiles) -> list[tuple[str, str, str]]:
    """(name, figure, remark) of the suspects."""
    assert run.ranking is not None
    found, total = len(suspect_rows(run.ranking)), len(run.ranking["weight"])
    by = "wrong with a probability of at least" if "is_label_issue" in run.ranking else "of weight below"
    threshold = run.suspects.get("threshold") if "is_label_issue" in run.ranking else PAPER_THRESHOLD
    rule = f", {by} {number(threshold)}" if _is_number(threshold) else ""
    estimates = [
        ("Estimated precision", "precision", "of the suspects are really wrong"),
        ("Estimated recall", "recall", "of all wrong labels are among them"),
        ("Estimated noise", "wrong_share", "of all source labels are wrong"),
    ]
    if not found:
        rule = _highest(run)
        estimates = estimates[-1:]  # of none there is nothing to estimate
    rows = [("Suspects", count(found), f"{share(found / total)} of the source{rule}")]
    for name, key, remark in estimates:
        if estimate := run.suspects.get(key):
            reach = f"{share(estimate['low'])} to {share(estimate['high'])}"
            rows.append((name, share(estimate["value"]), f"{remark} ({reach})"))
    return rows


def sentences(run: RunFiles) -> list[str]:
    """The summary a reader can stop at."""
    tell = (_what_happened, _comparison, _weights, _suspects, _truth, _losses, _engine)
    return [sentence for sentence in (part(run) for part in tell) if sentence]


def _what_happened(run: RunFiles) -> str:
    source, target = run.start.get("n_source"), run.start.get("n_target")
    data = f" with {count(source)} source and {count(target)} target examples" if source and target else ""
    if not run.epochs:
        return f"This run{data} has not finished its first epoch."
    took = run.end.get("seconds")
    time = f" in {duration(took)}" if _is_number(took) else ""
    epochs = f"{len(run.epochs)} epoch{'s' * (len(run.epochs) > 1)}"
    if not run.end:
        return f"This run{data} has not ended: what follows is how it stood after {epochs}."
    return f"This run{data} took {epochs}{time}."


def compared(run: RunFiles) -> list[tuple[str, float, float, float]]:
    """(method, accuracy, low, high) in percent of this run and its rivals; none where nothing was compared."""
    rows = run.comparison.get("rows") or []
    return [(_method(row["method"]), row["accuracy"], row["low"], row["high"]) for row in rows]


def judged_on(run: RunFiles) -> str:
    """``100 target examples, each held out of its own training``."""
    examples = count(run.comparison["rows"][0]["examples"])
    if run.comparison.get("judged_on") == "test":
        return f"{examples} test examples"
    return f"{examples} target examples, each held out of its own training"


def _method(name: str) -> str:
    return {"soseleto": "SOSELETO", "ordinary": "ordinary training"}.get(name, name.replace("_", " "))


def _comparison(run: RunFiles) -> str:
    rows = compared(run)
    if not rows:
        return ""
    others = [f"{method} {percent(accuracy)}" for method, accuracy, _, _ in rows[1:]]
    beside = f"; {' and '.join(others)}" if others else ""
    method, accuracy, _, _ = rows[0]
    return f"Of {judged_on(run)}, {method} gets {percent(accuracy)} right{beside}."


def _weights(run: RunFiles) -> str:
    last = run.last
    effective, total = last.get("effective_source"), run.start.get("n_source")
    if not _is_number(effective) or not total:
        return ""
    text = f"The learned weights make the source count as {count(effective)} of its {count(total)} examples"
    if _is_number(last.get("share_at_zero")) and _is_number(last.get("share_at_one")):
        text += f": {share(last['share_at_zero'])} are left out, {share(last['share_at_one'])} count in full"
    return text + "."


def _suspects(run: RunFiles) -> str:
    if run.ranking is None or "is_label_issue" not in run.ranking:
        return ""
    found = len(suspect_rows(run.ranking))
    precision = run.suspects.get("precision")
    if not found:
        return f"No label is doubted{_highest(run)}."
    sure = f", of which about {share(precision['value'])} are really wrong" if precision else ""
    return f"{count(found)} labels are doubted{sure}."


def _highest(run: RunFiles) -> str:
    """Why nothing is suspect where probabilities were learned."""
    probability = run.column("mislabelled_probability")
    return "" if probability is None else f": the highest probability of being wrong is {number(probability.max())}"


def _truth(run: RunFiles) -> str:
    wrong, weight = run.column("wrong"), run.column("weight")
    if wrong is None or weight is None or not wrong.any() or wrong.all():
        return ""
    low = weight < np.float32(PAPER_THRESHOLD)
    caught, spared = int((low & wrong).sum()), int((~low & ~wrong).sum())
    return (
        f"The right labels are known here: {count(caught)} of {count(wrong.sum())} wrong labels have a "
        f"weight below {PAPER_THRESHOLD}, and {count(spared)} of {count((~wrong).sum())} right ones are at "
        "or above it."
    )


def _losses(run: RunFiles) -> str:
    source, target = run.last.get("source_loss"), run.last.get("target_loss")
    text = ""
    if _is_number(source) and _is_number(target):
        text = f"The last source loss was {number(source)}, the last target loss {number(target)}."
    accuracy = run.last.get("test_accuracy")
    if _is_number(accuracy):
        text += f" The model gets {percent(accuracy)} of the test examples right."
    return text.strip()


def _engine(run: RunFiles) -> str:
    engine = run.last.get("engine") or run.start.get("engine")
    return f"Alignments were computed by the {engine} engine." if engine else ""


def _of_total(value: Any, total: Any) -> str:
    return f"{share(value / total)} of the source" if _is_number(value) and total else ""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
