"""Whether ``soseleto fit`` is ever worse than ordinary, mixed or target-only training: digits, photos, a table, texts.

    python benchmarks/coverage.py --prepare FOLDER        # the same data
    python benchmarks/never_worse.py --data FOLDER --out results/never_worse.json --processes 14 --device cpu

A draw has a source of 3,000 examples with mistakes, 200 trusted ones and 2,000 test examples. The command line runs
twice with its defaults: with the test set, which gives the accuracy of every method, and without, as a user has it,
where it keeps the method that held-out folds of the target are for. A row has all accuracies and the method that was
kept. Finished draws are skipped, so that the command can be repeated after a stop.
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import arguments, show
from coverage import FILE, Cell, drawn, read_rows, stored, write_rows
from soseleto.cli.main import main as command
from soseleto.comparison.accuracy import SOSELETO as METHOD
from soseleto.comparison.plan import BASELINES as RIVALS
from soseleto.run_folder.folder import RunFolder

DATA = ("digits", "photos", "table", "text")
NOISES = (*(("uniform", rate) for rate in (0.0, 0.02, 0.05, 0.2, 0.3, 0.5)), ("pairs", 0.3))
FEW = 0.05  # up to which the default is compared with ordinary training
SOURCE, TARGET, TEST = 3000, 200, 2000
SEEDS = 5
FIRST_SEED = 50  # none of the draws that settings were chosen on


def cells(seeds: int, first: int = FIRST_SEED) -> Iterator[Cell]:
    return (
        Cell(data, noise, rate, seed) for seed in range(first, first + seeds) for data in DATA for noise, rate in NOISES
    )


def row_of(cell: Cell, data: Path, device: str, sizes: tuple[int, int, int], more: Sequence[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    begin, (n, m, tests) = time.perf_counter(), sizes
    draw = drawn(cell, stored(data), (n, m + tests, 0))
    files = {
        "source": draw.source,
        "target": draw.target.subset(range(m)),
        "test": draw.target.subset(range(m, m + tests)),
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, one in files.items():
            np.savez(Path(folder) / f"{name}.npz", x=one.inputs.numpy(), y=one.labels.numpy())
        sets = [word for name in ("source", "target") for word in (f"--{name}", f"{folder}/{name}.npz")]
        # Probes are for suspects: with them, the main training would be one more, and no model of the comparison.
        common = [*sets, "--seed", str(cell.seed), "--device", device, "--probes", "0", *more]
        judged = _run([*common, "--test", f"{folder}/test.npz", "--folds", "0", "--keep", METHOD], f"{folder}/judged")
        folds = _run(common, f"{folder}/kept")
    accuracy = {row["method"]: round(row["accuracy"], 2) for row in judged["rows"]}
    found = {"data": cell.data, "noise": cell.noise, "rate": cell.rate, "seed": cell.seed, "accuracy": accuracy}
    found["in_folds"] = {row["method"]: row.get("minus_soseleto") for row in folds["rows"]}
    return found | {"kept": folds["kept"], "seconds": round(time.perf_counter() - begin, 1)}


def _run(words: Sequence[str], out: str) -> dict[str, Any]:
    """The comparison that ``soseleto fit`` writes."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            command(["fit", *words, "--out", out])
        except SystemExit as end:
            if end.code:
                raise RuntimeError(printed.getvalue()[-500:]) from None
    return RunFolder.open(Path(out)).comparison() or {}


def against(row: dict[str, Any]) -> dict[str, float]:
    """In points: what was kept and SOSELETO minus the best rival, and SOSELETO minus ordinary training."""
    accuracy = row["accuracy"]
    best = max(accuracy[rival] for rival in RIVALS)
    return {
        "kept − best": accuracy[row["kept"]] - best,
        "SOSELETO − best": accuracy[METHOD] - best,
        "SOSELETO − ordinary": accuracy[METHOD] - accuracy["ordinary"],
    }


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mean differences of every cell and over all of them, each with the standard error of the mean."""
    lines = []
    for data, noise, rate in [
        *dict.fromkeys((row["data"], row["noise"], row["rate"]) for row in rows),
        ("all", "", None),
    ]:
        own = [row for row in rows if data == "all" or (row["data"], row["noise"], row["rate"]) == (data, noise, rate)]
        means = {}
        for name in against(own[0]) if own else ():
            points = [against(row)[name] for row in own]
            means[name] = float(np.mean(points))
            means[f"{name}, ±"] = float(np.std(points, ddof=1) / len(points) ** 0.5) if len(points) > 1 else 0.0
        kept = sum(row["kept"] == METHOD for row in own)
        lines.append({"data": data, "mistakes": noise, "rate": rate, "draws": len(own), **means, "kept SOSELETO": kept})
    return lines


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help=f"with {FILE}")
    parser.add_argument("--only", nargs="+", metavar="DATA", default=DATA, choices=DATA)
    parser.add_argument("--rates", nargs="+", type=float, help="shares of wrong labels, by default all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--sizes", type=int, nargs=3, default=(SOURCE, TARGET, TEST), metavar="N")
    parser.add_argument("--fit", nargs="+", default=[], metavar="WORD", help="more options of `fit`, without their --")
    options = parser.parse_args(argv)
    rows = read_rows(options.out)
    done = {(row["data"], row["noise"], row["rate"], row["seed"]) for row in rows}
    asked = [cell for cell in cells(options.seeds, options.first_seed) if cell.data in options.only]
    wanted = [c for c in asked if c.key not in done and (options.rates is None or c.rate in options.rates)]
    more = [word if at % 2 else f"--{word}" for at, word in enumerate(options.fit)]
    device, context = torch.device(options.device), multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        given = options.data / FILE, options.device, tuple(options.sizes), more
        work = [pool.submit(row_of, cell, *given) for cell in wanted]
        for number, one in enumerate(as_completed(work), 1):
            rows.append(one.result())
            write_rows(options.out, device, rows, name="never-worse")
            print(f"{number} of {len(work)} draws: {rows[-1]['seconds']} s", flush=True)
    show("Accuracy in points", summary(rows))
    return rows


if __name__ == "__main__":
    main()
