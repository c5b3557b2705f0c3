"""How much of our eager step on a CPU is Python and not tensor operations.

    python benchmarks/overhead.py [--out FILE] [--check]

``operations`` is the total time inside PyTorch's operators according to its profiler; the step is timed without the
profiler, alternating with profiled steps. ``overhead`` is the remaining time of the step over ``operations``. It uses
one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from common import Case, arguments, images, ordinary_step, show, task_for, write
from soseleto.algorithm import Soseleto
from soseleto.models.architectures import quick

AT_MOST_PERCENT = 5.0


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test that it runs")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    device = torch.device("cpu")
    rows = measure(
        Case("Quick", quick, *((8, 2) if options.tiny else (256, 32)), images), device, 1 if options.tiny else 7
    )
    show("Python overhead of an eager step", rows)
    write(options.out, "overhead", device, rows)
    if options.check and rows[0]["overhead %"] > AT_MOST_PERCENT:
        raise SystemExit(f"Python adds {rows[0]['overhead %']:.1f} %, more than {AT_MOST_PERCENT:g} %")


def measure(case: Case, device: torch.device, rounds: int) -> list[dict[str, Any]]:
    method = Soseleto()
    state = method.init(task_for(case, case.make().train(), case.source, device))
    source, target = case.batch(case.source, device), case.batch(case.target, device)
    plain = ordinary_step(case, case.make().train())
    runs: dict[str, Callable[[], object]] = {
        "ours": lambda: method.step(state, source, target),
        "ordinary": lambda: plain(source),
    }
    return [row(name, run, rounds) for name, run in runs.items()]


def row(name: str, run: Callable[[], object], rounds: int) -> dict[str, Any]:
    for _ in range(2):
        run()
    whole, inside = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        whole.append(time.perf_counter() - start)
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            run()
        inside.append(sum(event.self_cpu_time_total for event in seen.key_averages()) / 1e6)
    step, operations = statistics.median(whole), statistics.median(inside)
    return {
        "step": name,
        "ms": step * 1e3,
        "operations ms": operations * 1e3,
        "overhead %": 100 * max(0.0, step - operations) / operations,
    }


if __name__ == "__main__":
    main()
