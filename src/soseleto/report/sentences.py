"""Number formats, key figures and summary sentences of the report."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeGuard

import numpy as np

from soseleto.errors import counted
from soseleto.report.files import RunFiles
from soseleto.report.tables import PAPER_THRESHOLD
from soseleto.run_folder.ranking import about_unknown, expected, in_words, is_known, suspect_rows


def count(value: float) -> str:
    """``12,345``."""
    return f"{round(value):,}"


def share(value: float) -> str:
    """A fraction in percent; 0 % and 100 % only where exact."""
    percent = 100 * value
    if percent in (0, 100):
        return f"{percent:.0f} %"
    return f"{min(max(percent, 0.1), 99.9):.1f} %"


def percent(value: float) -> str:
    """A number that is already in percent, as accuracies in a run's records are."""
    return share(value / 100)


def number(value: object) -> str:
    """Three significant digits, or a dash for anything that is not a finite number."""
    if not isinstance(value, int | float) or not math.isfinite(value):
        return "–"
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:.2e}"


def decimals(values: np.ndarray) -> str:
    """A format with fixed decimals for a column of numbers, three significant digits for the largest."""
    known = np.abs(values[np.isfinite(values)])
    largest = float(known.max(initial=0))
    if not 1e-6 <= largest < 1e6:
        return "%.2e" if largest else "%.0f"
    return f"%.{max(0, 2 - math.floor(math.log10(largest)))}f"


def duration(seconds: float) -> str:
    """``8 s``, ``3 min 20 s`` or ``2 h 5 min``."""
    if seconds < 60:
        return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes} min {left} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def key_figures(run: RunFiles) -> list[tuple[str, str, str]]:
    """(name, figure, remark) of the summary; figures the run does not have are left out."""
    last, total = run.last, run.start.get("n_source")
    effective = last.get("effective_source")
    rows = [
        ("Source examples", total, count, f"{count(run.start.get('n_target', 0))} target examples"),
        ("Effective sample size", effective, count, _of_total(effective, total)),
        ("Mean weight", last.get("mean_weight"), number, _of_weights(run)),
        ("Weights at 0", last.get("share_at_zero"), share, "of the source examples"),
        ("Weights at 1", last.get("share_at_one"), share, "of the source examples"),
        ("Test accuracy", last.get("test_accuracy"), percent, "after the last epoch"),
    ]
    return [(name, form(value), remark) for name, value, form, remark in rows if _is_number(value)]


def _of_weights(run: RunFiles) -> str:
    return "probability that a label is right" if run.is_strong else "0: ignored, 1: full weight"


def of_scores(run: RunFiles) -> str:
    """The caption of their histogram."""
    if run.is_strong:
        return "Mean of the probability that the label is right over all visits, of which later ones count more."
    return "Mean alignment with the target gradient; positive lowers the target loss to first order."


ESTIMATES = {
    "precision": ("precision", "of the suspects are mislabelled"),
    "recall": ("recall", "of the mislabelled examples are suspects"),
    "wrong_share": ("noise rate", "of the source examples are mislabelled"),
}


def suspect_figures(run: RunFiles) -> list[tuple[str, str, str]]:
    """(name, figure, remark) of the suspects; in transfer mode, of the low weights."""
    assert run.ranking is not None
    found, total = len(suspect_rows(run.ranking)), len(run.ranking["weight"])
    part = f"{share(found / total)} of the source"
    if run.is_transfer:
        return [(f"Weight below {PAPER_THRESHOLD}", count(found), part)]
    rows = [("Suspects", count(found), f"{part}{_rule(run, found)}")]
    best = run.suspects.get("best")
    if not found and best:
        rows.append(("Best list", count(best["count"]), expected(best.get("precision"))))
    shown = list(ESTIMATES) if found else ["wrong_share"]  # precision and recall are undefined without suspects
    return rows + [_estimate(run, name) for name in shown if run.suspects.get(name)]


def _rule(run: RunFiles, found: int) -> str:
    """What makes an example a suspect, or why there are none."""
    assert run.ranking is not None
    if not found:
        return _highest(run)
    if "is_label_issue" not in run.ranking:
        return f": weight below {PAPER_THRESHOLD}"
    threshold = run.suspects.get("threshold")
    return f": probability of being mislabelled at least {number(threshold)}" if _is_number(threshold) else ""


def _estimate(run: RunFiles, name: str) -> tuple[str, str, str]:
    figure, (title, remark) = run.suspects[name], ESTIMATES[name]
    basis = figure.get("basis", "")
    how = "Audited" if basis == "audited" else "Estimated"
    if not is_known(figure):
        return f"{how} {title}", "unknown", "the interval is too wide to say anything"
    interval = f"95 % interval {share(figure['low'])} to {share(figure['high'])}"
    return f"{how} {title}", share(figure["value"]), f"{remark} ({interval}{f'; {basis}' if basis else ''})"


def sentences(run: RunFiles) -> list[str]:
    """The summary in full sentences; those the run has no data for are left out."""
    parts = (_training, _comparison, _weights, _suspects, _unknown, _truth, _losses, _engine)
    return [sentence for sentence in (part(run) for part in parts) if sentence]


def _training(run: RunFiles) -> str:
    source, target = run.start.get("n_source"), run.start.get("n_target")
    data = f" on {count(source)} source and {count(target)} target examples" if source and target else ""
    if not run.epochs:
        return f"Training{data} has not finished its first epoch."
    epochs = counted(len(run.epochs), "epoch")
    if not run.end:
        return f"Training{data} has not finished: this report covers the first {epochs}."
    took = run.end.get("seconds")
    time = f" in {duration(took)}" if _is_number(took) else ""
    return f"Trained{data} for {epochs}{time}."


def compared(run: RunFiles) -> list[tuple[str, float, float, float]]:
    """(method, accuracy, low, high) in percent of this run and its baselines; empty without a comparison."""
    rows = run.comparison.get("rows") or []
    return [(_method(row["method"]), row["accuracy"], row["low"], row["high"]) for row in rows]


def compared_how(run: RunFiles) -> str:
    """The caption of the comparison."""
    same, others = "Comparison with other methods on the same data", run.comparison.get("epochs_of_others")
    if others is None:
        return f"{same} and for as many epochs"
    ours = counted(len(run.epochs), "epoch")
    return f"{same}: SOSELETO by the strong recipe for {ours}, the others plainly for {others}"


def evaluated_on(run: RunFiles) -> str:
    """``100 target examples (5-fold cross-validation)`` or ``1,000 test examples``."""
    examples = count(run.comparison["rows"][0]["examples"])
    if run.comparison.get("judged_on") == "test":
        return f"{examples} test examples"
    return f"{examples} target examples ({run.comparison['folds']}-fold cross-validation)"


def _method(name: str) -> str:
    titles = {"soseleto": "SOSELETO", "ordinary": "ordinary training", "mixed": "mixed training"}
    titles |= {"final": "SOSELETO, then boosting"}
    return titles.get(name, name.replace("_", " "))


def _comparison(run: RunFiles) -> str:
    rows = compared(run)
    if not rows:
        return ""
    accuracies = [f"{method} {percent(accuracy)}" for method, accuracy, _, _ in rows]
    text = f"Held-out accuracy on {evaluated_on(run)}: {', '.join(accuracies)}."
    return f"{text} {verdict(run.comparison)}".rstrip()


def verdict(comparison: Mapping[str, Any]) -> str:
    """Which model is kept and how the best rival compares with SOSELETO; empty without rivals.

    Boosted models are compared but never kept, see ``winner`` in ``cli/comparison.py``.
    """
    rivals = {row["method"]: row for row in comparison.get("rows") or [] if "minus_soseleto" in row}
    networks = [row for method, row in rivals.items() if method not in ("gradient_boosting", "final")]
    boosted = rivals.get("gradient_boosting")
    parts = [_kept(networks, comparison.get("kept", "soseleto"))] if networks else []
    if boosted is not None and boosted["minus_soseleto"]["low"] > 0:
        advice = "" if "final" in rivals else " and is not kept: --final boosting keeps a boosted model"
        parts.append(f"Gradient boosting is {_better(boosted)}{advice}.")
    return " ".join(parts)


def _kept(networks: list[dict[str, Any]], kept: str) -> str:
    best = next((row for row in networks if row["method"] == kept), max(networks, key=lambda row: row["accuracy"]))
    method, difference = _method(best["method"]), best["minus_soseleto"]
    if kept != "soseleto":
        return f"Selection did not pay here: the model of {method} is kept, which is {_better(best)}."
    value, low, high = (-difference[name] for name in ("value", "high", "low"))
    if value > 0:
        return f"SOSELETO's model is kept, {value:.1f} points better than {method} ({_interval(low, high)})."
    if high < 0:  # with --keep soseleto
        return f"SOSELETO's model is kept, although {method} is {_better(best)}."
    interval = _interval(difference["low"], difference["high"])
    return f"SOSELETO's model is kept: no other network is better beyond chance ({method} minus SOSELETO: {interval})."


def _better(row: Mapping[str, Any]) -> str:
    difference = row["minus_soseleto"]
    interval = _interval(difference["low"], difference["high"])
    return f"{difference['value']:.1f} points better than SOSELETO's ({interval})"


def _interval(low: float, high: float) -> str:
    return f"95 % interval {low:+.1f} to {high:+.1f}"


def _weights(run: RunFiles) -> str:
    last = run.last
    effective, total = last.get("effective_source"), run.start.get("n_source")
    if not _is_number(effective) or not total:
        return ""
    text = f"The effective sample size is {count(effective)} of {count(total)} source examples"
    if _is_number(last.get("share_at_zero")) and _is_number(last.get("share_at_one")):
        text += f"; {share(last['share_at_zero'])} of the weights are 0 and {share(last['share_at_one'])} are 1"
    return text + "."


def _suspects(run: RunFiles) -> str:
    if run.ranking is None or "is_label_issue" not in run.ranking:
        return ""
    found = len(suspect_rows(run.ranking))
    if found:
        precision = run.suspects.get("precision")
        known = (
            f", with a precision of {in_words(precision)}" if is_known(precision) else "; their precision is unknown"
        )
        about = known if precision else ""
        return f"{counted(found, 'label is', 'labels are')} suspected to be wrong{about}."
    best = run.suspects.get("best")
    if not best:
        return f"No label is suspected to be wrong{_highest(run)}."
    asked = run.config.get("suspect_precision")
    at = f" at a precision of {share(asked)}" if _is_number(asked) else ""
    return (
        f"No label is suspected to be wrong{at}{_highest(run)}. The best list has {counted(best['count'], 'example')}, "
        f"{expected(best.get('precision'))}."
    )


def _unknown(run: RunFiles) -> str:
    return "" if run.ranking is None else about_unknown(run.ranking)


def _highest(run: RunFiles) -> str:
    """Why there are no suspects, where the run has probabilities."""
    probability = run.column("mislabelled_probability")
    if probability is None:
        return ""
    return f": the highest probability of being mislabelled is {number(float(np.nanmax(probability)))}"


def _truth(run: RunFiles) -> str:
    wrong, weight = run.wrong, run.column("weight")
    if wrong is None or weight is None or not wrong.any() or wrong.all():
        return ""
    low = weight < np.float32(PAPER_THRESHOLD)
    return (
        f"The true labels are known: {count((low & wrong).sum())} of {count(wrong.sum())} mislabelled examples have a "
        f"weight below {PAPER_THRESHOLD}, and {count((~low & ~wrong).sum())} of {count((~wrong).sum())} correctly "
        f"labelled examples a weight of at least {PAPER_THRESHOLD}."
    )


def _losses(run: RunFiles) -> str:
    source, target = run.last.get("source_loss"), run.last.get("target_loss")
    text = ""
    if _is_number(source) and _is_number(target):
        text = f"The final source loss is {number(source)}, the final target loss {number(target)}."
    accuracy = run.last.get("test_accuracy")
    if _is_number(accuracy):
        text += f" The test accuracy is {percent(accuracy)}."
    return text.strip()


def _engine(run: RunFiles) -> str:
    engine = run.last.get("engine") or run.start.get("engine")
    return f"Alignments were computed by the {engine} engine." if engine else ""


def _of_total(value: Any, total: Any) -> str:
    return f"{share(value / total)} of the source" if _is_number(value) and total else ""


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and math.isfinite(value)
