"""The public data sets: the paths of their files, and how each split is read."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from experiments.public.cifar import LABEL_SETS, read_binary, read_human, read_python
from experiments.public.idx import read_idx
from experiments.public.mat import read_mat
from soseleto.data.examples import Examples
from soseleto.errors import DataError, UsageError, did_you_mean

DIGITS = tuple("0123456789")
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NAMES = ("mnist", "cifar10", "cifar10n", "svhn")
SPLITS = ("train", "test")


def data_root(given: str | Path | None = None) -> Path:
    """``given``, else SOSELETO_DATA, else ~/.cache/soseleto/data."""
    chosen = given or os.environ.get("SOSELETO_DATA") or Path.home() / ".cache" / "soseleto" / "data"
    return Path(chosen).expanduser()


def load(name: str, split: str = "train", root: str | Path | None = None, *, label_set: str | None = None) -> Examples:
    """A split of a public data set, in its official order, as uint8 images.

    ``label_set`` is for "cifar10n" only: "worse_label" (the default), "aggre_label", "random_label1" to
    "random_label3" or "clean_label"; the clean labels are ``truth``. Its test split is that of CIFAR-10.
    """
    check_name(name)
    if split not in SPLITS:
        raise UsageError(f"split must be 'train' or 'test', got {split!r}{did_you_mean(split, SPLITS)}.")
    if label_set is not None and (name != "cifar10n" or split != "train"):
        raise UsageError(f"label_set is for the train split of cifar10n and has no effect on {name} {split}.")
    readers: dict[str, Callable[[Path, str], Examples]] = {"mnist": _mnist, "cifar10": _cifar10, "svhn": _svhn}
    if name == "cifar10n" and split == "train":
        return _cifar10n(data_root(root), label_set or "worse_label")
    return readers.get(name, _cifar10)(data_root(root), split)


def check_name(name: str) -> None:
    if name not in NAMES:
        hint = did_you_mean(name, NAMES)
        raise UsageError(f"there is no public data set {name!r}{hint}: choose from {', '.join(NAMES)}.")


@dataclass(frozen=True)
class Place:
    """One file: the paths it may have below the root, in order of preference."""

    names: tuple[str, ...]

    def find(self, root: Path) -> Path | None:
        return next((root / name for name in self.names if (root / name).is_file()), None)


def places(name: str, split: str) -> list[Place]:
    """The files a split needs."""
    if name == "mnist":
        first = "train" if split == "train" else "t10k"
        return [_mnist_place(first, "images", 3), _mnist_place(first, "labels", 1)]
    if name == "svhn":
        return [Place(tuple(f"{folder}{split}_32x32.mat" for folder in ("svhn/", "SVHN/", "")))]
    batches = [f"data_batch_{i}" for i in range(1, 6)] if split == "train" else ["test_batch"]
    made = [_cifar_place(batch) for batch in batches]
    return [*made, HUMAN] if name == "cifar10n" and split == "train" else made


HUMAN = Place(tuple(f"{folder}CIFAR-10_human.pt" for folder in ("cifar-10n/", "", "data/", "cifar-10-100n/data/")))


def _mnist_place(first: str, kind: str, sides: int) -> Place:
    stems = (f"{first}-{kind}-idx{sides}-ubyte", f"{first}-{kind}.idx{sides}-ubyte")
    folders = ("MNIST/raw/", "MNIST/", "mnist/", "")
    return Place(tuple(f + stem + end for f in folders for stem in stems for end in ("", ".gz")))


def _cifar_place(batch: str) -> Place:
    folders = ("", "cifar10/", "CIFAR10/", "cifar-10/")
    kinds = (f"cifar-10-batches-bin/{batch}.bin", f"cifar-10-batches-py/{batch}", f"{batch}.bin")
    return Place(tuple(folder + kind for kind in kinds for folder in folders))


def missing(name: str, split: str, root: Path) -> list[str]:
    """The paths of the files of a split that are missing below the root."""
    return [place.names[0] for place in places(name, split) if place.find(root) is None]


def _found(name: str, split: str, root: Path) -> list[Path]:
    absent = missing(name, split, root)
    if absent:
        raise DataError(
            f"{name} {split} is not complete below {root} ({', '.join(absent)} missing): type "
            f"soseleto data {name}, or set SOSELETO_DATA to the folder that has it."
        )
    return [found for place in places(name, split) if (found := place.find(root)) is not None]


def _examples(images: Any, labels: Any, classes: tuple[str, ...], truth: Any = None) -> Examples:
    images = np.ascontiguousarray(images)
    tensor = torch.from_numpy(images if images.flags.writeable else images.copy())
    return Examples(
        tensor,
        torch.from_numpy(np.asarray(labels).astype(np.int64)),
        classes=classes,
        truth=None if truth is None else torch.from_numpy(truth),
    )


def _mnist(root: Path, split: str) -> Examples:
    images_at, labels_at = _found("mnist", split, root)
    images, labels = read_idx(images_at), read_idx(labels_at)
    if images.ndim != 3 or labels.shape != (len(images),) or len(images) == 0 or labels.max() > 9:
        raise DataError(
            f"{images_at} has shape {images.shape} and {labels_at} {labels.shape}: they do not belong together "
            "as MNIST; fetch them again."
        )
    return _examples(images[:, None], labels, DIGITS)


def _cifar10(root: Path, split: str) -> Examples:
    read = [
        read_binary(path) if path.suffix == ".bin" else read_python(path) for path in _found("cifar10", split, root)
    ]
    images, labels = (np.concatenate(parts) for parts in zip(*read, strict=True))
    return _examples(images, labels, OBJECTS)


def _cifar10n(root: Path, label_set: str) -> Examples:
    if label_set not in LABEL_SETS:
        hint = did_you_mean(label_set, LABEL_SETS)
        raise UsageError(f"there is no label_set {label_set!r}{hint}: choose from {', '.join(LABEL_SETS)}.")
    human = _found("cifar10n", "train", root)[-1]
    clean = _cifar10(root, "train")
    labels = read_human(human)
    if len(clean) != 50000 or not np.array_equal(clean.labels.numpy(), labels["clean_label"]):
        raise DataError(f"the clean labels of {human} are not those of CIFAR-10 below {root}: fetch both again.")
    return Examples(
        clean.inputs,
        torch.from_numpy(labels[label_set].copy()),
        classes=OBJECTS,
        truth=clean.labels,
    )


def _svhn(root: Path, split: str) -> Examples:
    (path,) = _found("svhn", split, root)
    arrays = read_mat(path, ("X", "y"))
    images, labels = arrays["X"], arrays["y"].reshape(-1)
    if images.dtype != np.uint8 or images.shape != (32, 32, 3, len(labels)) or len(labels) == 0:
        raise DataError(f"{path} has X of shape {images.shape} and {len(labels)} labels: it is not SVHN.")
    if labels.min() < 1 or labels.max() > 10:
        raise DataError(f"{path} has labels outside 1 to 10: it is not SVHN.")
    return _examples(images.transpose(3, 2, 0, 1), labels % 10, DIGITS)  # the digit 0 is stored as 10
