"""A map-style Dataset that is read anew in every epoch by worker processes, which prepare batches ahead of use."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import tee
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Subset

from soseleto.data import structure
from soseleto.data.batches import source_batches
from soseleto.data.items import Collate, Items, Request, random_states, seed_generators
from soseleto.data.read_ahead import MOST_WORKERS, PIECE, ReadAhead
from soseleto.data.readers.in_memory import is_tensors
from soseleto.data.readers.read_once import READ_AGAIN, TIMES, own_random_state, same
from soseleto.data.structure import Inputs
from soseleto.errors import DataError, UsageError

MOST_IN_MEMORY = 1 << 28  # bytes of a Dataset that is read into memory without being asked to
SAMPLE = 1024  # examples from which statistics are computed
FEW = 64  # items, evenly spaced, for the fingerprint and the kind of labels
_SHORT = 0.5  # seconds of reading per epoch for which no workers are started


class Live(ReadAhead):
    """A Dataset of (input, label) pairs, or of mappings with an entry ``labels``, that is read again in every epoch.

    ``fit`` reads a Dataset this way if its items are random, differ in shape or are many; ``Live(dataset)`` is for
    choosing how. What items and ``collate_fn`` take from the global generators of torch, NumPy and ``random`` follows
    from the run's seed, the epoch and the index: augmentation is random, and a resumed run draws the same. A generator
    of the Dataset's own is not under control.

    Args:
        dataset: with ``__len__`` and ``__getitem__``.
        collate_fn: makes a batch of a list of items, as for a DataLoader; by default they are stacked.
        workers: number of reading processes, 0 to read in this one; without effect on the result. By default one for
            each core, at most 8, and none where an epoch is read in half a second.
    """

    def __init__(self, dataset: Any, *, collate_fn: Collate | None = None, workers: int | None = None) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError(f"Live needs a Dataset with __len__ and __getitem__, got a {type(dataset).__name__}.")
        if len(dataset) == 0:
            raise DataError("the data set is empty: give it at least one example.")
        super().__init__(len(dataset), workers)
        self.dataset, self.collate_fn = dataset, collate_fn
        self.ids: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return f"Live({type(self.dataset).__name__} of {len(self)}, workers={self.workers})"

    def __len__(self) -> int:
        return len(self.dataset)

    def id_of(self, index: int) -> str:
        at = range(len(self))[index]
        return str(at) if self.ids is None else self.ids[at]

    @property
    def labels(self) -> Tensor:
        """The labels as they were read; those not seen yet are read now. Not kept where one example has several."""
        missing = self._labels.missing()
        for _ in self.read(missing.split(PIECE)) if len(missing) else ():
            pass
        return self._labels.values()

    def know_labels(self, labels: Tensor) -> None:
        """Give the labels of all items, (n,), so that they need not be read."""
        self._labels.put(torch.arange(len(self)), labels)

    def take(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """A few examples, read in this process."""
        return next(self._in_this_process([Request(index.tolist(), 0, "read")]))

    def read(
        self, batches: Iterable[Tensor], *, seed: int = 0, purpose: str = "read"
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels of each batch of indices, read ahead; random items follow (seed, purpose, index)."""
        mine, theirs = tee(batches)
        requests = (Request(batch.tolist(), seed, purpose) for batch in theirs)
        made = self._made(requests)
        known = not len(self._labels.missing())
        for index, (inputs, labels) in zip(mine, made, strict=True):
            if not known:
                self._labels.put(index.cpu(), labels)
            yield structure.to_device((inputs, labels), self.device)

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        return source_batches(len(self), size, seed=seed, epoch=epoch)

    def sample(self) -> Inputs:
        """The inputs of evenly spaced examples, at most 1,024."""
        places = _spaced(len(self), SAMPLE)
        return structure.concatenate([inputs for inputs, _ in self.read(places.split(PIECE))])

    def sample_labels(self) -> Tensor:
        """All labels if they are known, or those of evenly spaced examples, at most 64."""
        if not len(self._labels.missing()):
            return self._labels.values()
        return self.take(_spaced(len(self), FEW))[1]

    def subset(self, index: Tensor | Sequence[int]) -> Self:
        """The selected examples, still read when they are needed."""
        at = torch.as_tensor(index)
        at = at.nonzero().flatten() if at.dtype == torch.bool else at
        places = [range(len(self))[i] for i in at.tolist()]
        other = type(self)(Subset(self.dataset, places), collate_fn=self.collate_fn, workers=self.workers)
        other.name, other.classes, other.device = self.name, self.classes, self.device
        other.ids = tuple(self.id_of(i) for i in places)
        return other

    def fingerprint(self) -> str:
        """sha256 of evenly spaced items and of the number of items; where items cannot be repeated, of their shapes.

        A Dataset with a method ``fingerprint()`` adds its own; the text says what was read.
        """
        digest = hashlib.sha256(f"{len(self)}".encode())
        places = _spaced(len(self), FEW)
        for at in places:
            one, again = self.take(at[None]), self.take(at[None])
            repeated = all(same(a, b) for a, b in zip(structure.tensors(one), structure.tensors(again), strict=True))
            digest.update(structure.describe(one).encode())
            for tensor in structure.tensors(one) if repeated else []:
                digest.update(tensor.contiguous().numpy().tobytes())
        files = f"{self.dataset.fingerprint()} and " if hasattr(self.dataset, "fingerprint") else ""
        return f"{files}{len(places)} of {len(self)} items: {digest.hexdigest()}"

    @property
    def _items(self) -> Items:
        return Items(self.dataset, self.collate_fn, self.name)

    def _count(self) -> int:
        """The number of worker processes."""
        if self.workers is None:
            begin = time.perf_counter()
            places = _spaced(len(self), 4)
            for at in places:
                self.take(at[None])
            short = (time.perf_counter() - begin) / len(places) * len(self) < _SHORT
            self.workers = 0 if short else min(MOST_WORKERS, (os.cpu_count() or 1))
        return self.workers


def is_free(dataset: Any) -> bool:
    """Whether a Dataset is better read into memory: that is one pass, and every epoch after it is faster.

    So if its items are tensors already, or do not change from read to read, have one shape and are few: at most 256 MB.
    A few items are read, several times. One that draws a random number may change, though rarely.
    """
    if is_tensors(dataset) or len(dataset) == 0:
        return True
    with own_random_state():
        seed_generators(0)  # see Items
        before = random_states()
        items = {int(at): dataset[int(at)] for at in _spaced(len(dataset), READ_AGAIN)}
        if not all(same(item, dataset[at]) for at, item in items.items() for _ in range(TIMES)):
            return False
        if random_states() != before:
            return False
    arrays = [[np.asarray(leaf) for leaf in pytree.tree_leaves(item)] for item in items.values()]
    size = max(sum(array.nbytes for array in item) for item in arrays)
    one_shape = len({tuple(array.shape for array in item) for item in arrays}) == 1
    return one_shape and size * len(dataset) <= MOST_IN_MEMORY


def _spaced(n: int, most: int) -> Tensor:
    """At most ``most`` of n indices, evenly spaced."""
    return torch.linspace(0, n - 1, min(n, most), dtype=torch.float64).round().long().unique()
