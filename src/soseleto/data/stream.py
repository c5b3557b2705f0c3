"""Data that can only be read forward: an IterableDataset, streamed Hugging Face data, or several shards of such."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, tee
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from soseleto.data import structure
from soseleto.data.examples import Examples
from soseleto.data.forward_items import ForwardItems, Key
from soseleto.data.items import Collate, Request
from soseleto.data.randomness import generator
from soseleto.data.read_ahead import MOST_WORKERS, PIECE, ReadAhead
from soseleto.data.structure import Inputs
from soseleto.errors import DataError, UsageError

FEW = 64  # examples from the beginning, for the fingerprint and the kind of labels
WINDOW = 1024  # examples of a shard that are shuffled together


class Stream(ReadAhead):
    """Examples in the order in which they are read: the number of an example is its place in that order.

    Every epoch reads all shards from their beginning, in another order of the shards, and shuffles the examples within
    windows. A shard must give the same examples in the same order whenever it is iterated; what is random in an example
    follows from the run's seed, the epoch and its number, where it comes from torch, NumPy or ``random``. Worker
    processes share the shards without overlap. A resumed run skips finished shards and reads through the begun ones.

    Args:
        shards: an iterable of (input, label) pairs or of mappings with an entry ``labels``, or a list of iterables.
            Streamed data of Hugging Face is divided into its own shards.
        length: number of examples, one for each shard; by default what ``len`` says, or else counted in a first pass.
        key: what names an example in the ranking: an entry of the item, which the model does not get, or a function of
            the item. By default its number.
        collate_fn: makes a batch of a list of items; by default they are stacked.
        window: examples that are shuffled together, and so held in memory; 1 keeps the order.
        workers: number of reading processes, at most one for each shard; without effect on the result.
    """

    def __init__(
        self,
        shards: Any,
        *,
        length: int | Sequence[int] | None = None,
        key: Key = None,
        collate_fn: Collate | None = None,
        window: int = WINDOW,
        workers: int | None = None,
    ) -> None:
        self._shards = _shards_of(shards)
        self._lengths = _lengths_of(self._shards, length)
        if window < 1:
            raise UsageError(f"window must be at least 1, got {window}.")
        super().__init__(len(self), workers)
        self._key, self._collate_fn, self._window = key, collate_fn, window
        self._names: list[str | None] = [None] * len(self) if key is not None else []

    ids = None

    def __repr__(self) -> str:
        return f"Stream({len(self._shards)} shards of {len(self)} examples)"

    def __len__(self) -> int:
        return sum(self._lengths)

    def id_of(self, index: int) -> str:
        """The key of an example, or its number."""
        at = range(len(self))[index]
        if not self._names:
            return str(at)
        if self._names[at] is None:
            self._read_missing()
        return str(self._names[at])

    @property
    def labels(self) -> Tensor:
        """The labels as they were read; those not seen yet are read now."""
        if len(self._labels.missing()):
            self._read_missing()
        return self._labels.values()

    def take(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """A few examples, read in this process; of a shard all that come before them are read too."""
        return next(self._recorded([index], self._in_this_process([Request(index.tolist(), 0, "read")])))

    def read(
        self, batches: Iterable[Tensor], *, seed: int = 0, purpose: str = "read"
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels of each batch, read ahead."""
        mine, theirs = tee(batches)
        requests = (Request(batch.tolist(), seed, purpose) for batch in theirs)
        return self._recorded(mine, self._made(requests))

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        """The batches of an epoch: batch i holds examples of lane i mod lanes, so that each lane has one reader."""
        return _order(self._lengths, self._window, self._lanes, size, seed, epoch).split(size)

    def sample(self) -> Inputs:
        """The inputs of the first examples."""
        return self.take(torch.arange(min(FEW, len(self))))[0]

    def sample_labels(self) -> Tensor:
        """The labels of the first examples."""
        return self.take(torch.arange(min(FEW, len(self))))[1]

    def subset(self, index: Tensor | Sequence[int]) -> Any:
        """The selected examples in this order as ``Examples``: they are read into memory, in one pass."""
        at = torch.as_tensor(index)
        at = at.nonzero().flatten() if at.dtype == torch.bool else at
        forward = at.sort()
        inputs, labels = structure.concatenate(list(self.read(forward.values.split(PIECE))))
        back = forward.indices.argsort().to(labels.device)
        inputs, labels = structure.change(lambda tensor: tensor[back], (inputs, labels))
        return Examples(inputs, labels, tuple(self.id_of(i) for i in at.tolist()), self.classes)

    def in_memory(self) -> Examples:
        """All examples, read once."""
        inputs, labels = zip(*self.read(torch.arange(len(self)).split(PIECE)), strict=True)
        ids = tuple(self.id_of(at) for at in range(len(self))) if self._names else None
        return Examples(structure.concatenate(inputs), torch.cat(labels), ids)

    def fingerprint(self) -> str:
        """sha256 of the first examples and of the lengths of the shards."""
        inputs, labels = self.take(torch.arange(min(FEW, len(self))))
        digest = hashlib.sha256(f"{self._lengths}{structure.describe(inputs)}".encode())
        for tensor in structure.tensors((inputs, labels)):
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return f"{len(labels)} of {len(self)} examples: {digest.hexdigest()}"

    @property
    def _lanes(self) -> int:
        """Into how many parts the shards are divided; depends on the data alone, as the order of examples does."""
        return min(len(self._shards), MOST_WORKERS)

    def _count(self) -> int:
        """The number of worker processes: it divides the number of lanes, so that each lane is read by one of them."""
        wanted = min(self._lanes, (os.cpu_count() or 1) if self.workers is None else self.workers)
        return max((count for count in range(1, wanted + 1) if self._lanes % count == 0), default=0)

    @property
    def _items(self) -> ForwardItems:
        return ForwardItems(self._shards, self._lengths, self._window, self._key, self._collate_fn, self.name)

    def _recorded(self, batches: Iterable[Tensor], made: Iterator[Any]) -> Iterator[tuple[Inputs, Tensor]]:
        for index, (inputs, labels, names) in zip(batches, made, strict=True):
            self._labels.put(index.cpu(), labels)
            for at, name in zip(index.tolist(), names, strict=False):
                self._put_name(at, name)
            yield structure.to_device((inputs, labels), self.device)

    def _put_name(self, at: int, name: str) -> None:
        if self._names[at] not in (None, name):
            raise DataError(
                f"example {at} of the {self.name} stream had the key {self._names[at]!r} and now has {name!r}: give "
                "a stream that has the same order in every pass, since fit shuffles it."
            )
        self._names[at] = name

    def _read_missing(self) -> None:
        missing = self._labels.missing()
        for _ in self.read(missing.split(PIECE)) if len(missing) else ():
            pass


def is_stream(data: Any) -> bool:
    """Whether this can only be iterated."""
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not isinstance(data, Tensor | Mapping)


def refuse_loader(data: Any) -> None:
    """Raise for a DataLoader: its batches are no examples, and what it shuffles has no place of its own."""
    if isinstance(data, DataLoader):
        raise UsageError(
            "a DataLoader gives batches in an order of its own, and every weight belongs to one example: pass its "
            "dataset, as in fit(model, loader.dataset, ..., batch_size=...)."
        )


def _shards_of(given: Any) -> list[Any]:
    if hasattr(given, "shard") and (hasattr(given, "num_shards") or hasattr(given, "n_shards")):  # Hugging Face
        count = getattr(given, "num_shards", None) or given.n_shards
        return [given.shard(num_shards=count, index=at) for at in range(count)]
    shards = list(given) if isinstance(given, list | tuple) else [given]
    for shard in shards:
        refuse_loader(shard)
        if not hasattr(shard, "__iter__"):
            raise UsageError(f"a stream must be iterable, got a {type(shard).__name__}.")
        if iter(shard) is shard:
            raise UsageError(
                f"a {type(shard).__name__} can be iterated only once, and every epoch reads the stream again: give an "
                "object whose __iter__ starts anew, such as an IterableDataset."
            )
    return shards


def _lengths_of(shards: Sequence[Any], given: int | Sequence[int] | None) -> list[int]:
    lengths = [given] if isinstance(given, int) else given
    if lengths is None:
        lengths = [len(shard) if hasattr(shard, "__len__") else sum(1 for _ in shard) for shard in shards]
    if len(lengths) != len(shards) or any(n < 1 for n in lengths):
        raise UsageError(
            f"length must hold one number of examples, 1 or more, for each of the {len(shards)} shards, got {given}: "
            "leave it out to have them counted."
        )
    return [int(n) for n in lengths]


def _order(lengths: list[int], window: int, lanes: int, size: int, seed: int, epoch: int) -> Tensor:
    return _cached_order(tuple(lengths), window, lanes, size, seed, epoch)


@lru_cache(maxsize=2)
def _cached_order(lengths: tuple[int, ...], window: int, lanes: int, size: int, seed: int, epoch: int) -> Tensor:
    """The numbers of all examples: the lanes' batches in turn, then what is left of each lane."""
    random = generator(seed, "stream/order", epoch)
    starts = [0, *accumulate(lengths)]
    turns = torch.randperm(len(lengths), generator=random).tolist()
    ways = []
    for lane in range(lanes):
        pieces = [
            piece[torch.randperm(len(piece), generator=random)]
            for which in turns[lane::lanes]
            for piece in torch.arange(starts[which], starts[which + 1]).split(window)
        ]
        ways.append(torch.cat(pieces).split(size))
    longest = max(len(way) for way in ways)
    full = [way[at] for at in range(longest) for way in ways if at < len(way) and len(way[at]) == size]
    return torch.cat([*full, *(way[-1] for way in ways if len(way[-1]) < size)])
