"""A whole SOSELETO step against an ordinary step of the same model, in the same run.

    python benchmarks/step.py [--device cpu|cuda] [--channels-last] [--only MODEL ...] [--out FILE] [--check]

An ordinary step is forward, backward and SGD on the source batch of B examples. Ours adds a target batch of T, the
target gradient and its running mean, B exact alignments, and the update of weights and scores. The floor is the ratio
of the counted work, (4B+3T)/(3B), or (5B+3T)/(3B) with the forward engine; last-layer alignments need only a forward of
the target, (3B+T)/(3B). On a GPU both are CUDA graphs; on a CPU the benchmark takes ten minutes. Memory is the peak of
a step over that of an ordinary step on B+T examples.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

from common import (
    Case,
    arguments,
    as_graph,
    batch_norm_cases,
    cases,
    interleaved,
    last_layer_cases,
    layout,
    ordinary_step,
    peak_mib,
    settle,
    show,
    task_for,
    write,
)
from soseleto.algorithm import Soseleto, SoseletoState

AT_MOST = {
    "Quick": 1.55,
    "ResNet-18 GroupNorm": 1.60,
    "transformer": 1.55,
    "ResNet-18 BatchNorm": 2.0,
    "ResNet-18 BatchNorm, bf16": 1.85,
    "ResNet-50 BatchNorm": 1.85,
    "ResNet-18 GroupNorm, equal batches": 2.5,
    "ResNet-18 BatchNorm, last layer": 1.10,
    "ResNet-18 BatchNorm, last layer, scores centred": 1.10,
    "ResNet-18 BatchNorm, last layer, scores whitened": 1.15,
}
AT_MOST_CPU = 1.6
WORK = {"forward": 5}  # work on the source batch, in forward passes; 4 for the other engines
AT_MOST_MEMORY = 1.25


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", default=[], help="these models only, by their names in the table")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    found = cases(device, full=True) + (batch_norm_cases() + last_layer_cases() if device.type == "cuda" else [])
    chosen = [case for case in found if not options.only or case.name in options.only]
    rows = [measure(case, device, layout(options.channels_last)) for case in chosen]
    show("A step of ours against an ordinary step", rows)
    write(options.out, "step", device, rows)
    if options.check and (found := shortfalls(rows)):
        raise SystemExit("\n".join(found))


def shortfalls(rows: list[dict[str, Any]]) -> list[str]:
    """What --check reports."""
    found = []
    for row in rows:
        name = f"{row['model']}, {row['precision']}"
        if row["times"] > row["at most"]:
            found.append(f"{name}: {row['times']:.2f}x an ordinary step, more than {row['at most']:g}x")
        if row["memory"] is not None and row["memory"] > AT_MOST_MEMORY:
            found.append(f"{name}: {row['memory']:.2f}x the memory, more than {AT_MOST_MEMORY:g}x")
    return found


def measure(case: Case, device: torch.device, memory_format: torch.memory_format) -> dict[str, Any]:
    gc.collect()
    torch.cuda.empty_cache()  # graphs of the case before
    method = case.method or Soseleto(engine=case.engine)
    without_engine = method.alignment.reads_layer
    memory_format = torch.channels_last if case.channels_last else memory_format
    ours, plain = (case.make().to(device).to(memory_format=memory_format).train() for _ in range(2))  # type: ignore[call-overload]
    state = method.init(task_for(case, ours, case.source, device))
    source, target = case.batch(case.source, device), case.batch(case.target, device)
    step = ordinary_step(case, plain)
    settle(lambda: method.step(state, source, target), state.engine)
    seconds = interleaved(
        {
            "ordinary": as_graph(lambda: step(source), device),
            "ours": counted(as_graph(lambda: method.step(state, source, target), device), state, device),
        },
        device,
        **({"rounds": 5, "calls": 1, "warm_up": 1} if device.type == "cpu" else {}),  # a step takes seconds there
    )
    both = case.batch(case.source + case.target, device)
    b, t = case.source, case.target
    cpu = device.type == "cpu"
    precision = "bf16" if case.precision is not None else "fp32"
    bound = AT_MOST.get(f"{case.name}, {precision}", AT_MOST[case.name])
    return {
        "model": case.name,
        "precision": precision,
        "B": b,
        "T": t,
        "layout": "channels last" if memory_format == torch.channels_last else "contiguous",
        "engine": "none" if without_engine else state.engine.name,
        "ordinary ms": seconds["ordinary"] * 1e3,
        "ours ms": seconds["ours"] * 1e3,
        "times": seconds["ours"] / seconds["ordinary"],
        "floor": (3 * b + t) / (3 * b) if without_engine else (WORK.get(state.engine.name, 4) * b + 3 * t) / (3 * b),
        "at most": max(AT_MOST_CPU, bound)
        if cpu and state.engine.name != "layerwise"
        else AT_MOST_CPU
        if cpu
        else bound,
        "memory": memory(lambda: method.step(state, source, target), lambda: step(both), device),
    }


def counted(step: Callable[[], object], state: SoseletoState, device: torch.device) -> Callable[[], object]:
    """A recorded step, which does not count itself, with what the state does between steps."""
    if device.type != "cuda":
        return step

    def both() -> None:
        step()
        state.advance(1)

    return both


def memory(ours: Any, ordinary: Any, device: torch.device) -> float | None:
    """Peak memory of our step over the ordinary step's, both above what was allocated before (GPU only)."""
    of_ours, of_ordinary = peak_mib(ours, device), peak_mib(ordinary, device)
    return None if of_ours is None or of_ordinary is None else of_ours / of_ordinary


if __name__ == "__main__":
    main()
