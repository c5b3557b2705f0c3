"""How well the estimates of suspects hold."""

from __future__ import annotations

from pages.common import ROOT, benchmark, load, spread, table


def coverage() -> str:
    """How often the intervals of suspects hold the truth, by basis and kind of mistakes."""
    if not (ROOT / "results" / "coverage.json").exists():
        return "Not run yet."
    lines = []
    rows, module = load("coverage.json")["rows"], benchmark("coverage")
    for row in module.summary(rows):
        if row["basis"] == module.AUDITED:  # with another kind of interval than today's; both are exact
            continue
        cells = [row["basis"], row["mistakes"], str(row["draws"])]
        for name in ("share", "precision"):
            held, width = row[f"{name} held %"], row[f"{name} width"]
            cells += ["" if held is None else f"{held:.0f} % ({width:.0f})", str(row[f"{name} unknown"])]
        lines.append([*cells, str(row["no suspects"])])
    columns = ["basis", "mistakes", "draws", "wrong share held (width)", "unknown", "precision held (width)", "unknown"]
    shown = table([*columns, "no suspects"], lines)
    if len(half := module.at_half_recall(rows)) < 2:
        return shown
    own = module.reported(rows)
    kinds, seeds = dict.fromkeys(row["data"] for row in own), [row["seed"] for row in own]
    hard = " and ".join(f"{module.share_held(rows, 'hard', rate):.0f} %" for rate in (0.2, 0.4))
    return (
        f"{shown}\n\nData: {', '.join(kinds)}; seeds {min(seeds)} to {max(seeds)}, since the ones before were seen "
        "while the method was built. Without earlier labels, mistakes on hard examples are the weak place: at 20 and "
        f"40 % of them the wrong share is held in {hard} of the draws.\n\nWith 30 % of the digits taken for the next "
        "class, without earlier labels, the list of the most probable ones that has half of the wrong labels has a "
        f"precision of {spread(half, 2)} ({len(half)} seeds)."
    )


def parts() -> dict[str, str]:
    """Of docs/how-to/suspects.md."""
    return {"coverage": coverage()}
