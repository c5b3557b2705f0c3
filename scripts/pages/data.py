"""Campaigns against damage."""

from __future__ import annotations

from pages.common import ROOT, load, table


def safety() -> str:
    """The campaigns against a run's files, one line each."""
    if not (ROOT / "results" / "data-safety.json").exists():
        return "Not run yet."
    rows = {row["campaign"]: row for row in load("data-safety.json")["rows"]}
    lines = []
    for name, what, outcome in (
        (
            "flips",
            "bits flipped over all {files} files of a finished run",
            "named by every command that reads the file",
        ),
        (
            "full_disk",
            "failures of one of the {writes} writes of `soseleto fit`",
            "one sentence, and the same run later",
        ),
        ("kills", "runs killed in ten phases of `soseleto fit`", "resumed to the same files"),
    ):
        if row := rows.get(name):
            words = what.format(files=len(row.get("files", ())), writes=row.get("writes"))
            lines.append([f"{row['tried']:,} {words}", outcome, str(len(row["wrong"]))])
    return table(["campaign", "outcome", "exceptions"], lines)
