"""The paper's synthetic experiment, and the table of census data."""

from __future__ import annotations

import statistics

from experiments.figure1 import LINES
from experiments.results import table
from pages.common import load, spread
from pages.common import table as columns


def synthetic() -> str:
    """A line per quantity, a column per line of the experiment."""
    rows = load("synthetic.json")["rows"]
    runs = {title.replace("**", ""): [r for r in rows if r["method"] == name] for name, (title, _) in LINES.items()}
    lines = []
    for key, title, scale, digits in (
        ("clean_above", "correctly labelled points with a weight above 0.1", 100, 1),
        ("flipped_below", "flipped points with a weight below 0.1", 100, 1),
        ("accuracy", "accuracy on 2,000 fresh points", 1, 1),
        ("missed_distance", "median distance of the missed flipped points from the separator", 1, 3),
    ):
        unit = " %" if digits == 1 else ""
        values = [[scale * row[key] for row in own] for own in runs.values()]
        lines.append([title, *(f"{spread(own, digits)}{unit}" for own in values)])
        if key == "flipped_below":
            lines.append(["… median", *(f"{statistics.median(own):.0f}{unit}" for own in values)])
            lines.append(["… in the worst of the seeds", *(f"{min(own):.0f}{unit}" for own in values)])
    return columns(["", *(f"{title}, {len(own)} seeds" for title, own in runs.items())], lines)


def adult() -> str:
    """Adult with flipped labels: accuracy of the networks and of boosting."""
    lines = {
        "gradient_boosting": "gradient boosting on source and target",
        "soseleto": "SOSELETO, `--model table`",
        "soseleto_then_boosting_doubted": "**SOSELETO, then boosting**",
        "soseleto_then_boosting_frozen_doubted": "… learned weights frozen at 1",
        "soseleto_then_boosting_mean": "… labels not doubted",
        "boosting_frozen": "… labels not doubted, learned weights frozen at 1",
        "soseleto_then_boosting_each": "… labels not doubted, each row with its own learned weight",
        "gradient_boosting_clean": "gradient boosting, all labels corrected",
    }
    rows = load("tables.json")["rows"]
    noises = dict.fromkeys(row["setting"]["noise"] for row in rows)
    settings = {f"{100 * noise:.0f} % flipped": {"noise": noise, "n_target": 300} for noise in sorted(noises)}
    return table(rows, methods=lines, settings=settings)
