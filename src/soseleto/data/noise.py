"""Synthetic label noise: flips an exact number of labels and returns the mask of flipped ones.

Every function returns ``Noisy(labels, flipped)``: ``flipped`` is the boolean mask of the examples whose label has
changed, so ``labels[~flipped]`` are original. The random draws depend on the seed alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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


def by_confusion(labels: Tensor, confusion: Any, seed: int) -> Noisy:
    """Relabel by a confusion matrix: row c holds the shares of the new labels among the examples of class c.

    The counts are exact: the n_c examples of class c are split as confusion[c]·n_c, rounded so that each row's counts
    sum to n_c (largest remainders first, ties to the lower class).
    """
    matrix = _checked_matrix(confusion)
    labels = _checked(labels, 0.0, len(matrix))
    noisy = labels.clone()
    for c in range(len(matrix)):
        members = (labels == c).nonzero().flatten()
        order = torch.randperm(len(members), generator=generator(seed, "noise/confusion", c))
        new = torch.repeat_interleave(torch.arange(len(matrix)), _split(matrix[c], len(members)))
        noisy[members[order]] = new
    return Noisy(noisy, noisy != labels)


def _flip(labels: Tensor, at: Tensor, new: Tensor) -> Noisy:
    noisy = labels.clone()
    noisy[at] = new
    return Noisy(noisy, noisy != labels)


def _split(shares: Tensor, count: int) -> Tensor:
    """``count`` split by shares into integers that sum to it (largest remainder method)."""
    exact = shares * count
    counts = exact.floor().to(torch.int64)
    first = torch.argsort(exact - counts, descending=True, stable=True)[: count - int(counts.sum())]
    counts[first] += 1
    return counts


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


def _checked_matrix(confusion: Any) -> Tensor:
    matrix = torch.as_tensor(confusion, dtype=torch.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 2:
        raise UsageError(f"confusion must be a square matrix, got shape {tuple(matrix.shape)}.")
    if not bool((matrix >= 0).all()) or not bool(((matrix.sum(1) - 1).abs() < 1e-6).all()):
        raise UsageError("confusion must hold shares of 0 or more, and every row must sum to 1.")
    return matrix / matrix.sum(1, keepdim=True)
