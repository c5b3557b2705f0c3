"""Batches, and their indices as functions of (seed, epoch) or (seed, step), so that a checkpoint need not store them.

Source: every example once per epoch. Target: an endless cycle that visits every example equally often.
Indices for many steps can be computed at once and moved to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from soseleto.data import structure
from soseleto.data.randomness import generator
from soseleto.data.structure import Inputs
from soseleto.errors import UsageError


@dataclass(frozen=True)
class Batch:
    """Source or target examples: indices into the data set, inputs and labels, all of length B.

    inputs: a tensor, or any structure of tensors; a mapping is passed to the model as keyword arguments, a tuple or
        list as positional ones
    whole: size of the step's whole batch if this is only a part of it.
    """

    index: Tensor
    inputs: Inputs
    labels: Tensor
    whole: int | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def total(self) -> int:
        """The size of the whole batch."""
        return len(self) if self.whole is None else self.whole

    def split(self, size: int | list[int]) -> list[Batch]:
        """Parts of at most ``size`` examples, or of the given sizes."""
        inputs = structure.split(self.inputs, size)
        parts = zip(self.index.split(size), inputs, self.labels.split(size), strict=True)
        return [Batch(*part, whole=self.total) for part in parts]

    def to(self, device: torch.device) -> Batch:
        index, inputs, labels = structure.to_device((self.index, self.inputs, self.labels), device)
        return replace(self, index=index, inputs=inputs, labels=labels)


def source_order(n: int, *, seed: int, epoch: int) -> Tensor:
    """The order (n,) in which an epoch visits the source."""
    _check_sizes(n, 1)
    return _permutation(n, seed, "source/order", epoch)


def source_batches(
    n: int, batch_size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu"
) -> Sequence[Tensor]:
    """The index batches of an epoch; together they hold every example exactly once.

    The last batch is short if batch_size does not divide n. All indices are moved to ``device`` in one copy.
    """
    _check_sizes(n, batch_size)
    return torch.split(source_order(n, seed=seed, epoch=epoch).to(device), batch_size)


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
        positions = range(first, first + steps * self.batch_size)
        flat = self._plain(positions) if self.labels is None else self._balanced(positions)
        return flat.reshape(steps, self.batch_size)

    def batches(self, start: int, steps: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        """As ``block``, one tensor a step, on ``device``."""
        return list(self.block(start, steps).to(device))

    def _plain(self, positions: range) -> Tensor:
        return _window(positions, self.n, lambda p: _target_order(self.n, self.seed, "target/order", p)).clone()

    def _balanced(self, positions: range) -> Tensor:
        """Round r holds the r-th example of every class, always in the same class order, so in any window the class
        counts differ by at most one."""
        groups = self._groups
        rounds = range(positions.start // len(groups), (positions.stop - 1) // len(groups) + 1)
        class_order = _class_order(len(groups), self.seed, "target/turns", 0).tolist()
        members = torch.stack([self._members(c, rounds) for c in class_order], dim=1)
        skip = positions.start - rounds.start * len(groups)
        return members.flatten()[skip : skip + len(positions)]

    def _members(self, c: int, rounds: range) -> Tensor:
        group = self._groups[c]
        return _window(rounds, len(group), lambda p: group[_class_order(len(group), self.seed, f"target/class/{c}", p)])

    @cached_property
    def _groups(self) -> tuple[Tensor, ...]:
        """The indices of the examples of each class that occurs."""
        assert self.labels is not None
        labels = self.labels.to("cpu")
        return tuple((labels == c).nonzero().flatten() for c in torch.unique(labels))


def _window(positions: range, length: int, order: Callable[[int], Tensor]) -> Tensor:
    """Entries ``positions`` of an endless sequence of passes; ``order(p)`` gives the ``length`` entries of pass p."""
    passes = range(positions.start // length, (positions.stop - 1) // length + 1)
    skip = positions.start - passes.start * length
    return torch.cat([order(p) for p in passes])[skip : skip + len(positions)]


def _permutation(n: int, seed: int, purpose: str, counter: int) -> Tensor:
    return torch.randperm(n, generator=generator(seed, purpose, counter))


# Orders are asked for in every step: that of a pass over the target, and the many short ones of its classes.
_target_order = lru_cache(maxsize=4)(_permutation)
_class_order = lru_cache(maxsize=4096)(_permutation)


def _check_sizes(n: int, batch_size: int) -> None:
    if n < 1:
        raise UsageError(f"there are {n} examples: give at least one.")
    if batch_size < 1:
        raise UsageError(f"batch_size must be at least 1, got {batch_size}.")
