"""How well the estimates of suspects hold."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from pages.common import ROOT, benchmark, load, spread, table
from soseleto.errors import counted


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
            cells.append("" if held is None else f"{held:.0f} % ({width:.0f})")
        lines.append([*cells, str(row["precision unknown"])])
    columns = ["basis", "mistakes", "draws", "wrong share held (width)", "precision held (width)", "precision unknown"]
    shown = table(columns, lines)
    own = module.reported(rows)
    kinds, seeds = dict.fromkeys(row["data"] for row in own), {row["seed"] for row in own}
    text = f"{shown}\n\nData: {', '.join(kinds)}; {counted(len(seeds), 'seed')}."
    if len(half := module.at_half_recall(rows)) < 2:
        return text
    return (
        f"{text} With 30 % of the digits taken for the next class, without earlier labels, the list of the most "
        f"probable ones that has half of the wrong labels has a precision of {spread(half, 2)} ({len(half)} seeds)."
    )


PEOPLE = {"aggre_label": "people (photos, majority of 3)", "random_label2": "people (photos, one each)",
          "worse_label": "people (photos, worst of 3)", "people": "people (news, titles)"}  # fmt: skip


def scan() -> str:
    """What the lists of a scan hold, and its model, beside cleanlab."""
    if not (ROOT / "results" / "scan.json").exists():
        return "Not run yet."
    rows, module = load("scan.json")["rows"], benchmark("scan")
    kinds = sorted(
        {(r["setting"]["noise"], r["setting"]["rate"] or 1.0) for r in rows}, key=lambda k: (k[0] in PEOPLE, k)
    )
    lines = [
        _of_scan(PEOPLE.get(noise, noise), [r for r in rows if _kind(r) == (noise, rate)], module)
        for noise, rate in kinds
    ]
    columns = ["mistakes", "wrong", "draws", "AUROC", "accuracy", "90 % reached", "precision, recall"]
    columns += ["not reached", "precision, recall"]
    found = {line["what"]: line["found"] for line in module.must_show(rows)}
    sets = ", ".join(dict.fromkeys(row["setting"]["data"] for row in rows))
    earlier, rates = _lists([r for row in rows if module.reached(r := {**row, **row["earlier_labels"]})], module)
    return (
        f"{table(columns, [*lines, _of_scan('all', rows, module)])}\n\n"
        "AUROC of wrong labels: scan / cleanlab; accuracy of the model: scan / cleanlab's pruning / all labels. "
        "Precision and recall are the true ones, means over the lists whose stated precision is the requested 90 %, "
        f"and over those where it is lower or unknown. With earlier labels of the trusted examples {earlier} lists "
        f"reach it: {rates}. Data: {sets}. The stated interval of the share of wrong labels "
        f"holds in {found['wrong share: stated intervals that hold, %']:.0f} % of the draws, that of the precision in "
        f"{found['precision: stated intervals that hold, %']:.0f} %."
    )


def _kind(row: dict[str, Any]) -> tuple[str, float]:
    return row["setting"]["noise"], row["setting"]["rate"] or 1.0


def _of_scan(title: str, rows: list[dict[str, Any]], module: ModuleType) -> list[str]:
    """A line of the table."""
    return [
        title,
        f"{100 * module.mean_of(rows, 'true_share'):.0f} %",
        str(len(rows)),
        " / ".join(f"{module.mean_of(rows, 'auroc', name):.3f}" for name in ("joined", "cleanlab")),
        " / ".join(f"{module.mean_of(rows, 'accuracy', name):.1f}" for name in ("ours", "cleanlab", "ordinary")),
        *_lists([row for row in rows if module.reached(row)], module),
        *_lists([row for row in rows if row["suspects"] and not module.reached(row)], module),
    ]


def _lists(rows: list[dict[str, Any]], module: ModuleType) -> list[str]:
    """Their number, and the means of true precision and recall."""
    if not rows:
        return ["0", ""]
    return [str(len(rows)), f"{module.mean_of(rows, 'true_precision'):.2f}, {module.mean_of(rows, 'recall'):.2f}"]


def texts() -> str:
    """How long a scan of texts takes."""
    if not (ROOT / "results" / "scan-texts-cpu.json").exists():
        return "Not run yet."
    found = load("scan-texts-cpu.json")
    first, again = found["rows"]
    sizes = f"{first['setting']['texts']:,} news texts with {first['setting']['trusted']} trusted ones"
    share = 100 * first["encoder_seconds"] / first["seconds"]
    return (
        f"On a CPU ({found['device']}), MiniLM, {sizes}: {first['seconds']:.0f} seconds, {share:.0f} % of them in the "
        f"network; {again['seconds']:.0f} when features were kept (`python benchmarks/scan.py --texts "
        f"{first['setting']['texts']}`)."
    )


def parts() -> dict[str, str]:
    """Of docs/how-to/suspects.md."""
    return {"coverage": coverage(), "scan": scan()}
