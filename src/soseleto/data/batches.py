"""Which examples make up each batch, as functions of (seed, epoch) or (seed, step): nothing to save.

Source: every example once an epoch. Target: an endless cycle in which every example comes equally often.
Indices for many steps can be made at once and moved to the device in one copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from soseleto.data.randomness import generator
from soseleto.errors import UsageError


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
) -> tuple[Tensor, ...]:
    """An epoch's batches of indices; together they hold every example exactly once.

    The last batch is short when batch_size does not divide n. For static shapes say ``drop_last=True`` (the
    left-over examples of this epoch's order are not visited) or ``fill=True`` (the last batch is filled up
    from the front of this epoch's order: those come twice). With ``device`` the epoch travels in one copy.
    """
    _check_sizes(n, batch_size)
    if drop_last and fill:
        raise UsageError("drop_last and fill exclude each other: choose one of them.")
    if drop_last and batch_size > n:
        raise UsageError(f"drop_last leaves no batch: batch_size is {batch_size} but there are {n} examples.")
    order = _permutation(n, seed, "source/order", epoch)
    if drop_last:
        order = order[: n - n % batch_size]
    elif fill:
        order = order[torch.arange(-(-n // batch_size) * batch_size) % n]
    return torch.split(order.to(device, copy=True), batch_size)


@dataclass(frozen=True, eq=False)
class TargetCycle:
    """Target batches without end: ``cycle(step)`` gives (batch_size,) indices, ``cycle.block`` many steps.

    Every example comes equally often: the cycle is one shuffled pass after another. With ``labels`` the
    classes take turns, so that class counts in a batch differ by at most one, and within a class every
    example comes equally often.
    """

    n: int
    batch_size: int
    seed: int
    labels: Tensor | None = None  # give them to balance the classes

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

    def _plain(self, places: range) -> Tensor:
        passes = range(places.start // self.n, (places.stop - 1) // self.n + 1)
        orders = [_permutation(self.n, self.seed, "target/order", p) for p in passes]
        skip = places.start - passes.start * self.n
        return torch.cat(orders)[skip : skip + len(places)].clone()

    def _balanced(self, places: range) -> Tensor:
        """Round r holds every class once, always in the same order, so any window is balanced to within one;
        a class gives its r-th example there."""
        groups = self._groups
        rounds = range(places.start // len(groups), (places.stop - 1) // len(groups) + 1)
        turns = _small(len(groups), self.seed, "target/turns", 0).tolist()
        members = torch.stack([self._members(c, rounds) for c in turns], dim=1)
        skip = places.start - rounds.start * len(groups)
        return members.flatten()[skip : skip + len(places)]

    def _members(self, c: int, rounds: range) -> Tensor:
        group = self._groups[c]
        passes = range(rounds.start // len(group), (rounds.stop - 1) // len(group) + 1)
        orders = [group[_small(len(group), self.seed, f"target/class/{c}", p)] for p in passes]
        skip = rounds.start - passes.start * len(group)
        return torch.cat(orders)[skip : skip + len(rounds)]

    @cached_property
    def _groups(self) -> tuple[Tensor, ...]:
        """The indices of each class that is there."""
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


@lru_cache(maxsize=8)
def _permutation(n: int, seed: int, purpose: str, counter: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed, purpose, counter))


@lru_cache(maxsize=4096)
def _small(n: int, seed: int, purpose: str, counter: int) -> Tensor:
    """As _permutation, for the many short orders of balanced cycling."""
    return torch.randperm(n, generator=generator(seed, purpose, counter))


def _check_sizes(n: int, batch_size: int) -> None:
    if n < 1:
        raise UsageError(f"there are {n} examples: at least one is needed.")
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, got {batch_size}.")
