"""A whole training on CIFAR-10 through ``soseleto.fit``, against ordinary training in plain PyTorch.

    python benchmarks/end_to_end.py [--epochs 60] [--limit N] [--only NAME ...] [--out FILE] [--check]

Quick, 5,000 clean target images, the other 45,000 with 40 % of their labels flipped as the source, batches of 256 and
32, SGD with momentum and a linearly falling learning rate. All five trainings use the same source batch size and number
of steps; only SOSELETO reads the target and computes alignments and weights. ``ratio`` is seconds over those of the
plain loop on tensors on the device. Reading the images from disk is not timed; everything after it is, and the test
accuracy shows that the model was trained. SOSELETO_DATA is the data folder; ``--made-up`` uses as many random images
instead: the work is the same, the accuracy is meaningless.
``--check``: on a GPU, with all of the data, 60 epochs of SOSELETO take at most 15 s.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from common import arguments, layout, show, write
from experiments.data import load
from soseleto import Compute, Soseleto, fit
from soseleto.data import Examples, Preprocess, symmetric
from soseleto.methods import Ordinary
from soseleto.models.architectures import quick
from soseleto.schedules import linear
from soseleto.task.losses import Precision
from soseleto.task.optimizers import sgd

BATCH, TARGET_BATCH = 256, 32
EPOCHS = 60
LR, WEIGHT_DECAY = 0.01, 5e-4
NOISE = 0.4
AT_MOST_SECONDS = 15.0
PLAIN_ON_DEVICE = "plain PyTorch, tensors on the device"


@dataclass(frozen=True)
class Sides:
    source: Examples
    target: Examples
    test: Examples


def cifar10(limit: int | None) -> Sides:
    """CIFAR-10; a tenth of the training images is the clean target."""
    train, test = load("cifar10", "train"), load("cifar10", "test")
    if limit is not None:
        train, test = train.subset(range(min(limit, len(train)))), test.subset(range(min(limit, len(test))))
    return split(train, test)


def made_up(n: int) -> Sides:
    """Random bytes of CIFAR-10's shape: the work is the same, the accuracy is meaningless."""
    images, labels = torch.randint(0, 256, (n, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (n,))
    return split(Examples(images, labels), Examples(images, labels))


def split(train: Examples, test: Examples) -> Sides:
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    target, source = order.tensor_split([len(train) // 10])
    noisy = symmetric(train.labels[source], NOISE, classes=10, seed=0).labels
    return Sides(Examples(train.inputs[source], noisy), train.subset(target), test)


@dataclass(frozen=True)
class Form:
    """Precision and memory format of the network, the same in all trainings."""

    precision: torch.dtype | None = None
    memory_format: torch.memory_format = torch.contiguous_format

    @property
    def name(self) -> str:
        last = self.memory_format == torch.channels_last
        return ("fp32" if self.precision is None else "bf16") + (", channels last" if last else "")

    def model(self) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return quick().to(memory_format=self.memory_format)  # type: ignore[call-overload, no-any-return]


def through_fit(sides: Sides, epochs: int, device: torch.device, method: Any, form: Form) -> nn.Module:
    return fit(
        form.model(),
        sides.source,
        sides.target,
        epochs=epochs,
        batch_size=min(BATCH, len(sides.source)),
        target_batch_size=min(TARGET_BATCH, len(sides.target)),
        optimizer=partial(sgd, lr=LR, weight_decay=WEIGHT_DECAY),
        method=method,
        compute=Compute(dtype=form.precision),
        device=device,
    ).model


def with_loader(sides: Sides, epochs: int, device: torch.device, form: Form) -> nn.Module:
    """Plain PyTorch with a DataLoader."""
    inputs = Preprocess.of(sides.source.inputs)(sides.source.inputs)
    loader = DataLoader(
        TensorDataset(inputs, sides.source.labels), BATCH, shuffle=True, pin_memory=device.type == "cuda"
    )

    def batches() -> Iterable[tuple[Tensor, Tensor]]:
        for x, y in loader:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)

    return train_plainly(batches, epochs, len(loader), device, form)


def with_tensors(sides: Sides, epochs: int, device: torch.device, form: Form) -> nn.Module:
    """Plain PyTorch with all data on the device from the start."""
    inputs = Preprocess.of(sides.source.inputs)(sides.source.inputs.to(device))
    labels = sides.source.labels.to(device)

    def batches() -> Iterable[tuple[Tensor, Tensor]]:
        for index in torch.randperm(len(inputs), device=device).split(BATCH):
            yield inputs[index], labels[index]

    return train_plainly(batches, epochs, -(-len(inputs) // BATCH), device, form)


def train_plainly(
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    epochs: int,
    steps_an_epoch: int,
    device: torch.device,
    form: Form,
) -> nn.Module:
    net, precision = form.model().to(device).train(), Precision(form.precision)
    optimizer = partial(sgd, lr=LR, weight_decay=WEIGHT_DECAY)(net.parameters())
    schedule = linear(optimizer, epochs * steps_an_epoch)
    for _ in range(epochs):
        for x, y in batches():
            optimizer.zero_grad()
            F.cross_entropy(precision(net, x), y).backward()
            optimizer.step()
            schedule.step()
    return net


def contenders(sides: Sides, epochs: int, device: torch.device, form: Form) -> dict[str, Callable[[], nn.Module]]:
    return {
        "soseleto.fit": lambda: through_fit(sides, epochs, device, Soseleto(), form),
        "soseleto.fit, its usual method": lambda: through_fit(sides, epochs, device, None, form),
        "soseleto.fit, ordinary training": lambda: through_fit(sides, epochs, device, Ordinary(), form),
        "plain PyTorch, DataLoader": lambda: with_loader(sides, epochs, device, form),
        PLAIN_ON_DEVICE: lambda: with_tensors(sides, epochs, device, form),
    }


def warm_up(sides: Sides, device: torch.device, form: Form) -> None:
    """A few untimed steps of each training, to initialise the device and load kernels."""
    few = split(*(side.subset(range(min(2 * BATCH, len(side)))) for side in (sides.source, sides.test)))
    for run in contenders(few, 4, device, form).values():
        run()


def measure(
    sides: Sides, epochs: int, device: torch.device, form: Form, only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    steps = epochs * -(-len(sides.source) // BATCH)
    runs = {k: run for k, run in contenders(sides, epochs, device, form).items() if not only or k in only}
    rows = [timed(name, run, steps, sides, device) for name, run in runs.items()]
    base = next((row["seconds"] for row in rows if row["training"] == PLAIN_ON_DEVICE), None)
    return [{**row, "ratio": None if base is None else row["seconds"] / base} for row in rows]


def timed(name: str, run: Callable[[], nn.Module], steps: int, sides: Sides, device: torch.device) -> dict[str, Any]:
    start = time.perf_counter()
    trained = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return {
        "training": name,
        "source": len(sides.source),
        "steps": steps,
        "seconds": seconds,
        "steps/s": steps / seconds,
        "accuracy": accuracy(trained, sides, device),
    }


@torch.no_grad()
def accuracy(net: nn.Module, sides: Sides, device: torch.device) -> float:
    prepare = Preprocess.of(sides.source.inputs)
    net.eval()
    right = sum(
        int((net(prepare(x.to(device))).argmax(1) == y.to(device)).sum())
        for x, y in zip(sides.test.inputs.split(1000), sides.test.labels.split(1000), strict=True)
    )
    return 100.0 * right / len(sides.test)


def main(argv: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--limit", type=int, help="maximum number of CIFAR-10 images")
    parser.add_argument("--tiny", action="store_true", help="a few random images, to test that it runs")
    parser.add_argument("--made-up", action="store_true", help="50,000 random images instead of CIFAR-10")
    parser.add_argument("--bf16", action="store_true", help="autocast to bfloat16 in all trainings")
    parser.add_argument("--only", nargs="+", default=[], help="these trainings only, by their names in the table")
    options = parser.parse_args(argv)
    device = torch.device(options.device)
    whole = device.type == "cuda" and options.epochs == EPOCHS and options.limit is None and not options.tiny
    if options.check and not whole:
        parser.error(f"--check needs the whole run on a GPU: leave out --limit and --tiny, and say --epochs {EPOCHS}")
    torch.manual_seed(0)
    form = Form(torch.bfloat16 if options.bf16 else None, layout(options.channels_last))
    if options.tiny or options.made_up:
        sides = made_up(options.limit or (128 if options.tiny else 50_000))
    else:
        sides = cifar10(options.limit)
    if not options.tiny:
        warm_up(sides, device, form)
    rows = [{**row, "form": form.name} for row in measure(sides, options.epochs, device, form, options.only)]
    if options.tiny or options.made_up:
        rows = [{**row, "accuracy": None} for row in rows]
    show(f"A whole training, {options.epochs} epochs", rows)
    write(options.out, "end_to_end", device, rows)
    late = [row for row in rows if row["training"] == "soseleto.fit" and row["seconds"] > AT_MOST_SECONDS]
    if options.check and late:
        raise SystemExit(f"soseleto.fit took {late[0]['seconds']:.1f} s, more than {AT_MOST_SECONDS:g} s")


if __name__ == "__main__":
    main()
