"""Examples of shards that can only be read forward, by their numbers."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from soseleto.data import structure
from soseleto.data.items import Collate, Items, Request, seed_generators
from soseleto.data.randomness import seed_for
from soseleto.errors import DataError, first_line

Key = str | Callable[[Any], Any] | None


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
