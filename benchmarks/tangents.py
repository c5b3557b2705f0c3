"""The ways of the forward engine to compute tangents on a GPU, timed as whole steps against an ordinary step.

    python benchmarks/tangents.py [--model ResNet-18 ResNet-50] [--contiguous] [--profile] [--out FILE]

bf16, B=256, T=32; channels last unless ``--contiguous``. Ways are set by private constants of ``layer_tangents`` and
``norm_tangents``. Also timed: the target's part of a step, and the source's forward pass with tangents. ``--profile``
prints the kernels of one step of ours and of an ordinary one.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from common import (
    Case,
    arguments,
    as_graph,
    images,
    interleaved,
    layout,
    ordinary_step,
    photographs,
    resnet50,
    settle,
    show,
    task_for,
    write,
)
from soseleto.algorithm import Soseleto
from soseleto.engines import layer_tangents, norm_tangents, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.forward import by_hand
from soseleto.models.architectures import resnet18

HALF = torch.bfloat16
CASES = {
    "ResNet-18": Case("ResNet-18", lambda: resnet18(norm=nn.BatchNorm2d), 256, 32, images, HALF),
    "ResNet-50": Case("ResNet-50", resnet50, 256, 32, photographs, HALF),
}
PLAIN = {"_FUSED": False, "_COMPILED": False, "_ACCUMULATES": False, "_CONCATENATES": False}
WAYS: dict[str, dict[str, bool]] = {
    "as before": {},
    "fused norm": {"_FUSED": True},
    "fused norm, accumulated products (default)": {"_FUSED": True, "_ACCUMULATES": True},
    "fused norm, concatenated": {"_FUSED": True, "_CONCATENATES": True},
    "fused norm, both": {"_FUSED": True, "_ACCUMULATES": True, "_CONCATENATES": True},
    "compiled norm, accumulated": {"_COMPILED": True, "_ACCUMULATES": True},
    "compiled norm, both": {"_COMPILED": True, "_ACCUMULATES": True, "_CONCATENATES": True},
}


@contextlib.contextmanager
def way(name: str) -> Iterator[None]:
    settings = {**PLAIN, **WAYS[name]}
    homes = {key: norm_tangents if hasattr(norm_tangents, key) else layer_tangents for key in settings}
    before = {key: getattr(home, key) for key, home in homes.items()}
    for key, home in homes.items():
        setattr(home, key, settings[key])
    yield
    for key, home in homes.items():
        setattr(home, key, before[key])


def measure(case: Case, name: str, engine: str, device: torch.device, memory_format: Any) -> dict[str, Any]:
    """Our step in one way, over an ordinary step in the same run."""
    method, row = Soseleto(engine=engine), {"model": case.name, "way": name}
    ours, plain = (case.make().to(device).to(memory_format=memory_format).train() for _ in range(2))
    state = method.init(task_for(case, ours, case.source, device))
    source, target = case.batch(case.source, device), case.batch(case.target, device)
    step = ordinary_step(case, plain)
    torch.cuda.reset_peak_memory_stats()
    try:
        settle(lambda: method.step(state, source, target), state.engine)
        runs: dict[str, Callable[[], object]] = {"ordinary": lambda: step(source)}
        runs |= {"ours": lambda: method.step(state, source, target)}
        seconds = interleaved({key: graph(run, device) for key, run in runs.items()}, device)
    except Exception as error:  # a way may need a compiler that is not there
        return {**row, "error": f"{type(error).__name__}: {str(error).splitlines()[0]}"[:300]}
    row |= {"engine": state.engine.name, "by hand": _by_hand(state)}
    row |= {"times": seconds["ours"] / seconds["ordinary"]}
    return {**row, **{f"{key} ms": value * 1e3 for key, value in seconds.items()}}


def _by_hand(state: Any) -> Any:
    """Whether the engine uses our own tangents; False means that a way failed its proof, and PyTorch's are timed."""
    engines = getattr(state.engine, "_choices", None)
    if engines is None:
        return None
    choice = next(iter(engines._values.values()))[0].value.engine
    cases = getattr(choice, "_cases", None)
    return None if cases is None else next(iter(cases._values.values()))[0].value.way is by_hand


def graph(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    torch.cuda.empty_cache()  # a graph has memory of its own
    return as_graph(run, device)


def measure_parts(case: Case, device: torch.device, memory_format: Any) -> dict[str, Any]:
    model = case.make().to(device).to(memory_format=memory_format).train()
    source, target = case.batch(case.source, device), case.batch(case.target, device)
    row: dict[str, Any] = {"model": case.name, "way": "parts of a step"}
    for name, run in parts(case, model, source, target).items():
        row[f"{name} ms"] = interleaved({name: graph(run, device)}, device)[name] * 1e3
    return row


def parts(case: Case, model: nn.Module, source: Any, target: Any) -> dict[str, Callable[[], object]]:
    """The target's passes; the source's forward pass alone; with tangents."""
    losses, parameters = task_for(case, model, case.source, torch.device("cuda")).losses, trainable(model)
    direction = {name: torch.randn_like(p) for name, p in parameters.items()}
    return {
        "target": lambda: gradient(losses.target(model, target).mean(), parameters),
        "source forward": lambda: losses.source(model, source),
        "source forward with tangents": lambda: by_hand(model, losses.source, source, direction),
    }


def profile(case: Case, device: torch.device, memory_format: Any) -> None:
    method = Soseleto()
    model = case.make().to(device).to(memory_format=memory_format).train()
    state = method.init(task_for(case, model, case.source, device))
    source, target = case.batch(case.source, device), case.batch(case.target, device)
    step = ordinary_step(case, model)
    runs = {"ours": lambda: method.step(state, source, target), "ordinary": lambda: step(source)}
    for name, run in runs.items():
        for _ in range(6):
            run()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as found:
            run()
            torch.cuda.synchronize()
        print(f"\n{case.name}, {name}")
        print(found.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90))


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--model", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--contiguous", action="store_true")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device, memory_format = torch.device(options.device), layout(not options.contiguous)
    if device.type != "cuda":
        raise SystemExit("the ways differ on a GPU only: use --device cuda")
    torch.manual_seed(0)
    rows = []
    for case in (CASES[name] for name in options.model):
        for name, engine in [*((name, "auto") for name in WAYS), *(("as before", held) for held in HELD)]:
            with way(name):
                row = measure(case, name, engine, device, memory_format)
            rows.append(row if engine == "auto" else {**row, "way": engine})
            gc.collect()
            torch.cuda.empty_cache()
            print(rows[-1], flush=True)
            write(options.out, "tangents", device, rows)
        rows.append(measure_parts(case, device, memory_format))
        print(rows[-1], flush=True)
        write(options.out, "tangents", device, rows)
        if options.profile:
            profile(case, device, memory_format)
    show("Ways to compute tangents", rows)


HELD = ("held_statistics_and_gradient", "held_statistics")

if __name__ == "__main__":
    main()
