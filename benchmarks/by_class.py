"""How far the strong recipe should give every class mistakes of its own (``by_class``), on features of photos.

    python benchmarks/by_class.py --prepare FOLDER            # writes FOLDER/by_class.npz from $SOSELETO_DATA
    python benchmarks/by_class.py --data FOLDER [--processes 10] --out results/choose-by-class-cpu.json

A stand-in for a deep network that a CPU can train: EfficientNet-lite0's features of 12,000 training images of CIFAR-10,
and a network of two layers that is trained on them for 80 epochs, long enough to learn wrong labels by heart. A draw
has 300 trusted images, 2,000 to compare on and 9,700 in the source, whose labels are

    40 %         flipped to any other class
    asymmetric   40 % of five classes flipped to a similar one
    worst        CIFAR-10N's

Test images are not used. Rows that are in the file already are not repeated.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import soseleto
from common import arguments, is_in, rows_in, show, write
from experiments.cifar10_deep.experiment import asymmetric
from experiments.data import data_root, human_labels, load
from experiments.pretrained_images.experiment import configuration, features
from soseleto.data import FeatureViews, generator, symmetric
from soseleto.methods import Strong

FILE = "by_class.npz"
IMAGES = 12_000
NOISES = ("40 %", "asymmetric", "worst")
SHARES = (0.0, 0.25, 0.5, 1.0)
EPOCHS, WIDTH = 80, 256


def prepare(folder: Path, device: str) -> Path:
    """Write features, right labels and people's worst ones."""
    images = load("cifar10").subset(range(IMAGES))
    found = features(configuration("logistic_noisy", noise="worse_label"), torch.as_tensor(images.inputs), None, device)
    worst = np.asarray(human_labels(data_root())["worse_label"])[:IMAGES]
    folder.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(folder / FILE, x=found.half().numpy(), y=images.labels.numpy(), worst=worst)
    return folder / FILE


def made_up() -> dict[str, Tensor]:
    """Ten clouds in place of the features."""
    y = torch.arange(400) % 10
    x = torch.eye(10)[y] + 0.1 * torch.randn(400, 10, generator=generator(0, "by_class"))
    return {"x": x, "y": y, "worst": (y + (torch.arange(400) % 3 == 0)) % 10}


def read(folder: Path | None) -> dict[str, Tensor]:
    if folder is None:
        return made_up()
    with np.load(folder / FILE) as parts:
        return {name: torch.from_numpy(parts[name]) for name in ("x", "y", "worst")}


def noisy(noise: str, right: Tensor, worst: Tensor, seed: int) -> Tensor:
    if noise == "worst":
        return worst
    return symmetric(right, 0.4, classes=10, seed=seed).labels if noise == "40 %" else asymmetric(right, seed)


def row(noise: str, share: float, seed: int, folder: Path | None, epochs: int) -> dict[str, Any]:
    """One training: its accuracy on the images that it is compared on."""
    torch.set_num_threads(1)
    begin, data = time.perf_counter(), read(folder)
    x, y = data["x"].float(), data["y"]
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    order = torch.randperm(len(y), generator=generator(seed, "by_class/split"))
    trusted, compared, source = order.split([len(y) // 40, len(y) // 6, len(y) - len(y) // 40 - len(y) // 6])
    labels = noisy(noise, y[source], data["worst"][source], seed)
    result = trained((x[source], labels), (x[trusted], y[trusted]), Strong(by_class=share), epochs, seed)
    right = result.outputs(x[compared]).argmax(1) == y[compared]
    seconds = time.perf_counter() - begin
    return {
        **key_of(noise, share, seed),
        "accuracy": 100.0 * right.double().mean().item(),
        "seconds": round(seconds, 1),
    }


def trained(
    source: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor], method: Strong, epochs: int, seed: int
) -> soseleto.Result:
    """The network of two layers."""
    torch.manual_seed(seed)
    return soseleto.fit(
        nn.Sequential(nn.Linear(source[0].shape[1], WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)),
        source,
        target,
        recipe="strong",
        method=method,
        augment=FeatureViews(drop=0.3),
        epochs=epochs,
        batch_size=min(128, len(source[0])),
        target_batch_size=min(32, len(target[0])),
        lr=0.02,
        standardize=False,
        seed=seed,
        device="cpu",
    )


def key_of(noise: str, share: float, seed: int) -> dict[str, Any]:
    return {"noise": noise, "by_class": share, "seed": seed}


def main(argv: Sequence[str] | None = None) -> list[dict[str, Any]]:
    parser = arguments(__doc__ or "")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="write the features and end")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="with by_class.npz")
    parser.add_argument("--noise", nargs="+", default=list(NOISES), choices=NOISES, metavar="NAME")
    parser.add_argument("--shares", nargs="+", type=float, default=list(SHARES))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--tiny", action="store_true", help="made-up features, to test that it runs")
    options = parser.parse_args(argv)
    if options.prepare:
        print(prepare(options.prepare, options.device))
        return []
    if options.data is None and not options.tiny:
        parser.error("--data FOLDER is needed, or --prepare FOLDER to write it.")
    rows = rows_in(options.out)
    cells = [
        (noise, share, seed) for seed in range(options.seeds) for noise in options.noise for share in options.shares
    ]
    wanted = [cell for cell in cells if not is_in(rows, key_of(*cell))]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=context) as pool:
        work = [pool.submit(row, *cell, None if options.tiny else options.data, options.epochs) for cell in wanted]
        for number, one in enumerate(as_completed(work), 1):
            rows.append(one.result())
            write(options.out, "by_class", torch.device("cpu"), rows)
            print(f"{number} of {len(work)}: {rows[-1]}", flush=True)
    show("Accuracy by by_class", rows)
    return rows


if __name__ == "__main__":
    main()
