"""Stateless randomness: every random choice is a function of (seed, purpose, counter)."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

_BITS = 64
_STRIDE, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MANTISSA = 24  # bits of a float32


def seed_for(seed: int, purpose: str, counter: int = 0) -> int:
    """A 63-bit seed that depends only on these three; the same on every machine."""
    digest = hashlib.sha256(f"{seed}\x1f{purpose}\x1f{counter}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def generator(seed: int, purpose: str, counter: int = 0, device: torch.device | str = "cpu") -> torch.Generator:
    """A new generator for one purpose at one step or epoch.

    A resumed run uses the same (seed, purpose, counter) and draws the same numbers, so no random state is saved.
    Numbers drawn on different device types differ.

    >>> first = torch.rand(2, generator=generator(0, "augment", 7))
    >>> bool((first == torch.rand(2, generator=generator(0, "augment", 7))).all())
    True
    """
    return torch.Generator(device=device).manual_seed(seed_for(seed, purpose, counter))


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
