"""How a step scales with batch size, model width, sequence length and the number of source examples.

    python benchmarks/scaling.py [--device cpu|cuda] [--small] [--only TABLE ...] [--out FILE] [--check]

The first three tables time our step and an ordinary step on the source batch (both as CUDA graphs on a GPU), and on a
GPU give the peak memory of our step and of an ordinary step on source and target examples together. The last one times
the only parts that depend on the number n of source examples: reading and updating the weights and scores of a batch of
256 (``Weights.rows`` and ``Weights.step``), each time at other indices across the whole source, and the summary, which
is computed once per epoch and therefore divided by its n/256 steps. ``--check``: at the largest n, 10⁸ unless the run
is tiny, both together take at most 1 % of our Quick step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from common import (
    Case,
    Encoder,
    arguments,
    as_graph,
    images,
    interleaved,
    ordinary_step,
    peak_mib,
    settle,
    show,
    task_for,
    tokens,
    write,
)
from soseleto.algorithm import Soseleto
from soseleto.models.architectures import group_norm, quick, resnet18
from soseleto.weights import Weights

AT_MOST_PERCENT = 1.0
UPDATE = "source examples"
PLACES = 64  # batches of indices, so that no update finds its weights in a cache


@dataclass(frozen=True)
class Sizes:
    """The values of each sweep, and the number of timings."""

    batches: tuple[int, ...]
    widths: tuple[int, ...]
    width_batch: int
    lengths: tuple[int, ...]
    layers: int
    encoder_width: int
    sequences: int
    examples: tuple[int, ...]
    update_batch: int
    rounds: int
    calls: int | None  # per turn; None: as many as fit in a fifth of a second
    images: Callable[[int], Tensor] = images


FULL = Sizes(
    batches=(64, 128, 256, 512, 1024, 2048),
    widths=(16, 32, 64, 128),
    width_batch=256,
    lengths=(64, 128, 256, 512, 1024),
    layers=6,
    encoder_width=512,
    sequences=64,
    examples=(10**4, 10**5, 10**6, 10**7, 10**8),
    update_batch=256,
    rounds=5,
    calls=None,
)
SMALL = Sizes(
    batches=(32, 64, 128, 256),
    widths=(8, 16, 32),
    width_batch=32,
    lengths=(32, 64, 128),
    layers=2,
    encoder_width=128,
    sequences=32,
    examples=FULL.examples,
    update_batch=FULL.update_batch,
    rounds=3,
    calls=1,
)
TINY = Sizes(
    batches=(8, 16),
    widths=(2, 4),
    width_batch=8,
    lengths=(4, 8),
    layers=1,
    encoder_width=64,
    sequences=8,
    examples=(10**4, 10**5),
    update_batch=8,
    rounds=1,
    calls=1,
    images=lambda n: images(n)[:, :, ::2, ::2].contiguous(),
)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--small", action="store_true", help="smaller models and batches: minutes on a CPU")
    parser.add_argument("--tiny", action="store_true", help="toy sizes, to test that it runs")
    parser.add_argument("--only", nargs="+", default=[], help="these tables only, by the beginning of their titles")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    sizes = TINY if options.tiny else SMALL if options.small else FULL
    torch.manual_seed(0)
    rows: list[dict[str, Any]] = []
    wanted = tuple(options.only) or ("",)
    for title, swept in sweeps(sizes).items():
        if not title.startswith(wanted):
            continue
        part = [{"against": title, **step_row(size, case, device, sizes)} for size, case in swept.items()]
        show(f"A step against {title}", part)
        rows += part
        write(options.out, "scaling", device, rows)  # after every table, in case the run is interrupted
    if not UPDATE.startswith(wanted):
        return
    part = [{"against": UPDATE, **row} for row in update_rows(device, sizes)]
    show("The update of weights and scores against source examples", part)
    rows += part
    write(options.out, "scaling", device, rows)
    if options.check and rows[-1]["share %"] > AT_MOST_PERCENT:
        raise SystemExit(
            f"the update at {rows[-1]['size']:,} examples takes {rows[-1]['share %']:.2f} % of a Quick step, "
            f"more than {AT_MOST_PERCENT:g} %"
        )


def sweeps(sizes: Sizes) -> dict[str, dict[int, Case]]:
    b, sequences = sizes.width_batch, sizes.sequences
    return {
        "batch size (Quick)": {n: quick_case(n, sizes) for n in sizes.batches},
        "model width (ResNet-18, GroupNorm)": {
            width: Case(
                "ResNet-18", lambda width=width: resnet18(width=width, norm=group_norm), b, b // 8, sizes.images
            )
            for width in sizes.widths
        },
        "sequence length (transformer)": {
            length: Case(
                "transformer",
                lambda: Encoder(sizes.layers, sizes.encoder_width),
                sequences,
                sequences // 8,
                tokens(length),
            )
            for length in sizes.lengths
        },
    }


def quick_case(batch: int, sizes: Sizes) -> Case:
    side = sizes.images(1).shape[-1]
    return Case("Quick", lambda: quick(size=side), batch, batch // 8, sizes.images)


def step_row(size: int, case: Case, device: torch.device, sizes: Sizes) -> dict[str, Any]:
    ours, plain, engine = steps(case, device)
    both = plain_step(case, device, case.source + case.target)
    peaks = peak_mib(ours, device), peak_mib(both, device)
    seconds = interleaved(
        {"ours": as_graph(ours, device), "ordinary": as_graph(plain, device)},
        device,
        rounds=sizes.rounds,
        calls=sizes.calls,
    )
    return {
        "size": size,
        "B": case.source,
        "T": case.target,
        "engine": engine,
        "ordinary ms": seconds["ordinary"] * 1e3,
        "ours ms": seconds["ours"] * 1e3,
        "times": seconds["ours"] / seconds["ordinary"],
        "µs an example": seconds["ours"] * 1e6 / case.source,
        "ours MiB": peaks[0],
        "ordinary MiB": peaks[1],
    }


def steps(case: Case, device: torch.device) -> tuple[Callable[[], object], Callable[[], object], str]:
    """Our step, an ordinary step, and the engine that ours chose (and verified) in its first steps."""
    method = Soseleto()
    state = method.init(task_for(case, case.make().to(device).train(), case.source, device))
    source, target = case.batch(case.source, device), case.batch(case.target, device)
    settle(lambda: method.step(state, source, target), state.engine)
    return lambda: method.step(state, source, target), plain_step(case, device, case.source), state.engine.name


def plain_step(case: Case, device: torch.device, n: int) -> Callable[[], object]:
    step, batch = ordinary_step(case, case.make().to(device).train()), case.batch(n, device)
    return lambda: step(batch)


def update_rows(device: torch.device, sizes: Sizes) -> list[dict[str, Any]]:
    ours, plain, _ = steps(quick_case(sizes.update_batch, sizes), device)
    contenders = {"ours": as_graph(ours, device), "ordinary": as_graph(plain, device)}
    return [update_row(n, contenders, device, sizes) for n in sizes.examples]


def update_row(
    n: int, contenders: dict[str, Callable[[], object]], device: torch.device, sizes: Sizes
) -> dict[str, Any]:
    """Timed in turns with the Quick steps it is compared with."""
    weights = Weights(n, device=device)
    update = as_graph(many_updates(weights, sizes.update_batch, device), device)
    seconds = interleaved({**contenders, "update": update}, device, rounds=sizes.rounds, calls=sizes.calls)
    once = interleaved({"summary": weights.summary}, device, rounds=min(3, sizes.rounds), calls=1)["summary"]
    each, spread = seconds["update"] / PLACES, once * sizes.update_batch / n
    return {
        "size": n,
        "MB": 12 * n / 1e6,
        "update µs": each * 1e6,
        "summary ms": once * 1e3,
        "summary µs a step": spread * 1e6,
        "Quick step µs": seconds["ours"] * 1e6,
        "share %": 100 * (each + spread) / seconds["ours"],
        "share of an ordinary step %": 100 * (each + spread) / seconds["ordinary"],
    }


def many_updates(weights: Weights, batch: int, device: torch.device) -> Callable[[], object]:
    """Reading and updating the weights of PLACES batches, one after the other."""
    batches = [places(len(weights), batch, device) for _ in range(PLACES)]
    change, alignment = torch.randn(2, batch, device=device) * 0.1

    def run() -> None:
        for index in batches:
            weights.step(index, change, alignment, weights.rows(index))

    return run


def places(n: int, batch: int, device: torch.device) -> Tensor:
    """A batch of distinct indices spread over the whole source, in random order."""
    stride = n // batch
    index = torch.arange(batch) * stride + torch.randint(stride, (batch,))
    return index[torch.randperm(batch)].to(device)


if __name__ == "__main__":
    main()
