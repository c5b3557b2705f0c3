"""Batch indices as functions of (seed, epoch) or (seed, step), so a checkpoint need not store them.

Source: every example once per epoch. Target: an endless cycle that visits every example equally often.
Indices for many steps can be made at once and moved to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import overload

import torch
from torch import Tensor

from soseleto.data.randomness import generator, seed_for
from soseleto.errors import UsageError

MOST_IN_ORDER = 1 << 24  # examples whose order is held in memory
_ROUNDS, _BLOCK = 6, 1 << 14  # of the shuffle that needs no table; entries computed at a time


class Computed(Sequence[Tensor]):
    """A sequence whose entries are computed when they are asked for."""

    def __init__(self, count: int, entry: Callable[[int], Tensor]) -> None:
        self._count, self._entry = count, entry

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, at: int) -> Tensor: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Tensor]: ...

    def __getitem__(self, at: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(at, slice):
            return [self._entry(one) for one in range(self._count)[at]]
        return self._entry(range(self._count)[at])


def source_order(n: int, *, seed: int, epoch: int) -> Tensor:
    """The order (n,) in which an epoch visits the source."""
    return _permutation(n, seed, "source/order", epoch).clone()


def source_batches(
    n: int,
    batch_size: int,
    *,
    seed: int,
    epoch: int,
    drop_last: bool = False,
    fill: bool = False,
    device: torch.device | str = "cpu",
) -> Sequence[Tensor]:
    """The index batches of an epoch; together they hold every example exactly once.

    The last batch is short if batch_size does not divide n. For static shapes pass ``drop_last=True`` (the
    remaining examples are not visited in this epoch) or ``fill=True`` (the last batch is filled up with the first
    examples of this epoch, which are visited twice). All indices are moved to ``device`` in one copy.
    Batches of more than 16 million examples are computed when they are asked for.
    """
    _check_sizes(n, batch_size)
    if drop_last and fill:
        raise UsageError("drop_last and fill exclude each other: choose one of them.")
    if drop_last and batch_size > n:
        raise UsageError(f"drop_last leaves no batch: batch_size is {batch_size} but there are {n} examples.")
    if n > MOST_IN_ORDER and not fill:
        count = n // batch_size if drop_last else -(-n // batch_size)
        return Computed(count, lambda at: _shuffled(n, at * batch_size, batch_size, seed, epoch).to(device))
    order = _permutation(n, seed, "source/order", epoch)
    if drop_last:
        order = order[: n - n % batch_size]
    elif fill:
        order = order[torch.arange(-(-n // batch_size) * batch_size) % n]
    return torch.split(order.to(device, copy=True), batch_size)


@dataclass(frozen=True, eq=False)
class TargetCycle:
    """Endless target batches: ``cycle(step)`` gives (batch_size,) indices, ``cycle.block`` those of many steps.

    The cycle is one shuffled pass after another, so every example is visited equally often. With ``labels`` the
    classes alternate: class counts in a batch differ by at most one, and within a class every example is
    visited equally often.
    """

    n: int
    batch_size: int
    seed: int
    labels: Tensor | None = None  # class indices, to balance the classes

    def __post_init__(self) -> None:
        _check_sizes(self.n, self.batch_size)
        if self.labels is not None and (self.labels.shape != (self.n,) or self.labels.dtype.is_floating_point):
            raise UsageError(
                f"balanced batches need {self.n} class indices as labels, "
                f"got {self.labels.dtype} of shape {tuple(self.labels.shape)}."
            )

    def __call__(self, step: int) -> Tensor:
        return self.block(step, 1)[0]

    def block(self, start: int, steps: int) -> Tensor:
        """Indices (steps, batch_size) of the steps start, start + 1, ..."""
        first = start * self.batch_size
        places = range(first, first + steps * self.batch_size)
        flat = self._plain(places) if self.labels is None else self._balanced(places)
        return flat.reshape(steps, self.batch_size)

    def batches(self, start: int, steps: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        """As ``block``, one tensor a step, on ``device``; those of a long epoch are computed when they are needed."""
        if steps * self.batch_size <= MOST_IN_ORDER:
            return list(self.block(start, steps).to(device))
        return Computed(steps, lambda at: self(start + at).to(device))

    def _plain(self, places: range) -> Tensor:
        return _window(places, self.n, lambda p: _permutation(self.n, self.seed, "target/order", p)).clone()

    def _balanced(self, places: range) -> Tensor:
        """Round r holds the r-th example of every class, always in the same class order, so in any window the class
        counts differ by at most one."""
        groups = self._groups
        rounds = range(places.start // len(groups), (places.stop - 1) // len(groups) + 1)
        class_order = _small(len(groups), self.seed, "target/turns", 0).tolist()
        members = torch.stack([self._members(c, rounds) for c in class_order], dim=1)
        skip = places.start - rounds.start * len(groups)
        return members.flatten()[skip : skip + len(places)]

    def _members(self, c: int, rounds: range) -> Tensor:
        group = self._groups[c]
        return _window(rounds, len(group), lambda p: group[_small(len(group), self.seed, f"target/class/{c}", p)])

    @cached_property
    def _groups(self) -> tuple[Tensor, ...]:
        """The indices of the examples of each class that occurs."""
        assert self.labels is not None
        labels = self.labels.to("cpu")
        return tuple((labels == c).nonzero().flatten() for c in torch.unique(labels))


def target_batch(
    n: int,
    batch_size: int,
    *,
    seed: int,
    step: int,
    labels: Tensor | None = None,
    balanced: bool = False,
) -> Tensor:
    """One batch of target indices. In a loop build a ``TargetCycle`` once: it groups the classes once."""
    if balanced and labels is None:
        raise UsageError("balanced=True needs labels=...: the class index of every target example.")
    return TargetCycle(n, batch_size, seed, labels if balanced else None)(step)


def _window(places: range, length: int, order: Callable[[int], Tensor]) -> Tensor:
    """Entries ``places`` of an endless sequence of passes; ``order(p)`` gives the ``length`` entries of pass p."""
    passes = range(places.start // length, (places.stop - 1) // length + 1)
    skip = places.start - passes.start * length
    return torch.cat([order(p) for p in passes])[skip : skip + len(places)]


@lru_cache(maxsize=8)
def _permutation(n: int, seed: int, purpose: str, counter: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed, purpose, counter))


@lru_cache(maxsize=4096)
def _small(n: int, seed: int, purpose: str, counter: int) -> Tensor:
    """As ``_permutation``, with a larger cache for the many short orders of balanced cycling."""
    return torch.randperm(n, generator=generator(seed, purpose, counter))


def _shuffled(n: int, first: int, size: int, seed: int, epoch: int) -> Tensor:
    """Entries first, first + 1, ... of a permutation of n numbers that needs no table."""
    last = min(first + size, n)
    blocks = range(first // _BLOCK, (last - 1) // _BLOCK + 1)
    made = torch.cat([_shuffled_block(n, block, seed, epoch) for block in blocks])
    return made[first - blocks.start * _BLOCK : last - blocks.start * _BLOCK]


@lru_cache(maxsize=4)
def _shuffled_block(n: int, block: int, seed: int, epoch: int) -> Tensor:
    """Entries of the permutation for many batches, since one alone would take as long.

    A Feistel network permutes the numbers below the smallest power of two that is at least n; a number that comes out
    as n or more is sent through again, until it comes out below n.
    """
    bits = max((n - 1).bit_length(), 2)
    keys = [seed_for(seed, "source/order", epoch * _ROUNDS + turn) for turn in range(_ROUNDS)]
    out = _feistel(torch.arange(block * _BLOCK, min((block + 1) * _BLOCK, n)), bits, keys)
    left = (out >= n).nonzero().flatten()
    while len(left):
        out[left] = _feistel(out[left], bits, keys)
        left = left[out[left] >= n]
    return out


def _feistel(numbers: Tensor, bits: int, keys: Sequence[int]) -> Tensor:
    """A permutation of the numbers below 2^bits: their two halves change each other in turn."""
    half = bits // 2
    high, low = numbers >> half, numbers & ((1 << half) - 1)
    for turn, key in enumerate(keys):
        if turn % 2:
            low = low ^ (_mixed(high, key) & ((1 << half) - 1))
        else:
            high = high ^ (_mixed(low, key) & ((1 << (bits - half)) - 1))
    return (high << half) | low


def _mixed(numbers: Tensor, key: int) -> Tensor:
    """Bits that depend on all bits of the numbers and the key; products wrap around."""
    mixed = (numbers + key) * 0x1B03738712FAD5C9
    return ((mixed ^ (mixed >> 29)) * 0x5851F42D4C957F2D) >> 17


def _check_sizes(n: int, batch_size: int) -> None:
    if n < 1:
        raise UsageError(f"there are {n} examples: give at least one.")
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, got {batch_size}.")
