"""Batches of texts of similar length, padded to a few lengths, so that engines and CUDA graphs are reused."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from soseleto.data.batches import source_batches, source_order
from soseleto.data.randomness import generator

SHORTEST = 16
WINDOW = 50  # batches within which texts are sorted, as in the length-grouped sampler of transformers


def padded_length(tokens: int, most: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, ... that is at least ``tokens``; never above ``most``.

    >>> [padded_length(n, 100) for n in (3, 17, 33, 49, 70, 100)]
    [16, 24, 48, 64, 96, 100]
    """
    power = SHORTEST
    while power < tokens:
        if tokens <= power * 3 // 2:
            return min(power * 3 // 2, most)
        power *= 2
    return min(power, most)


def length_batches(padded: Tensor, size: int, *, seed: int, epoch: int) -> Sequence[Tensor]:
    """The index batches of an epoch; together they hold every example exactly once.

    Of a random order, windows of up to 50 batches are sorted by their padded length, and the batches shuffled again.
    A last, shorter batch is left as the random order has it.

    padded: (N,) the padded length of every text, on the CPU
    """
    n = len(padded)
    whole = n // size
    if whole < 2:
        return source_batches(n, size, seed=seed, epoch=epoch)
    order = source_order(n, seed=seed, epoch=epoch)
    window = size * max(1, min(WINDOW, whole // 4))
    windows = [part[padded[part].argsort(stable=True)] for part in order[: whole * size].split(window)]
    batches = torch.cat(windows).split(size)
    again = torch.randperm(whole, generator=generator(seed, "source/lengths", epoch)).tolist()
    return [*(batches[at] for at in again), *([order[whole * size :]] if n % size else [])]
