"""A step of the strong recipe and of its rivals against an ordinary step of the same network, inside ``soseleto.fit``.

    python benchmarks/strong_step.py [--device cuda] [--only NAME ...] [--compiled] [--cudnn-benchmark]
        [--tiny] [--out FILE] [--check]

PreAct ResNet-18 on images of 32x32 pixels, 256 source and 64 trusted ones a step, bfloat16, channels last and CUDA
graphs on a GPU. An ordinary step trains on 256 cropped and mirrored images. Everything that an epoch does is timed:
batches, augmentation, the teacher, the step, and records. The first epoch, which records the graphs, is left out.
``--check``: a step of the strong recipe with one view and 32 trusted images takes at most 1.7 ordinary ones.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from common import arguments, show, write
from experiments.settings import DivideMix, FixMatch, ProMix
from soseleto import Compute, fit
from soseleto.data import Augment, StrongAugment, Views
from soseleto.methods import Mixed, Ordinary, Strong
from soseleto.models.architectures import preact_resnet18
from soseleto.schedules import linear
from soseleto.task.optimizers import sgd
from soseleto.training.options import Inputs

SOURCE, TARGET = 256, 64
FEWER = 32  # trusted images
STEPS, EPOCHS = 60, 4
AT_MOST = 1.7
WEAK = Augment(crop=4, flip=True)
CHECKED = "strong, one view, 32 trusted"
LINES: dict[str, tuple[Any, Any, int]] = {
    "ordinary": (Ordinary(), WEAK, TARGET),
    "mixed": (Mixed(), WEAK, TARGET),
    CHECKED: (Strong(), Views(count=1), FEWER),
    "strong, one view": (Strong(), Views(count=1), TARGET),
    "strong": (Strong(), Views(), TARGET),
    "FixMatch": (FixMatch(), Views(count=1, strong=StrongAugment(2)), TARGET),
    "DivideMix": (DivideMix(), Views(count=1, strong=StrongAugment(0, cutout=0.0)), TARGET),
    "ProMix": (ProMix(), Views(count=1, strong=StrongAugment(2)), TARGET),
}


def milliseconds(method: Any, augment: Any, target: int, options: Any) -> float:
    """Of a step: the median over the epochs after the first."""
    device = torch.device(options.device)
    b, t, steps, width = (16, target // 8, 2, 4) if options.tiny else (SOURCE, target, STEPS, 64)
    torch.manual_seed(0)
    model = preact_resnet18(width=width)
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    if options.compiled:
        model.compile()
    images = torch.randint(0, 256, (b * steps + 4 * t, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(len(images)) % 10
    trusted = slice(b * steps, None)
    result = fit(
        model,
        (images[: b * steps], labels[: b * steps]),
        (images[trusted], labels[trusted]),
        mode="noisy",
        epochs=EPOCHS,
        batch_size=b,
        target_batch_size=t,
        method=method,
        inputs=Inputs(augment=augment),
        optimizer=(partial(sgd, lr=0.01, weight_decay=5e-4, nesterov=True), linear),
        compute=Compute(dtype=torch.bfloat16 if device.type == "cuda" else None),
        device=device,
    )
    ends = [record["seconds"] for record in result.history]
    return 1e3 * statistics.median(end - begin for begin, end in pairwise(ends)) / steps


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="+", default=list(LINES), choices=list(LINES), metavar="NAME")
    parser.add_argument("--compiled", action="store_true", help="the network by torch.compile, in every line")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="the fastest convolutions, found by timing them")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to test that it runs")
    options = parser.parse_args(argv)
    torch.backends.cudnn.benchmark = options.cudnn_benchmark
    how = {"compiled": options.compiled, "cudnn.benchmark": options.cudnn_benchmark}
    ordinary = milliseconds(*LINES["ordinary"], options)
    rows = []
    for name in options.only:
        own = ordinary if name == "ordinary" else milliseconds(*LINES[name], options)
        rows.append({"line": name, **how, "ms a step": own, "times": own / ordinary})
    show("A step inside fit, PreAct ResNet-18", rows)
    write(options.out, "strong_step", torch.device(options.device), rows)
    if options.check and any(row["line"] == CHECKED and row["times"] > AT_MOST for row in rows):
        raise SystemExit(f"a step of the strong recipe takes more than {AT_MOST} ordinary ones")
    return rows


if __name__ == "__main__":
    main()
