"""Data that can only be read forward: an IterableDataset, streamed Hugging Face data, or several shards of such."""

from __future__ import annotations

import copy
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, tee
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from soseleto.data import structure
from soseleto.data.examples import Examples
from soseleto.data.image_decoding.workers import cores
from soseleto.data.items import Collate, Items, Request, seed_generators
from soseleto.data.live import MOST_WORKERS, Labels, Workers, checked
from soseleto.data.randomness import generator, seed_for
from soseleto.data.readers.read_once import own_random_state
from soseleto.data.structure import Inputs
from soseleto.errors import DataError, UsageError, first_line

FEW = 64  # examples from the beginning, for the fingerprint and the kind of labels
WINDOW = 1024  # examples of a shard that are shuffled together
_PIECE = 256

Key = str | Callable[[Any], Any] | None


class Stream:
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
        if workers is not None and workers < 0:
            raise UsageError(f"workers must be 0 or more, got {workers}.")
        self._key, self._collate_fn, self._window, self.workers = key, collate_fn, window, workers
        self.name = "given"
        self.classes: tuple[str, ...] | None = None
        self.truth: Tensor | None = None
        self.paths: tuple[str, ...] | None = None
        self.device = torch.device("cpu")
        self._labels = Labels(len(self))
        self._names: list[str | None] = [None] * len(self) if key is not None else []
        self._workers: Workers | None = None

    reads_ahead = True
    nbytes = 0
    ids = None

    def __repr__(self) -> str:
        return f"Stream({len(self._shards)} shards of {len(self)} examples)"

    def __len__(self) -> int:
        return sum(self._lengths)

    def named(self, name: str) -> Self:
        """The same stream, called so in messages."""
        other = self._copy()
        other.name = name
        return other

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
        count = self._count()
        return self._recorded(mine, self._by_workers(requests, count) if count else self._in_this_process(requests))

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        """The batches of an epoch: batch i holds examples of lane i mod lanes, so that each lane has one reader."""
        return _order(self._lengths, self._window, self._lanes, size, seed, epoch).split(size)

    def sample(self) -> Inputs:
        """The inputs of the first examples."""
        return self.take(torch.arange(min(FEW, len(self))))[0]

    def sample_labels(self) -> Tensor:
        """The labels of the first examples."""
        return self.take(torch.arange(min(FEW, len(self))))[1]

    def subset(self, index: Tensor | Sequence[int]) -> NoReturn:
        raise UsageError(f"the {self.name} is a stream, of which no part can be taken: write probes=None.")

    def in_memory(self) -> Examples:
        """All examples, read once."""
        inputs, labels = zip(*self.read(torch.arange(len(self)).split(_PIECE)), strict=True)
        ids = tuple(self.id_of(at) for at in range(len(self))) if self._names else None
        return Examples(structure.concatenate(inputs), torch.cat(labels), ids)

    def to(self, device: torch.device | str) -> Self:
        other = self._copy()
        other.device = torch.device(device)
        return other

    def fingerprint(self) -> str:
        """sha256 of the first examples and of the lengths of the shards."""
        inputs, labels = self.take(torch.arange(min(FEW, len(self))))
        digest = hashlib.sha256(f"{self._lengths}{structure.describe(inputs)}".encode())
        for tensor in structure.tensors((inputs, labels)):
            digest.update(tensor.cpu().contiguous().numpy().tobytes())
        return f"{len(labels)} of {len(self)} examples: {digest.hexdigest()}"

    def close(self) -> None:
        """End the worker processes; reading again starts new ones."""
        self._workers = None

    @property
    def _lanes(self) -> int:
        """Into how many parts the shards are divided; depends on the data alone, as the order of examples does."""
        return min(len(self._shards), MOST_WORKERS)

    def _count(self) -> int:
        """The number of worker processes: it divides the number of lanes, so that each lane is read by one of them."""
        wanted = min(self._lanes, cores() if self.workers is None else self.workers)
        return max((count for count in range(1, wanted + 1) if self._lanes % count == 0), default=0)

    def _copy(self) -> Self:
        other = copy.copy(self)
        other._workers = None
        return other

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

    def _in_this_process(self, requests: Iterable[Request]) -> Iterator[Any]:
        items = self._items
        for request in requests:
            with own_random_state():
                made = items.__getitems__(request)
            yield checked(made)

    def _by_workers(self, requests: Iterator[Request], count: int) -> Iterator[Any]:
        if self._workers is None or self._workers.busy:
            self._workers = Workers(self._items, count, pin=self.device.type == "cuda")
        return map(checked, self._workers.read(requests))

    def _read_missing(self) -> None:
        missing = self._labels.missing()
        for _ in self.read(missing.split(_PIECE)) if len(missing) else ():
            pass


class ForwardItems(Items):
    """Examples of shards by their number, each shard read forward; going back begins it anew."""

    def __init__(
        self,
        shards: Sequence[Any],
        lengths: Sequence[int],
        window: int,
        key: Key,
        collate_fn: Collate | None,
        name: str,
    ) -> None:
        super().__init__(None, collate_fn, name)
        self._shards, self._window, self._key = shards, window, key
        self._starts = [0, *accumulate(lengths)]
        self._open: dict[int, _Open] = {}

    def _batch(self, request: Request) -> Any:
        if not request.index:
            inputs, labels, _ = self._batch(Request([0], request.seed, request.purpose))
            return structure.change(lambda tensor: tensor[:0], inputs), labels[:0], []
        found = {at: self._at(at, request) for at in sorted(request.index)}
        items, names = zip(*(found[at] for at in request.index), strict=True)
        seed_generators(seed_for(request.seed, f"{request.purpose}/collate", request.index[0]))
        inputs, labels = self._collated(list(items), request.index)
        return inputs, labels, list(names) if self._key is not None else []

    def _at(self, number: int, request: Request) -> tuple[Any, str]:
        """The example and its name."""
        which = bisect_right(self._starts, number) - 1
        place = number - self._starts[which]
        shard = self._open.get(which)
        if shard is None or shard.purpose != request.purpose or not shard.can_reach(place):
            seed_generators(seed_for(0, "stream/begin", which))  # not of the epoch: the order must not change
            shard = self._open[which] = _Open(iter(self._shards[which]), self._window, request.purpose)
        try:
            item = shard.item(place, lambda at: seed_for(request.seed, f"{request.purpose}/item", number - place + at))
        except StopIteration:
            raise DataError(
                f"shard {which} of the {self.name} stream ended after {shard.next} examples, and has "
                f"{self._starts[which + 1] - self._starts[which]} by its length: give a stream that does not change."
            ) from None
        except Exception as error:
            raise DataError(
                f"example {shard.next} of shard {which} of the {self.name} stream cannot be read "
                f"({type(error).__name__}: {first_line(error)}): mend the stream."
            ) from error
        if shard.next == self._starts[which + 1] - self._starts[which] and not shard.held:
            del self._open[which]
        return self._named(item)

    def _named(self, item: Any) -> tuple[Any, str]:
        if self._key is None:
            return item, ""
        if callable(self._key):
            return item, str(self._key(item))
        if not isinstance(item, Mapping) or self._key not in item:
            raise DataError(f"an example of the {self.name} stream has no entry {self._key!r}, which is to be its key.")
        return {name: value for name, value in item.items() if name != self._key}, str(item[self._key])


class _Open:
    """A shard being read: the examples of the present window that were read and not yet asked for."""

    def __init__(self, items: Iterator[Any], window: int, purpose: str) -> None:
        self._items, self._window, self.purpose = items, window, purpose
        self.next, self._present = 0, 0
        self.held: dict[int, Any] = {}

    def can_reach(self, place: int) -> bool:
        """Whether the example is still to come, or is held."""
        return place >= self.next or place in self.held

    def item(self, place: int, seed: Callable[[int], int]) -> Any:
        window = place // self._window
        if window != self._present:
            self.held, self._present = {}, window
        while self.next <= place:
            seed_generators(seed(self.next))
            item = next(self._items)
            if self.next // self._window == window:
                self.held[self.next] = item
            self.next += 1
        return self.held.pop(place)


def is_stream(data: Any) -> bool:
    """Whether this can only be iterated."""
    return hasattr(data, "__iter__") and not hasattr(data, "__getitem__") and not isinstance(data, Tensor | Mapping)


def _shards_of(given: Any) -> list[Any]:
    if hasattr(given, "shard") and (hasattr(given, "num_shards") or hasattr(given, "n_shards")):  # Hugging Face
        count = getattr(given, "num_shards", None) or given.n_shards
        return [given.shard(num_shards=count, index=at) for at in range(count)]
    shards = list(given) if isinstance(given, list | tuple) else [given]
    for shard in shards:
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
