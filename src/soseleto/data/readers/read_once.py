"""Datasets whose items change from read to read, such as by random augmentation, which are read only once."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.errors import UsageError

READ_AGAIN = 12  # items, evenly spaced
TIMES = 3  # a random flip is missed by all of them with probability 2^-36


@dataclass(frozen=True, eq=False)
class ReadOnce:
    """A Dataset whose random items are wanted as they are at the first reading: ``fit(model, ReadOnce(data), ...)``."""

    dataset: Any


class ChangingItems(UsageError):
    """An item of a Dataset differs from its first reading."""


def require_constant(first: Callable[[int], Any], again: Callable[[int], Any], count: int, *, name: str) -> None:
    """Read a few items again; raise where one differs from its first reading. Global random state is left as it was."""
    places = sorted({round(at) for at in np.linspace(0, count - 1, min(READ_AGAIN, count))})
    with own_random_state():
        for at in places:
            if not all(same(first(at), again(at)) for _ in range(TIMES)):
                raise ChangingItems(
                    f"item {at} of the {name} data set changes from read to read (random augmentation?), and every "
                    "item is read only once beside files: leave the random part out and write "
                    "augment=soseleto.Augment(...), or write soseleto.data.ReadOnce(dataset) to train on the first "
                    "reading."
                )


def same(one: Any, other: Any) -> bool:
    """Whether two items are equal to the last bit; NaN equals NaN."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    mine, its = _array(one), _array(other)
    if mine.shape != its.shape or mine.dtype != its.dtype:
        return False
    return bool(np.array_equal(mine, its, equal_nan=mine.dtype.kind in "fc"))


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        value = value.float() if value.dtype == torch.bfloat16 else value
    return np.asarray(value)


@contextmanager
def own_random_state() -> Iterator[None]:
    """Leave the states of Python's, NumPy's and PyTorch's generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what a Dataset may use
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002
