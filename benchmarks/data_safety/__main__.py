"""Run the campaigns and write their summary: python benchmarks/data_safety [--flips N] [--kills N] [--writes N].

A campaign of size 0 is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from data_safety.flips import flips
from data_safety.full_disk import full_disk
from data_safety.kills import PHASES, kills
from experiments.results import commit
from soseleto.run_folder.files import device_name, versions

OUT = Path(__file__).parents[2] / "results" / "data-safety.json"


def spread(count: int, most: int) -> list[int]:
    """At most ``most`` of the numbers 1 to ``count``, evenly spread, the ends included."""
    if count <= most:
        return list(range(1, count + 1))
    return sorted({round(1 + at * (count - 1) / (most - 1)) for at in range(most)})


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flips", type=int, default=2000, metavar="N", help="flipped bits")
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="killed runs")
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES, help="in which runs are killed")
    parser.add_argument("--writes", type=int, default=10**6, metavar="N", help="failing writes, all by default")
    parser.add_argument("--short", action="store_true", help="a failing write fails once, or until the end, in turn")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # forked processes
    found: dict[str, Any] = {
        "name": "data-safety", "commit": commit(), "device": device_name("cpu"), "versions": versions(), "rows": [],
    }  # fmt: skip
    campaigns: dict[str, tuple[int, Callable[[Path], dict[str, Any]]]] = {
        "flips": (given.flips, lambda folder: flips(folder, given.flips, others=10)),
        "full_disk": (given.writes, lambda folder: full_disk(folder, _chosen(given.writes), both=not given.short)),
        "kills": (given.kills, lambda folder: kills(folder, given.kills, phases=given.phases)),
    }
    for name, (size, run) in campaigns.items():
        if not size:
            continue
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            text = json.dumps(run(Path(folder))).replace(folder, "FOLDER")
        row = {"campaign": name, **json.loads(text), "seconds": round(time.perf_counter() - begin)}
        found["rows"].append(row)
        print(f"{name}: {row['tried']} tried, {len(row['wrong'])} wrong", flush=True)
        given.out.write_text(json.dumps(found, indent=1) + os.linesep)
    return found


def _chosen(most: int) -> Callable[[int], list[int]]:
    return lambda count: spread(count, most)


if __name__ == "__main__":
    main()
