"""``soseleto data NAME``: download a public data set from its official address and verify it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from experiments.public.archive import unpack
from experiments.public.download import ByteProgress, Patience, Remote, Unreachable, download
from experiments.public.sets import SPLITS, check_name, data_root, load, missing
from soseleto.errors import DataError

_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/")
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
_CIFAR = ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",)
_HUMAN = ("https://github.com/UCSC-REAL/cifar-10-100n/raw/main/data/CIFAR-10_human.pt",)
_BATCHES = tuple(
    f"cifar-10-batches-bin/{name}.bin" for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
)


@dataclass(frozen=True)
class File:
    """A file of a data set: its path below the root, its address, and its members if it is an archive."""

    path: str
    remote: Remote
    members: tuple[str, ...] = ()  # of an archive


def _mnist_file(name: str, md5: str, size: int) -> File:
    return File(f"MNIST/raw/{name}.gz", Remote(tuple(f"{base}{name}.gz" for base in _MNIST), md5, size))


_CIFAR10 = File("cifar-10-binary.tar.gz", Remote(_CIFAR, "c32a1d4ab5d03f1284b67883e8d87530", 170052171), _BATCHES)

FILES: Mapping[str, tuple[File, ...]] = MappingProxyType(
    {
        "mnist": (
            _mnist_file("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873", 9912422),
            _mnist_file("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432", 28881),
            _mnist_file("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3", 1648877),
            _mnist_file("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c", 4542),
        ),
        "cifar10": (_CIFAR10,),
        "cifar10n": (
            _CIFAR10,
            File("cifar-10n/CIFAR-10_human.pt", Remote(_HUMAN, "96644db5574813cae939af5f7f2a0aec", 2401007)),
        ),
        "svhn": (
            File(
                "svhn/train_32x32.mat",
                Remote((_SVHN + "train_32x32.mat",), "e26dedcc434d2e4c54c9b2d4a06d8373", 182040794),
            ),
            File(
                "svhn/test_32x32.mat",
                Remote((_SVHN + "test_32x32.mat",), "eb5a983be6a315427106f1b164d9cef3", 64275384),
            ),
        ),
    }
)

# Number of examples of each class, to verify a data set.
COUNTS: Mapping[tuple[str, str], tuple[int, ...]] = MappingProxyType(
    {
        ("mnist", "train"): (5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949),
        ("mnist", "test"): (980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009),
        ("cifar10", "train"): (5000,) * 10,
        ("cifar10", "test"): (1000,) * 10,
        ("svhn", "train"): (4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659),
        ("svhn", "test"): (1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595),
    }
)


def fetch(
    name: str,
    root: str | Path | None = None,
    *,
    progress: ByteProgress | None = None,
    patience: Patience | None = None,
    files: Mapping[str, tuple[File, ...]] = FILES,
) -> Path:
    """Download the missing files of a public data set; returns the root folder."""
    where = data_root(root)
    check_name(name)
    for file in files[name]:
        if not _needed(name, file, where):
            continue
        path = where / file.path
        try:
            download(file.remote, path, progress=progress, patience=patience)
        except Unreachable as error:
            raise DataError(_unreachable(name, file, where, str(error))) from error
        if file.members:
            unpack(path, where, file.members)
            path.unlink()
    return where


def main(name: str, root: str | Path | None = None, report: Callable[[str], None] = print) -> None:
    """Download the missing files, verify every split, and report each."""
    where = data_root(root)
    check_name(name)
    incomplete = [split for split in SPLITS if missing(name, split, where)]
    for split in SPLITS:
        if split not in incomplete:
            report(f"{name} {split}: {verify(name, split, where)} examples, verified, in {where}")
    if incomplete:
        report(f"{name}: fetching {' and '.join(incomplete)} into {where}")
        fetch(name, where, progress=_every_tenth(report))
    for split in incomplete:
        report(f"{name} {split}: {verify(name, split, where)} examples, verified, in {where}")


def verify(name: str, split: str, root: str | Path | None = None) -> int:
    """Read a split and compare its class counts with the official ones; returns the number of examples."""
    examples = load(name, split, root)
    official = COUNTS[("cifar10" if name == "cifar10n" else name, split)]
    labels = examples.labels if examples.truth is None else examples.truth
    counts = tuple(torch.bincount(labels, minlength=10).tolist())
    if counts != official:
        raise DataError(f"{name} {split} has class counts {counts}, not {official}: delete its files and fetch again.")
    return len(examples)


def _needed(name: str, file: File, root: Path) -> bool:
    """Whether any split lacks this file; a file in any known layout counts as present."""
    absent = {path for split in SPLITS for path in missing(name, split, root)}
    provided = set(file.members) or {file.path, file.path.removesuffix(".gz")}
    return bool(absent & provided)


def _unreachable(name: str, file: File, root: Path, why: str) -> str:
    what = f"unpack {file.remote.urls[0]} into {root}" if file.members else (
        f"save {file.remote.urls[0]} as {root / file.path}"
    )  # fmt: skip
    return f"{name} cannot be downloaded ({why}): {what}, or set SOSELETO_DATA to a folder that has it."


def _every_tenth(report: Callable[[str], None]) -> ByteProgress:
    """Report a line at every tenth of each file."""
    last: dict[str, int] = {}

    def progress(name: str, have: int, total: int | None) -> None:
        tenth = 10 * have // total if total else have >> 24
        if tenth > last.get(name, -1):
            last[name] = tenth
            share = f" ({10 * tenth} %)" if total else ""
            report(f"  {name}: {have / 1e6:.1f} MB{share}")

    return progress
