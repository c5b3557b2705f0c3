"""Large data, and campaigns against damage."""

from __future__ import annotations

from pages.common import ROOT, load, table


def large() -> str:
    """Every figure of the benchmark, with its limit where it has one."""
    rows = load("large_data-cpu.json")["rows"]
    return table(
        ["measured", "", "at most"],
        [
            [
                row["what"],
                ("yes" if row["value"] else "no")
                if row["unit"] == "yes or no"
                else f"{row['value']:,.0f} {row['unit']}"
                if row["value"] >= 1000
                else f"{row['value']:.3g} {row['unit']}",
                f"{row['at_most']:,g}" if "at_most" in row else "",
            ]
            for row in rows
        ],
    )


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
