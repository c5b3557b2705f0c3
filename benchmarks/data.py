"""Throughput of batch preparation, against a plain torch DataLoader and against decoding alone, in the same run.

    python benchmarks/data.py [--jpegs 20000] [--out FILE] [--check]

Thresholds that --check asserts: CIFAR-10 batches of 256 with crop and flip at least 10x a plain DataLoader on the CPU
(with its default of no workers; one worker per core is shown too); on a GPU, making a batch at most 5 % of a training
step of Quick; for a folder of JPEGs, the first epoch at most 1.2x decoding alone on all cores, later epochs at most
1.2x an array in memory.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from experiments.data import load
from soseleto.data import Augment, Examples, Preprocess, Reading, as_examples, feed, source_batches

BATCH = 256
CROP = 4
SIDE = 64  # of decoded JPEGs
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Plain(Dataset[Any]):
    """The usual Dataset: one example at a time, padded, cropped, flipped, standardised."""

    def __init__(self, examples: Examples, preprocess: Preprocess) -> None:
        self.images, self.labels = examples.inputs, examples.labels
        self.mean = torch.tensor(preprocess.mean).view(3, 1, 1)
        self.std = torch.tensor(preprocess.std).view(3, 1, 1)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, at: int) -> Any:
        image = F.pad(self.images[at], (CROP, CROP, CROP, CROP))
        top, left = torch.randint(0, 2 * CROP + 1, (2,)).tolist()
        image = image[:, top : top + 32, left : left + 32]
        if torch.rand(()) < 0.5:
            image = image.flip(2)
        return (image.float() / 255 - self.mean) / self.std, self.labels[at]


def cifar_like(root: str | None) -> Examples:
    """CIFAR-10 if it is there, otherwise random bytes of its shape: the work is the same."""
    try:
        return load("cifar10", "train", root)
    except ValueError:
        images = torch.randint(0, 256, (50000, 3, 32, 32), dtype=torch.uint8)
        return Examples(images, torch.randint(0, 10, (50000,)))


def batches_per_second(batches: Iterable[Any], count: int, *, skip: int = 3) -> float:
    """Batches per second, without the first ``skip``."""
    stream = iter(batches)
    for _ in range(skip):
        next(stream)
    start = time.perf_counter()
    for _ in range(count):
        next(stream)
    return count / (time.perf_counter() - start)


def epoch_of(examples: Examples, epoch: int, preprocess: Preprocess) -> Iterable[Any]:
    order = source_batches(len(examples), BATCH, seed=0, epoch=epoch, device=examples.device)
    return feed(examples, order, seed=0, epoch=epoch, augment=Augment(crop=CROP, flip=True), prepare=preprocess)


def on_cpu(examples: Examples, preprocess: Preprocess) -> list[dict[str, Any]]:
    def plain(workers: int) -> float:
        loader = DataLoader(Plain(examples, preprocess), BATCH, shuffle=True, num_workers=workers, drop_last=True)
        return batches_per_second(loader, 30 if workers else 15)

    ours = max(batches_per_second(epoch_of(examples, e, preprocess), 160, skip=16) for e in range(3))
    alone, workers = plain(0), plain(CORES)
    return [
        row("ours on the CPU", ours, "batches/s"),
        row("plain DataLoader, no workers", alone, "batches/s"),
        row(f"plain DataLoader, {CORES} workers", workers, "batches/s"),
        row("ours against the plain DataLoader", ours / alone, "x", at_least=10.0),
    ]


def seconds_per(step: Callable[[], Any], count: int) -> float:
    for _ in range(20):
        step()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


def on_gpu(examples: Examples, preprocess: Preprocess) -> list[dict[str, Any]]:
    """Against a plain training step (forward, backward, SGD with momentum), which is cheaper than any method's."""
    from soseleto.models.architectures import quick

    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda")
    examples = examples.to(device)
    model = quick().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def train(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()

    stream = endless(examples, preprocess)
    fixed = next(stream)
    step = min(seconds_per(lambda: train(fixed.inputs, fixed.labels), 300) for _ in range(3))
    prepare = min(seconds_per(lambda: next(stream), 480) for _ in range(3))
    both = min(seconds_per(lambda: train_next(train, stream), 320) for _ in range(3))
    return [
        row("GPU: a training step of Quick on a ready batch", 1e6 * step, "µs"),
        row("GPU: making a batch", 1e6 * prepare, "µs"),
        row("GPU: a step and its batch", 1e6 * both, "µs"),
        row("GPU: making a batch against a step", 100 * prepare / step, "%", at_most=5.0),
    ]


def endless(examples: Examples, preprocess: Preprocess) -> Any:
    epoch = 0
    while True:
        yield from epoch_of(examples, epoch, preprocess)
        epoch += 1


def train_next(train: Callable[..., None], stream: Any) -> None:
    batch = next(stream)
    train(batch.inputs, batch.labels)


def make_jpegs(folder: Path, count: int) -> None:
    """Images of 320 x 240 with fine detail, ten classes; 400 different images, but no two files with the same bytes."""
    for c in range(10):
        (folder / f"class{c}").mkdir(parents=True)
    with multiprocessing.get_context("fork").Pool(CORES) as pool:
        images = pool.map(make_jpeg, range(min(count, 400)))
    for at in range(count):
        content = images[at % len(images)] + at.to_bytes(4, "big")  # after the end of the image
        (folder / f"class{at % 10}" / f"{at:06d}.jpg").write_bytes(content)


def make_jpeg(seed: int) -> bytes:
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (15, 20, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((320, 240), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = np.clip(smooth + random.integers(-6, 7, smooth.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=85)
    return file.getvalue()


def decode_alone(path: str) -> int:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)).size


def run_epoch(examples: Examples, preprocess: Preprocess, epoch: int) -> None:
    for _ in epoch_of(examples, epoch, preprocess):
        pass


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def jpeg_folder(count: int, work: Path) -> list[dict[str, Any]]:
    folder = work / "jpegs"
    make_jpegs(folder, count)
    files = [str(path) for path in sorted(folder.rglob("*.jpg"))]

    def alone() -> None:
        with multiprocessing.get_context("fork").Pool(CORES) as pool:
            pool.map(decode_alone, files, chunksize=64)

    def first() -> tuple[Examples, Preprocess]:
        read = as_examples(folder, name="source", reading=Reading(image_size=SIDE))
        statistics = Preprocess.of(read.inputs)
        run_epoch(read, statistics, 0)
        return read, statistics

    timed(alone)  # brings the files into the page cache for both
    tries = [(timed(alone)[0], *timed(first)) for _ in range(3)]  # in turns: other load affects both
    bare, first_epoch = min(one[0] for one in tries), min(one[1] for one in tries)
    examples, preprocess = tries[0][2]
    in_memory = Examples(examples.inputs.clone(), examples.labels)
    later = min(timed(lambda e=e: run_epoch(examples, preprocess, e))[0] for e in (1, 2, 3))
    array = min(timed(lambda e=e: run_epoch(in_memory, preprocess, e))[0] for e in (1, 2, 3))
    return [
        row(f"{count} JPEGs: decoding alone on {CORES} cores", bare, "s"),
        row(f"{count} JPEGs: read and first epoch", first_epoch, "s"),
        row("JPEGs: first epoch against decoding alone", first_epoch / bare, "x", at_most=1.2),
        row("JPEGs: a later epoch", later, "s"),
        row("JPEGs: a later epoch against an array in memory", later / array, "x", at_most=1.2),
    ]


def row(
    what: str, value: float, unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    limit = {"at_least": at_least} if at_least is not None else {"at_most": at_most} if at_most is not None else {}
    return {"what": what, "value": round(value, 3), "unit": unit, **limit}


def holds(one: dict[str, Any]) -> bool:
    return one["value"] >= one.get("at_least", -float("inf")) and one["value"] <= one.get("at_most", float("inf"))


def show(rows: list[dict[str, Any]]) -> None:
    for one in rows:
        limit = f">= {one['at_least']:g}" if "at_least" in one else f"<= {one['at_most']:g}" if "at_most" in one else ""
        verdict = ("  ok" if holds(one) else "  MISSED") if limit else ""
        print(f"{one['what']:<52} {one['value']:>12,.2f} {one['unit']:<10} {limit}{verdict}")


def machine() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": CORES,
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "system": platform.platform(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "numpy": np.__version__},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jpegs", type=int, default=20000, help="images in the folder; 0 leaves that part out")
    parser.add_argument("--data-root", help="folder of CIFAR-10; otherwise random bytes of its shape")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    parser.add_argument("--check", action="store_true", help="fail if a threshold is missed")
    options = parser.parse_args()
    examples = cifar_like(options.data_root)
    preprocess = Preprocess.of(examples.inputs)
    rows = on_cpu(examples, preprocess)
    if torch.cuda.is_available():
        rows += on_gpu(examples, preprocess)
    if options.jpegs:
        work = Path(tempfile.mkdtemp(prefix="soseleto-bench-"))
        try:
            rows += jpeg_folder(options.jpegs, work)
        finally:
            shutil.rmtree(work)
    show(rows)
    if options.out:
        options.out.write_text(json.dumps({"name": "data", **machine(), "rows": rows}, indent=1) + "\n")
    if options.check and not all(map(holds, rows)):
        raise SystemExit("a threshold was missed")


if __name__ == "__main__":
    main()
