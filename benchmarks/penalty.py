"""The penalties of the regression behind suspects: how well wrong labels are ranked, and how honest precision is.

    python benchmarks/coverage.py --prepare FOLDER
    python benchmarks/penalty.py --data FOLDER --out results/choose-penalty-cpu.json

On draws of coverage.py that are not reported there, and on such with fewer target examples. One training gives every
pair of penalties the same signals and probes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from common import arguments, show
from coverage import (
    FILE,
    FIRST_SEED,
    OTHERS,
    SOURCE,
    TARGET,
    WITHOUT,
    Array,
    Cell,
    drawn,
    read_rows,
    stored,
    suspects_of,
    write_rows,
)
from experiments.detection import auroc
from soseleto.suspects.estimate import EARLIER_LABELS
from soseleto.suspects.probes import enough_of_both
from soseleto.suspects.signals import Evidence
from soseleto.suspects.suspects import Calibrated

# Of the mean coefficient, and of the coefficients' distances from it.
PENALTIES = (
    *((equal, equal) for equal in (0.3, 1.0, 3.0, 10.0)),
    *((1.0, apart) for apart in (2.0, 3.0, 10.0, 100.0)),
    (2.0, 3.0),
    (0.3, 10.0),
)
ASKED = 0.9
TARGETS = (TARGET, 100)
KINDS = (
    *(("digits", noise, rate) for noise in ("uniform", "hard") for rate in (0.05, 0.2)),
    ("digits", "pairs", 0.2),
    ("table", "uniform", 0.2),
    *(("table", "hard", rate) for rate in (0.05, 0.2)),
    *(("text", noise, 0.2) for noise in ("uniform", "pairs", "hard")),
    *(("text", "human", rate) for rate in (0.05, 0.2)),
)


def rows_of(cell: Cell, data: Path, device: str, sizes: Any = (SOURCE, TARGET, OTHERS)) -> Iterator[dict[str, Any]]:
    draw = drawn(cell, stored(data), sizes)
    differ = int((draw.before != draw.target.labels).sum())
    for basis in (EARLIER_LABELS, WITHOUT):
        if basis == WITHOUT or enough_of_both(differ, len(draw.target)):
            found = suspects_of(draw, cell, earlier=basis == EARLIER_LABELS, epochs=20, device=device)
            kind = {"data": cell.data, "noise": cell.noise, "rate": cell.rate, "seed": cell.seed, "target": sizes[1]}
            yield from compared(kind | {"basis": basis}, found.calibrated.evidence, draw.wrong)


def compared(kind: dict[str, Any], evidence: Evidence, wrong: Array) -> Iterator[dict[str, Any]]:
    """A row for each pair of penalties."""
    for ridge, apart in PENALTIES:
        learned = Calibrated.learn(evidence, kind["seed"], ridge=ridge, apart=apart)
        found = learned.for_precision(ASKED)
        chosen, p = found.is_suspect.numpy(), learned.probability
        known = {}
        if chosen.any():
            true, interval = float(wrong[chosen].mean()), found.precision
            known = {"precision": round(true, 4), "held": interval.low <= true <= interval.high}
            known |= {"width": round(interval.high - interval.low, 4)}
        yield kind | {
            "penalties": [ridge, apart],
            "auroc": round(auroc(-torch.from_numpy(p), torch.from_numpy(wrong)), 4),
            "brier": round(float(((p - wrong) ** 2).mean()), 5),
            "recall": round(float(wrong[chosen].sum() / max(wrong.sum(), 1)), 4),
            **known,
        }


def mean(values: Iterable[float]) -> float:
    """NaN where there are none."""
    known = list(values)
    return sum(known) / len(known) if known else float("nan")


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means by number of target examples and penalties; precision over the draws with suspects."""
    lines = []
    for target in dict.fromkeys(row["target"] for row in rows):
        for pair in PENALTIES:
            own = [row for row in rows if (row["target"], row["penalties"]) == (target, list(pair))]
            with_suspects = [row for row in own if "precision" in row]
            names = {"target": target, "mean": pair[0], "apart": pair[1]}
            line: dict[str, Any] = names | {"draws": len(own), "with suspects": len(with_suspects)}
            line |= {name: mean(row[name] for row in own) for name in ("auroc", "brier", "recall")}
            line |= {name: mean(row[name] for row in with_suspects) for name in ("precision", "held", "width")}
            line["off by"] = mean(abs(row["precision"] - ASKED) for row in with_suspects)
            lines.append({name: round(float(value), 4) for name, value in line.items()})
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, metavar="FOLDER", required=True, help="with coverage.npz")
    options = parser.parse_args(argv)
    rows = read_rows(options.out)
    done = {(row["data"], row["noise"], row["rate"], row["seed"], row["target"]) for row in rows}
    wanted = ((Cell(*kind, seed), size) for seed in range(FIRST_SEED) for size in TARGETS for kind in KINDS)
    for cell, size in wanted:
        if (*cell.key, size) not in done:
            rows += rows_of(cell, options.data / FILE, options.device, (SOURCE, size, OTHERS))
            write_rows(options.out, torch.device(options.device), rows, name="choose-penalty")
            print(f"{cell}, {size} target examples", flush=True)
    show("suspects at an asked precision of 90 %", summary(rows))


if __name__ == "__main__":
    main()
