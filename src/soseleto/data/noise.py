"""Synthetic label noise: flips an exact number of labels and returns the mask of flipped ones.

Every function returns ``Noisy(labels, flipped)``: ``flipped`` is the boolean mask of the examples whose label has
changed, so ``labels[~flipped]`` are original. The random draws depend on the seed alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from soseleto.data.batches import generator
from soseleto.errors import UsageError


class Noisy(NamedTuple):
    labels: Tensor  # (N,) int64
    flipped: Tensor  # (N,) bool


def symmetric(labels: Tensor, rate: float, classes: int, seed: int) -> Noisy:
    """Exactly round(rate·N) examples get another label, drawn uniformly from the other classes.

    Some papers draw the new label from all classes, including the old one; their rate r corresponds to
    rate = r·(classes - 1)/classes here.

    >>> noisy, flipped = symmetric(torch.zeros(10, dtype=torch.int64), 0.4, classes=3, seed=0)
    >>> int(flipped.sum()), bool((noisy[flipped] > 0).all())
    (4, True)
    """
    labels = _checked(labels, rate, classes)
    random = generator(seed, "noise/symmetric")
    at = torch.randperm(len(labels), generator=random)[: round(rate * len(labels))]
    shift = torch.randint(1, classes, (len(at),), generator=random)
    return _flip(labels, at, (labels[at] + shift) % classes)


def pair_flip(labels: Tensor, rate: float, classes: int, seed: int) -> Noisy:
    """Exactly round(rate·N) examples get the next class: c becomes (c + 1) mod classes."""
    labels = _checked(labels, rate, classes)
    at = torch.randperm(len(labels), generator=generator(seed, "noise/pair"))[: round(rate * len(labels))]
    return _flip(labels, at, (labels[at] + 1) % classes)


def _flip(labels: Tensor, at: Tensor, new: Tensor) -> Noisy:
    noisy = labels.clone()
    noisy[at] = new
    return Noisy(noisy, noisy != labels)


def _checked(labels: Tensor, rate: float, classes: int) -> Tensor:
    labels = torch.as_tensor(labels).to("cpu")
    if labels.ndim != 1 or labels.dtype.is_floating_point or labels.dtype == torch.bool:
        raise UsageError(f"labels must be (N,) class indices, got {labels.dtype} of shape {tuple(labels.shape)}.")
    if not 0.0 <= rate <= 1.0:
        raise UsageError(f"rate must be between 0 and 1, got {rate!r}: for 40 % write 0.4.")
    if classes < 2:
        raise UsageError(f"classes must be at least 2, got {classes!r}.")
    labels = labels.to(torch.int64)
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise UsageError(
            f"labels range from {int(labels.min())} to {int(labels.max())}, outside 0 to {classes - 1}: "
            "set classes to the number of classes."
        )
    return labels
