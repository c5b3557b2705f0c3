"""Data that is read in every epoch, sets larger than memory, and runs on them that are killed and resumed.

    python benchmarks/large_data.py [--items 1000000] [--examples 100000000] [--kills 20]
                                    [--out FILE] [--check]

A part of size 0 is left out. Thresholds that --check asserts: an epoch over items of 3 kB at most 1.3x that of a plain
DataLoader with as many workers, with at most 300 MB more memory; the weights of 10^8 examples on disk, updated
in under 2 % of a Quick step and with less than 2 GB of memory; killed runs end bit-identical after a resume.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import soseleto
from common import cases as known_cases
from common import images, ordinary_step, task_for
from data import CORES, holds, machine, row, show, timed
from data_safety.compare import differences
from soseleto.data import LazyDataset, feed, source_batches
from soseleto.data.batches import Batch
from soseleto.weights import Weights

BATCH = 256
ITEM = 3072  # bytes
REPEATS = 5


class Rows(Dataset[Any]):
    """Items of 3 kB in a memory-mapped file."""

    def __init__(self, path: Path, count: int) -> None:
        self.rows = np.memmap(path, np.uint8, "r", shape=(count, ITEM))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, at: int) -> Any:
        return torch.from_numpy(self.rows[at].copy()), at % 10


def small_items(count: int, work: Path) -> list[dict[str, Any]]:
    path = work / "rows"
    with path.open("wb") as file:
        for first in range(0, count, 10_000):
            file.write(np.random.default_rng(first).bytes(ITEM * min(10_000, count - first)))
    dataset, workers = Rows(path, count), min(CORES, 8)
    lazy = LazyDataset(dataset, workers=workers)
    plain_loader = DataLoader(dataset, BATCH, shuffle=True, num_workers=workers, persistent_workers=True)

    def plain() -> None:
        for _ in plain_loader:
            pass

    def ours(epoch: int) -> None:
        for _ in feed(lazy, source_batches(count, BATCH, seed=0, epoch=epoch), seed=0, epoch=epoch):
            pass

    plain()  # starts the workers, and brings the file into the page cache for both
    ours(0)
    times = [(timed(plain)[0], timed(lambda at=at: ours(at))[0]) for at in range(1, 1 + REPEATS)]
    bare, mine = (min(each) for each in zip(*times, strict=True))
    with peak_memory() as with_plain:
        plain()
    with peak_memory() as with_ours:
        ours(9)
    return [
        row(f"{count:,} items of 3 kB: a plain DataLoader, {workers} workers", bare, "s"),
        row("items: an epoch of ours", mine, "s"),
        row("items: ours against the DataLoader", mine / bare, "x", at_most=1.3),
        row("items: extra memory", max(0.0, with_ours[0] - with_plain[0]), "MB", at_most=300.0),
    ]


def many_examples(count: int) -> list[dict[str, Any]]:
    """Weights of ``count`` examples, read and moved for the batches of an epoch that is shuffled without a table."""
    before = used_memory(mapped=True)
    weights = Weights(count)
    batches = source_batches(count, BATCH, seed=0, epoch=1)
    change = torch.full((BATCH,), -0.01)

    def step(at: int) -> None:
        index = batches[at]
        rows = weights.rows(index)
        weights.step(index, change[: len(index)], change[: len(index)], rows)

    for at in range(50):
        step(at)
    seconds, _ = timed(lambda: [step(at) for at in range(50, 1050 if len(batches) > 1050 else len(batches))])
    each = seconds / max(1, min(1000, len(batches) - 50))
    memory = used_memory(mapped=True) - before
    quick = seconds_of_quick()
    return [
        row("examples: indices, weights and their update, a step", 1e6 * each, "µs"),
        row("examples: a step of Quick", 1e6 * quick, "µs"),
        row("examples: update against a step of Quick", 100 * each / quick, "%", at_most=2.0),
        row("examples: memory, mapped pages included", memory, "MB", at_most=2000.0),
    ]


def seconds_of_quick() -> float:
    """A plain training step of Quick with a batch of 256, on this machine's CPU."""
    cpu = torch.device("cpu")
    case = next(case for case in known_cases(cpu, full=True) if case.name == "Quick")
    model = case.make()
    task_for(case, model, BATCH, cpu)
    batch = Batch(torch.arange(BATCH), images(BATCH), torch.arange(BATCH) % 10)
    step = ordinary_step(case, model)
    step(batch)
    return min(timed(lambda: step(batch))[0] for _ in range(3))


# Killed runs


class Augmented(Dataset[Any]):
    """Points with noise from the global generators, slow enough to be killed while workers read."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, at: int) -> Any:
        time.sleep(0.0005)
        noise = torch.randn(4) * 0.1 + float(np.random.rand()) + random.random()  # noqa: NPY002
        return torch.arange(4) * (at % 3) / 3 + noise, at % 3


class Net(nn.Linear):
    """Drops some numbers of the points at random."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(nn.functional.dropout(input, 0.2, self.training))


def train(out: Path) -> None:
    torch.manual_seed(0)
    target = (torch.randn(30, 4), torch.arange(30) % 3)
    soseleto.fit(
        Net(4, 3), LazyDataset(Augmented(), workers=2), target, epochs=3, batch_size=16, lr=0.05, out=out,
        device="cpu", checkpoints=soseleto.Checkpoints(seconds=0),
    )  # fmt: skip


def kills(count: int, work: Path, *, seed: int = 0) -> list[dict[str, Any]]:
    draw, wrong, killed = random.Random(seed), 0, 0
    whole = work / "whole"
    begin = time.perf_counter()
    assert ended(started(whole)) == 0
    seconds = time.perf_counter() - begin
    for at in range(count):
        out = work / str(at)
        process = started(out)
        time.sleep(draw.uniform(0.2, 0.95) * seconds)
        os.kill(process, signal.SIGKILL)
        killed += ended(process) == -signal.SIGKILL
        again = ended(started(out))
        wrong += again not in (0, 2) or bool(differences(out, whole))  # 2: the run had ended
        shutil.rmtree(out)
    return [
        row(f"{count} runs with workers: killed", killed, "runs"),
        row("killed and resumed: not bit-identical", wrong, "runs", at_most=0.0),
    ]


def started(out: Path) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        torch.set_num_threads(1)
        train(out)
        code = 0
    except soseleto.UsageError as error:  # as for a run that had ended
        code = 2
        print(error, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


# Memory


def used_memory(*, mapped: bool = False) -> float:
    """MB of this process and its workers that are not file pages; ``mapped`` counts those of mapped files too."""
    total = 0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:  # it has ended
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines}
        total += sizes["Pss"] if mapped else sizes["Pss_Anon"] + sizes["Pss_Shmem"]
    return total / 1024


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """The largest use of memory inside, as the only entry of the list."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.05):
            peak[0] = max(peak[0], used_memory())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peak
    finally:
        done.set()
        thread.join()
        peak[0] = max(peak[0], used_memory())


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=10**6, metavar="N", help="items of 3 kB")
    parser.add_argument("--examples", type=int, default=10**8, metavar="N", help="source examples with weights")
    parser.add_argument("--kills", type=int, default=20, metavar="N", help="killed runs")
    parser.add_argument("--work", type=Path, help="folder for the data, removed afterwards; default: a temporary one")
    parser.add_argument("--out", type=Path, help="write the numbers to this JSON file")
    parser.add_argument("--check", action="store_true", help="fail if a threshold is missed")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []
    parts: list[tuple[int, Callable[[Path], list[dict[str, Any]]]]] = [
        (options.kills, lambda work: kills(options.kills, work)),
        (options.items, lambda work: small_items(options.items, work)),
        (options.examples, lambda work: many_examples(options.examples)),
    ]
    for size, part in parts:
        if size:
            work = Path(tempfile.mkdtemp(prefix="soseleto-bench-", dir=options.work))
            try:
                rows += part(work)
            finally:
                shutil.rmtree(work)
    show(rows)
    if options.out:
        options.out.write_text(json.dumps({"name": "large_data", **machine(), "rows": rows}, indent=1) + "\n")
    if options.check and not all(map(holds, rows)):
        raise SystemExit("a threshold was missed")
    return rows


if __name__ == "__main__":
    main()
