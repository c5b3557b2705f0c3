"""Every engine's alignments against an ordinary step of the same model, in the same run.

    python benchmarks/engines.py [--device cpu|cuda] [--out FILE] [--check]

``times`` is seconds for losses and alignments of the source batch over seconds for an ordinary step on it
(forward, backward, SGD). The loop, one backward per example, is timed on eight examples and scaled.
"""

from __future__ import annotations

from typing import Any

import torch

from common import Case, arguments, cases, interleaved, ordinary_step, show, task_for, write
from soseleto.data.batches import Batch
from soseleto.engines import Engine, make_engine, trainable
from soseleto.errors import EngineError

ENGINES = ("layerwise", "forward", "double_backward")
LOOP_EXAMPLES = 8


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    rows = [row for case in cases(device) if case.source != case.target for row in measure(case, device)]
    show("Alignments against an ordinary step", rows)
    write(options.out, "engines", device, rows)
    if options.check:
        layerwise = [row for row in rows if row["engine"] == "layerwise" and isinstance(row["times"], float)]
        assert layerwise, "no layerwise engine was measured"
        for row in layerwise:
            others = [r["times"] for r in rows if r["model"] == row["model"] and isinstance(r["times"], float)]
            assert row["times"] == min(others), f"layerwise is not the fastest on {row['model']}: {row}"


def measure(case: Case, device: torch.device) -> list[dict[str, Any]]:
    model = case.make().to(device).train()
    batch = case.batch(case.source, device)
    task = task_for(case, model, case.source, device)
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}
    step = ordinary_step(case, model)
    runs: dict[str, Any] = {"ordinary step": lambda: step(batch)}
    declined: dict[str, str] = {}
    for name in ENGINES:
        engine = make_engine(name)
        try:
            engine(model, task.losses.source, batch, direction)
        except EngineError as error:
            declined[name] = str(error)
            continue
        runs[name] = _runner(engine, model, task.losses.source, batch, direction)
    few = Batch(batch.index[:LOOP_EXAMPLES], batch.inputs[:LOOP_EXAMPLES], batch.labels[:LOOP_EXAMPLES])
    runs["loop"] = _runner(make_engine("loop"), model, task.losses.source, few, direction)
    seconds = interleaved(runs, device, rounds=5, calls=5 if device.type == "cuda" else 1)
    seconds["loop"] *= case.source / LOOP_EXAMPLES
    base = seconds["ordinary step"]
    precision = "bf16" if case.precision is not None else "fp32"
    return [
        {
            "model": case.name,
            "precision": precision,
            "engine": name,
            "milliseconds": seconds[name] * 1e3 if name in seconds else None,
            "times": seconds[name] / base if name in seconds else "declines",
        }
        for name in ("ordinary step", *ENGINES, "loop")
    ]


def _runner(engine: Engine, model: Any, loss: Any, batch: Batch, direction: Any) -> Any:
    return lambda: engine(model, loss, batch, direction)


if __name__ == "__main__":
    main()
