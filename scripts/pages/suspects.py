"""How well the estimates of suspects hold."""

from __future__ import annotations

from pages.common import ROOT, benchmark, load, spread, table
from soseleto.experiments.cifar10_noise import tables as cifar10


def penalties() -> str:
    """How well wrong labels are ranked and how honest precision is, by the penalties of the regression."""
    lines = []
    rows = benchmark("penalty").summary(load("choose-penalty-cpu.json")["rows"])
    for row in sorted(rows, key=lambda row: (-row["target"], row["mean"], row["apart"])):
        names = [f"{row[name]:g}" for name in ("target", "mean", "apart")]
        precision, recall, held = (f"{100 * row[name]:.0f} %" for name in ("precision", "recall", "held"))
        found = [f"{row['auroc']:.3f}", precision, f"{100 * row['off by']:.0f} points", recall]
        known = f"{row['with suspects']:.0f} of {row['draws']:.0f}"
        lines.append([*names, *found, f"{held} ({100 * row['width']:.0f})", known])
    columns = ["target", "mean", "distances", "AUROC of the probability", "true precision", "mean distance from 90 %"]
    return table([*columns, "recall", "interval holds the truth (width)", "draws with suspects"], lines)


def intervals() -> str:
    """Coverage of the intervals of suspects, with and without the rates counted on probes."""
    rates = ("wrong share", "precision", "recall")
    titles = {noise: title for title, noise in cifar10.SETTINGS.items()}
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in load("suspect_intervals-cpu.json")["rows"]:
        cells = lines.setdefault((titles[row["noise"]], row["probes"]), {})
        cells[row["rate"]] = f"{row['covered %']:.0f} % (±{row['half width']:.1f})"
        cells["alone " + row["rate"]] = f"{row['regressions alone: covered %']:.0f} % (±{row['their half width']:.1f})"
    ways = [*rates, *("alone " + rate for rate in rates)]
    return table(
        ["wrong labels", "probes", *rates, *(f"regressions alone: {rate}" for rate in rates)],
        [[noise, str(n), *(cells.get(way, "") for way in ways)] for (noise, n), cells in lines.items()],
    )


def coverage() -> str:
    """How often the intervals of suspects hold the truth, by basis and kind of mistakes."""
    if not (ROOT / "results" / "coverage.json").exists():
        return "Not run yet."
    lines = []
    rows, module = load("coverage.json")["rows"], benchmark("coverage")
    for row in module.summary(rows):
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
    return {"penalties": penalties(), "coverage": coverage(), "intervals": intervals()}
