"""Figure 1 of the paper, over several seeds: see ``soseleto.cli.demo``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from soseleto.cli.demo import run, summary

COMMAND = "python -m experiments synthetic"
FIRST_SEED = 300  # network and learning rate were chosen on seeds below 240, never on reported seeds


def reproduce(out: Path, *, seeds: int, report: Callable[[str], None]) -> list[dict[str, Any]]:
    """One row per seed; the first seed's run folder and report are kept in ``out``."""
    from soseleto.report import write_report
    from soseleto.run_folder.folder import RunFolder

    rows: list[dict[str, Any]] = []
    for seed in range(FIRST_SEED, FIRST_SEED + seeds):
        folder = out / f"seed-{seed}" if seed == FIRST_SEED else None
        if folder is not None:
            RunFolder.clear(folder, written_by=COMMAND)
        begin = time.perf_counter()
        result = run(folder, seed=seed, written_by=COMMAND)
        found = summary(result, seed)
        rows.append(
            {"method": "soseleto", "setting": {}, "seed": seed, **found, "seconds": time.perf_counter() - begin}
        )
        report(f"seed {seed}: " + ", ".join(f"{name} {value:.3f}" for name, value in found.items()))
        if folder is not None:
            write_report(folder)
    means = {name: statistics.fmean(row[name] for row in rows) for name in found}
    report(f"mean of {seeds}: " + ", ".join(f"{name} {value:.3f}" for name, value in means.items()))
    return rows
