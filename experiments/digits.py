"""The data of Table 2: SVHN as source, 20 or 25 MNIST digits 5-9 as target, all images grey and 28x28."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.data import load
from experiments.experiment import Root, Sides
from soseleto.data import Examples, generator
from soseleto.errors import UsageError

SIDE = 28
FIRST_TARGET_DIGIT = 5
TARGET_CLASSES = ("5", "6", "7", "8", "9")
NAME = "svhn-mnist"
SCALES = {"svhn": (0.444, 0.175), "mnist": (0.1307, 0.3081)}  # mean and deviation in the authors' data_loader.py


@dataclass(frozen=True, kw_only=True)
class Digits(Sides):
    """The data of one run.

    useless: marks the source examples that are known to be of no use
    unlabelled: MNIST training digits 5-9 that are neither target nor held out; their labels serve evaluation only
    """

    unlabelled: Examples
    useless: Tensor | None = None


def prepare(
    source: str, n_target: int, *, seed: int, n_source: int | None, n_heldout: int, n_test: int | None, root: Root
) -> Digits:
    """Draw by the seed the target, held-out and useless images; the same for every method."""
    if n_target % len(TARGET_CLASSES):
        raise UsageError(f"n_target must be a multiple of {len(TARGET_CLASSES)}, got {n_target}: say 20 or 25.")
    train = mnist("train", root)
    chosen = one_of_each(train.labels, n_target // len(TARGET_CLASSES), seed)
    others = torch.ones(len(train), dtype=torch.bool).index_fill(0, chosen, False).nonzero().flatten()
    others = others[torch.randperm(len(others), generator=generator(seed, f"{NAME}/heldout"))]
    test = mnist("test", root)
    images, useless = SOURCES[source](seed, n_source, root)
    return Digits(
        source=images,
        target=train.subset(chosen),
        unlabelled=train.subset(others[n_heldout:]),
        heldout=train.subset(others[:n_heldout]) if n_heldout else None,
        test=test if n_test is None else test.subset(range(n_test)),
        useless=useless,
    )


def as_the_authors_load(digits: Digits) -> Digits:
    """Every domain by its own constants, as floats that nothing standardises further."""
    sides = {name: getattr(digits, name) for name in ("source", "target", "heldout", "test", "unlabelled")}
    scaled = {
        name: replace(side, inputs=(side.inputs.float() / 255.0 - mean) / deviation)
        for name, side in sides.items()
        for mean, deviation in [SCALES["svhn" if name == "source" else "mnist"]]
        if side is not None
    }
    return replace(digits, **scaled)


def one_of_each(labels: Tensor, per_class: int, seed: int) -> Tensor:
    """Indices of ``per_class`` examples of every class, drawn by the seed."""
    order = torch.randperm(len(labels), generator=generator(seed, f"{NAME}/target"))
    drawn = [order[labels[order] == c][:per_class] for c in labels.unique()]
    return torch.cat(drawn)


@lru_cache(maxsize=2)
def mnist(split: str, root: Root) -> Examples:
    """MNIST digits 5-9, labelled 0 to 4."""
    whole = load("mnist", split, root)
    digits = whole.subset(whole.labels >= FIRST_TARGET_DIGIT)
    return replace(digits, labels=digits.labels - FIRST_TARGET_DIGIT, classes=TARGET_CLASSES)


@lru_cache(maxsize=1)
def svhn(root: Root) -> Examples:
    """SVHN's training digits 0-9, grey and 28x28."""
    return small_and_grey(load("svhn", "train", root))


@lru_cache(maxsize=1)
def grey_cifar(root: Root) -> Examples:
    """CIFAR-10's training images, grey and 28x28."""
    return small_and_grey(load("cifar10", "train", root))


def small_and_grey(images: Examples) -> Examples:
    """Luminance (ITU-R 601), resized to 28x28 with antialiasing."""
    luminance = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    pieces = [
        F.interpolate((piece.float() * luminance).sum(1, keepdim=True), SIDE, mode="bilinear", antialias=True)
        for piece in images.inputs.split(4096)
    ]
    return replace(images, inputs=torch.cat(pieces).round_().clamp_(0, 255).to(torch.uint8))


def _some(examples: Examples, n: int | None, seed: int) -> Examples:
    """``n`` examples drawn by the seed, or all of them."""
    if n is None or n >= len(examples):
        return examples
    return examples.subset(torch.randperm(len(examples), generator=generator(seed, f"{NAME}/source"))[:n])


def digits(seed: int, n: int | None, root: Root, *, low: bool) -> tuple[Examples, Tensor | None]:
    """SVHN 0-9, or 0-4."""
    return _some(_low(root) if low else svhn(root), n, seed), None


def shuffled(seed: int, n: int | None, root: Root) -> tuple[Examples, Tensor | None]:
    """SVHN 0-4 with the labels of one half permuted within that half; examples whose label became wrong are useless."""
    clean, _ = digits(seed, n, root, low=True)
    half = torch.randperm(len(clean), generator=generator(seed, f"{NAME}/shuffled"))[: len(clean) // 2]
    dealt = half[torch.randperm(len(half), generator=generator(seed, f"{NAME}/dealt"))]
    labels = clean.labels.clone()
    labels[half] = clean.labels[dealt]
    return replace(clean, labels=labels, truth=clean.labels), labels != clean.labels


def with_grey_cifar(seed: int, n: int | None, root: Root) -> tuple[Examples, Tensor | None]:
    """One half SVHN 0-4, the other half grey CIFAR-10 images as ten further classes, which are useless."""
    half = (len(_low(root)) if n is None else n) // 2
    low, images = _some(_low(root), half, seed), _some(grey_cifar(root), half, seed)
    both = Examples(
        torch.cat([low.inputs, images.inputs]),
        torch.cat([low.labels, images.labels + len(low.classes)]),
        ids=tuple(f"svhn/{low.id_of(i)}" for i in range(half)) + tuple(f"cifar/{images.id_of(i)}" for i in range(half)),
        classes=low.classes + images.classes,
    )
    return both, torch.arange(2 * half) >= half


@lru_cache(maxsize=1)
def _low(root: Root) -> Examples:
    whole = svhn(root)
    low = whole.subset(whole.labels < FIRST_TARGET_DIGIT)
    return replace(low, classes=("0", "1", "2", "3", "4"))


SOURCES: Mapping[str, Callable[[int, int | None, Root], tuple[Examples, Tensor | None]]] = {
    "0-4": partial(digits, low=True),
    "0-9": partial(digits, low=False),
    "shuffled": shuffled,
    "grey-cifar": with_grey_cifar,
}
