"""Shared by the benchmarks: models, interleaved timing, and result files that name the machine."""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.results import commit
from soseleto.algorithm import Soseleto
from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.models.architectures import group_norm, quick, resnet18
from soseleto.pieces import (
    at_temperature,
    centred,
    chain,
    hold_when_vanished,
    last_layer,
    scale_by_rms,
    unit_length,
    whitened,
    without_own_error,
)
from soseleto.task.cuda_graph import as_if_recording
from soseleto.task.losses import NoisyLosses, Precision
from soseleto.task.optimizers import sgd
from soseleto.task.task import Task


class Encoder(nn.Module):
    """A standard transformer encoder that classifies sequences of tokens."""

    def __init__(self, layers: int = 6, width: int = 512, vocabulary: int = 1000, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, width // 64, 4 * width, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(1))


class Bottleneck(nn.Module):
    """The block of ResNet-50: 1x1, 3x3 and 1x1 convolutions with BatchNorm."""

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        after = 4 * inner
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.short: nn.Module = nn.Identity()
        if before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.end = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.body(x) + self.short(x))


def resnet50(classes: int = 10, width: int = 64) -> nn.Sequential:
    """ResNet-50 for images of 224x224, with BatchNorm."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    before = width
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for i in range(blocks):
            inner = width * 2**stage
            layers.append(Bottleneck(before, inner, 2 if stage and i == 0 else 1))
            before = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))


@dataclass(frozen=True)
class Case:
    """A model with its batch sizes and inputs, and the engine that computes its alignments."""

    name: str
    make: Callable[[], nn.Module]
    source: int
    target: int
    inputs: Callable[[int], Tensor]
    precision: torch.dtype | None = None
    engine: str = "auto"
    channels_last: bool = False  # always, whatever --channels-last says
    method: Soseleto | None = None  # instead of the default, with the engine

    def batch(self, n: int, device: torch.device) -> Batch:
        return Batch(torch.arange(n, device=device), self.inputs(n).to(device), torch.randint(10, (n,)).to(device))


def images(n: int) -> Tensor:
    return torch.randn(n, 3, 32, 32)


def photographs(n: int) -> Tensor:
    return torch.randn(n, 3, 224, 224)


def layout(channels_last: bool) -> torch.memory_format:
    return torch.channels_last if channels_last else torch.contiguous_format


def tokens(length: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randint(1000, (n, length))


def cases(device: torch.device, *, full: bool = False) -> list[Case]:
    """Full size on a GPU and with ``full``; otherwise smaller versions of the networks, for seconds on a CPU."""
    gpu = device.type == "cuda"
    full = full or gpu
    width = 64 if full else 16
    b, t = (256, 32) if full else (64, 8)
    found = [
        Case("Quick", quick, 256, 32, images),
        Case("ResNet-18 GroupNorm", lambda: resnet18(width=width, norm=group_norm), b, t, images),
        Case("ResNet-18 BatchNorm", lambda: resnet18(width=width), b, t, images),
        Case("transformer", lambda: Encoder() if full else Encoder(2, 128), 64, 8, tokens(256 if full else 64)),
    ]
    if gpu:
        found += [
            Case("Quick", quick, 256, 32, images, torch.bfloat16),
            Case("ResNet-18 GroupNorm", lambda: resnet18(norm=group_norm), b, t, images, torch.bfloat16),
            Case("transformer", Encoder, 64, 8, tokens(256), torch.bfloat16),
            Case("ResNet-18 GroupNorm, equal batches", lambda: resnet18(norm=group_norm), 256, 256, images),
        ]
    return found


def batch_norm_cases() -> list[Case]:
    """ResNets with BatchNorm in bf16 and channels last."""
    return [
        Case("ResNet-18 BatchNorm", resnet18, 256, 32, images, torch.bfloat16, channels_last=True),
        Case("ResNet-50 BatchNorm", resnet50, 256, 32, photographs, torch.bfloat16, channels_last=True),
    ]


def last_layer_cases() -> list[Case]:
    """ResNet-18 with BatchNorm in bf16 and channels last: weights and scores by last-layer alignments, no engine."""
    rest = (unit_length(), at_temperature(), without_own_error())
    weights = chain(last_layer(), scale_by_rms(), hold_when_vanished())
    scores = {
        ", last layer": None,
        ", last layer, scores centred": last_layer(centred(), *rest),
        ", last layer, scores whitened": last_layer(whitened(), *rest),
    }
    return [
        Case(
            f"ResNet-18 BatchNorm{name}",
            resnet18,
            256,
            32,
            images,
            torch.bfloat16,
            channels_last=True,
            method=Soseleto(alignment=weights, scores=form),
        )
        for name, form in scores.items()
    ]


def task_for(case: Case, model: nn.Module, n_source: int, device: torch.device) -> Task:
    return Task(
        model=model,
        losses=NoisyLosses(precision=Precision(case.precision)),
        n_source=n_source,
        steps=1000,
        shared=frozenset(trainable(model)),
        target_head=frozenset(),
        make_optimizer=partial(sgd, lr=1e-4, weight_decay=5e-4),
        device=device,
        guard=lambda side, losses, index: None,
    )


def ordinary_step(case: Case, model: nn.Module) -> Callable[[Batch], None]:
    """A plain PyTorch training step."""
    optimizer = partial(sgd, lr=1e-4, weight_decay=5e-4)(model.parameters())
    precision = Precision(case.precision)

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        F.cross_entropy(precision(model, batch.inputs), batch.labels).backward()
        optimizer.step()

    return step


def settle(step: Callable[[], object], engine: Any) -> None:
    """Take steps until none of the following twelve holds a proof of the engine, so that none is timed."""
    step()  # the engine is chosen here
    while engine.schedule is not None and engine.schedule.at <= engine.schedule.calls + 12:
        step()


def as_graph(step: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The step captured as a CUDA graph on a GPU, unchanged on other devices."""
    if device.type != "cuda":
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), as_if_recording():
        for _ in range(9):  # models may take another path than before, whose first eight steps can hold proofs
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def interleaved(
    runs: dict[str, Callable[[], object]],
    device: torch.device,
    *,
    rounds: int = 9,
    calls: int | None = None,
    warm_up: int = 3,
) -> dict[str, float]:
    """Median seconds per call; contenders are timed in turns, so that other load affects all of them.

    Without ``calls`` a turn takes about a fifth of a second, and at least three calls.
    """
    for run in runs.values():
        for _ in range(warm_up):
            run()
    if calls is None:
        slowest = max(_seconds(run, 1, device) for run in runs.values())
        calls = max(3, min(50, int(0.2 / slowest)))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(_seconds(run, calls, device))
    return {name: statistics.median(found) for name, found in times.items()}


def _seconds(run: Callable[[], object], calls: int, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def peak_mib(run: Callable[[], object], device: torch.device) -> float | None:
    """Peak memory of a call in MiB, above what was allocated before it (GPU only)."""
    if device.type != "cuda":
        return None
    run()
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - held) / 2**20


def machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    return {
        "device": name,
        "threads": torch.get_num_threads(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "commit": commit(),
    }


def arguments(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="write the numbers as JSON")
    parser.add_argument("--channels-last", action="store_true", help="channels-last weights in all models")
    parser.add_argument("--check", action="store_true", help="fail if a threshold is missed")
    return parser


def show(title: str, rows: list[dict[str, Any]]) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    table = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(column), *(len(line[i]) for line in table)) for i, column in enumerate(columns)]
    print(f"\n{title}")
    for line in [columns, ["-" * w for w in widths], *table]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)))


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def write(path: Path | None, name: str, device: torch.device, rows: list[dict[str, Any]]) -> None:
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"name": name, **machine(device), "rows": rows}, indent=1) + "\n")
