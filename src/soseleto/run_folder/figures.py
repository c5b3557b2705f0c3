"""The figures of ``suspects.json``: precision, recall and share of wrong labels, each with its interval and basis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soseleto.errors import UsageError

FIGURES = ("precision", "recall", "wrong_share")
ESTIMATED = "estimated"  # entry of suspects.json: the estimates that audited figures have replaced
UNKNOWN = "unknown"


def with_audit(suspects: Mapping[str, Any], audit: Mapping[str, Any]) -> dict[str, Any]:
    """``suspects.json`` with the audited figures in place of the estimates, which stay under "estimated".

    A figure that the audit does not know yet keeps its estimate.
    """
    estimated = suspects.get(ESTIMATED) or {name: suspects[name] for name in FIGURES if suspects.get(name)}
    audited = {name: figure for name, figure in (audit.get("figures") or {}).items() if is_known(figure)}
    merged = {**suspects, **estimated, **audited}
    basis = next((merged[name].get("basis") for name in FIGURES if is_known(merged.get(name))), UNKNOWN)
    return {**merged, "basis": basis, ESTIMATED: estimated}


def best_count(suspects: Mapping[str, Any] | None) -> int:
    """The length of the best list of a run without suspects; 0 where the run has suspects, or no probabilities."""
    return int(((suspects or {}).get("best") or {}).get("count", 0))


def guaranteed_count(suspects: Mapping[str, Any] | None, asked: float) -> int:
    """The length of the longest list whose precision is at least ``asked`` by the lower end of its interval.

    An audited precision decides about the suspects as they are; otherwise the estimates at every threshold do.
    """
    if suspects is None or "curve" not in suspects:
        raise UsageError(
            "this run was trained without probes, so no precision can be guaranteed: leave out --guarantee."
        )
    precision = suspects["precision"]
    if precision.get("basis") == "audited":
        return int(suspects["count"]) if precision["low"] >= asked else 0
    curve = suspects["curve"]
    if "precision_low" not in curve:
        raise UsageError("this run has no intervals at every threshold: train again, or leave out --guarantee.")
    enough = (n for n, low in zip(curve["count"], curve["precision_low"], strict=True) if n and low >= asked)
    return next(enough, 0)


def is_known(figure: Mapping[str, Any] | None) -> bool:
    """Whether a figure has a value; an interval that says nothing has none."""
    return bool(figure) and figure.get("value") is not None  # type: ignore[union-attr]


def expected(precision: Mapping[str, Any] | None) -> str:
    """What is known about the precision of a list, to be written after it."""
    return f"with an expected precision of {in_words(precision)}" if is_known(precision) else "of unknown precision"


def in_words(figure: Mapping[str, Any] | None) -> str:
    """``95 % (90 to 98; audited)``, or ``unknown``."""
    if not is_known(figure):
        return UNKNOWN
    assert figure is not None
    value, low, high = (f"{100 * figure[name]:.0f}" for name in ("value", "low", "high"))
    basis = figure.get("basis")
    return f"{value} % ({low} to {high}{f'; {basis}' if basis else ''})"
