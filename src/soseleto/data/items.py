"""Reading the items of a Dataset into batches: what a worker process does.

What an item takes from the global generators of torch, NumPy and ``random`` follows from (seed, purpose, index), so it
differs from epoch to epoch and is the same in a resumed run, whatever the number of workers. Seeding three generators
takes longer than reading a small item, so a batch is read without it first; it is kept if no generator was used, and
otherwise read again with every item seeded, as are all later ones.
"""

from __future__ import annotations

import ctypes
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate, get_worker_info

from soseleto.data import structure
from soseleto.data.randomness import seed_for
from soseleto.data.readers.in_memory import inputs_of, labels_of, narrowed, parted
from soseleto.data.readers.labels import Names
from soseleto.data.structure import Inputs
from soseleto.errors import DataError, SoseletoError, first_line

Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True)
class Request:
    """A batch to read: its indices, and what randomness follows from."""

    index: list[int]
    seed: int
    purpose: str


@dataclass(frozen=True)
class Failure:
    """An error of a worker process, which is raised in the main one."""

    message: str
    trace: str

    def error(self) -> DataError:
        error = DataError(self.message)
        error.add_note(self.trace)
        return error


class Items(Dataset[Any]):
    """Batches of a map-style Dataset, as inputs and labels."""

    def __init__(self, dataset: Any, collate_fn: Collate | None, name: str) -> None:
        self.dataset, self.collate_fn, self.name = dataset, collate_fn, name
        self._seeded = False  # whether a generator was used before
        self._states: tuple[Any, ...] | None = None  # of the generators, as long as none was used

    def __getitems__(self, request: Request) -> tuple[Inputs, Tensor] | Failure:
        try:
            return self._batch(request)
        except Exception as error:
            text = str(error) if isinstance(error, SoseletoError) else f"{type(error).__name__}: {first_line(error)}"
            return Failure(text, "".join(traceback.format_exception(error)))

    def _batch(self, request: Request) -> tuple[Inputs, Tensor]:
        if not request.index:  # a rank without examples in this batch
            inputs, labels = self._read(Request([0], request.seed, request.purpose))
            return structure.change(lambda tensor: tensor[:0], inputs), labels[:0]
        if not self._seeded:
            if self._states is None or get_worker_info() is None:  # in a worker nothing else draws between batches
                seed_generators(0)  # also drops a normal number that NumPy keeps back, which its state does not show
                self._states = random_states()
            made = self._read(request)
            self._seeded = self._states != random_states()
            if not self._seeded:
                return made
        return self._read(request)

    def _read(self, request: Request) -> tuple[Inputs, Tensor]:
        items: list[Any] = []
        try:
            for at in request.index:
                if self._seeded:
                    seed_generators(seed_for(request.seed, f"{request.purpose}/item", at))
                items.append(self.dataset[at])
        except Exception as error:
            raise self._unreadable(request.index[len(items)], error) from error
        if self._seeded:
            seed_generators(seed_for(request.seed, f"{request.purpose}/collate", request.index[0]))
        return self._collated(items, request.index)

    def _unreadable(self, at: int, error: Exception) -> DataError:
        if isinstance(error, DataError):
            return DataError(f"item {at} of the {self.name} data set: {error}")
        return DataError(
            f"item {at} of the {self.name} data set cannot be read ({type(error).__name__}: {first_line(error)}): mend "
            "the Dataset."
        )

    def _collated(self, items: list[Any], index: Sequence[int]) -> tuple[Inputs, Tensor]:
        try:
            batch = (self.collate_fn or _stack)(items)
        except Exception as error:
            raise DataError(
                f"the items {index[0]} to {index[-1]} of the {self.name} data set do not make a batch "
                f"({type(error).__name__}: {first_line(error)}): bring them to one shape, or write "
                "soseleto.data.Live(dataset, collate_fn=...)."
            ) from error
        inputs, labels = parted(batch, name=self.name)
        images = self.collate_fn is None and _is_array_image(items[0])
        if images:
            inputs = inputs_of(inputs.numpy(), name=self.name)
        made = structure.change(narrowed, structure.plain(inputs))
        if not structure.tensors(made):
            raise DataError(f"the items of the {self.name} data set hold no tensor or array: return (input, label).")
        return made, _labels(labels, name=self.name)


def _stack(items: list[Any]) -> Any:
    parted(items[0], name="")  # the type of an item is checked before it is stacked
    if any(_needs_array(leaf) for leaf in pytree.tree_leaves(items[0])):
        items = [pytree.tree_map(lambda leaf: np.array(leaf) if _needs_array(leaf) else leaf, item) for item in items]
    return default_collate(items)


def _needs_array(leaf: Any) -> bool:
    """Pillow images, which torch does not stack, and read-only arrays, which it warns about."""
    if isinstance(leaf, np.ndarray):
        return not leaf.flags.writeable
    return hasattr(leaf, "__array_interface__") and not isinstance(leaf, Tensor | np.generic)


def _is_array_image(item: Any) -> bool:
    """Whether the input is an image as Pillow and NumPy have it, (H, W) or (H, W, C)."""
    value = item[0] if isinstance(item, Sequence) else None
    array = np.asarray(value) if _needs_array(value) or isinstance(value, np.ndarray) else None
    return array is not None and array.dtype == np.uint8 and array.ndim in (2, 3)


def _labels(values: Any, *, name: str) -> Tensor:
    labels = labels_of(values, name=name)
    if isinstance(labels, Names):
        raise DataError(
            f"the labels of the {name} data set are text: return class indices, or write "
            "soseleto.data.ReadOnce(dataset)."
        )
    return labels


def seed_generators(number: int) -> None:
    """Seed the global generators of torch, NumPy and ``random``."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)  # noqa: NPY002 - what a Dataset may use
    random.seed(number)


def random_states() -> tuple[Any, ...]:
    """The states of the three generators, for comparison."""
    numpy: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    if isinstance(numpy, np.random.MT19937):  # its 624 words and its position, a hundred times faster than get_state
        words: Any = ctypes.string_at(numpy.ctypes.state_address, 4 * 625)
    else:
        words = repr(np.random.get_state(legacy=False))  # noqa: NPY002
    return torch.get_rng_state().numpy().tobytes(), words, random.getstate()
