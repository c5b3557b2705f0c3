"""Batches, their indices and random numbers: functions of (seed, purpose, counter), so no checkpoint stores them.

Source: every example once per epoch. Target: an endless cycle that visits every example equally often.
Indices for many steps can be computed at once and moved to the device in one copy.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from soseleto.data import structure
from soseleto.data.structure import Inputs
from soseleto.errors import UsageError

_BITS = 64
_STRIDE, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MANTISSA = 24  # bits of a float32


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
            raise UsageError(f"balanced batches need {self.n} class indices, got {structure.describe(self.labels)}.")

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


def seed_for(seed: int, purpose: str, counter: int = 0) -> int:
    """A 63-bit seed that depends only on these three; the same on every machine."""
    digest = hashlib.sha256(f"{seed}\x1f{purpose}\x1f{counter}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, purpose: str, counter: int = 0) -> torch.Generator:
    """A new generator for one purpose at one step or epoch.

    A resumed run uses the same (seed, purpose, counter) and draws the same numbers, so no random state is saved.

    >>> first = torch.rand(2, generator=generator(0, "augment", 7))
    >>> bool((first == torch.rand(2, generator=generator(0, "augment", 7))).all())
    True
    """
    return torch.Generator().manual_seed(seed_for(seed, purpose, counter))


class ExampleRandom:
    """A stream of uniform numbers for each of N examples; like a generator, every call continues the stream.

    A number is a hash of (key, counters of the example, position in the stream): no state to save, and the same on
    every device. The hash is SplitMix64 (Steele, Lea and Flood, 2014): integer arithmetic alone, so that it can be
    recorded as a CUDA graph with counters that change on the GPU.

    Example:
        >>> first = ExampleRandom.of(7, torch.tensor([3, 5])).uniform(2)
        >>> bool((first[:, 1:] == ExampleRandom.of(7, torch.tensor([5])).uniform(2)).all())
        True
    """

    def __init__(self, keys: Tensor) -> None:
        self._keys, self._drawn = keys, 0

    @classmethod
    def of(cls, key: int, *counters: Tensor) -> ExampleRandom:
        """counters: int64 tensors of one shape (N,), such as the indices of the examples and the step."""
        keys = torch.full_like(counters[0], _signed(key))
        for counter in counters:
            keys = _mixed(keys + counter * _signed(_STRIDE))
        return cls(keys)

    def uniform(self, count: int) -> Tensor:
        """(count, N) float32 numbers in [0, 1)."""
        places = torch.arange(self._drawn + 1, self._drawn + count + 1, device=self._keys.device)
        self._drawn += count
        bits = _mixed(self._keys + places[:, None] * _signed(_STRIDE))
        return _shifted(bits, _BITS - _MANTISSA).to(torch.float32) * 2.0**-_MANTISSA


def _mixed(numbers: Tensor) -> Tensor:
    """Bits that depend on all bits of the numbers; products wrap around."""
    numbers = (numbers ^ _shifted(numbers, 30)) * _signed(_FIRST)
    numbers = (numbers ^ _shifted(numbers, 27)) * _signed(_SECOND)
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, by: int) -> Tensor:
    """Shifted right with zeros from the left; the sign bit of int64 would be repeated otherwise."""
    return (numbers >> by) & ((1 << (_BITS - by)) - 1)


def _signed(number: int) -> int:
    """The int64 with the bits of an unsigned number."""
    number %= 1 << _BITS
    return number - (1 << _BITS) if number >> (_BITS - 1) else number
