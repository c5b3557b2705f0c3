"""Examples with their places in the source, and batches of them for every rank without repetitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from soseleto.errors import UsageError


class Numbered(torch.utils.data.Dataset[tuple[int, Any]]):
    """The items of a data set, each with its place; ~i is item i where it only fills a batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[int, Any]:
        return i, self.dataset[max(i, ~i)]


class Repeated(torch.utils.data.Dataset[Any]):
    """n items of a data set: all of it, again and again."""

    def __init__(self, dataset: Any, n: int) -> None:
        self.dataset, self.n = dataset, n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> Any:
        return self.dataset[i % len(self.dataset)]


class WithIndex:
    """A collator of ``Numbered`` items, without those that only fill a batch: (index, batch)."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Sequence[tuple[int, Any]]) -> Any:
        own = [(i, item) for i, item in items if i >= 0]
        batch = self._collate([item for _, item in own or items[:1]])  # a rank without examples evaluates no loss
        return torch.tensor([i for i, _ in own], dtype=torch.int64), batch


class FullBatches(torch.utils.data.Sampler[list[int]]):
    """A batch sampler's batches, filled up to full size and to a multiple of the ranks.

    Samplers of ranks fill the last batches with examples that the epoch has had. Here these are marked: ~i for i.
    """

    def __init__(self, batches: Any, ranks: int) -> None:
        self._batches, self._ranks = batches, ranks
        self.sampler, self.batch_size = batches.sampler, batches.batch_size

    def __len__(self) -> int:
        return -(-len(self._batches) // self._ranks) * self._ranks

    def __iter__(self) -> Iterator[list[int]]:
        filling = list[int]()
        for batch in self._batches:
            filling = [~batch[0]]
            yield batch + filling * (self.batch_size - len(batch))
        yield from [filling * self.batch_size] * (len(self) - len(self._batches))


# Target batches without end, the same ones in every run with the same seed, from any position on.


class TargetBatches:
    """Batches of a small map-style data set in a new random order at every pass; ``drawn`` counts them.

    Every rank takes its own part of each batch.
    """

    def __init__(
        self,
        dataset: Any,
        size: int,
        collate: Callable[[Sequence[Any]], Any],
        *,
        seed: int,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        if len(dataset) < ranks:
            raise UsageError(f"the target has {len(dataset)} examples for {ranks} ranks: give at least one to each.")
        self.dataset, self.collate, self.seed = dataset, collate, seed
        self.size = min(size, len(dataset) // ranks)
        self.rank, self.ranks = rank, ranks
        self.drawn = 0

    def __next__(self) -> Any:
        each = self.size * self.ranks
        in_pass = len(self.dataset) // each
        number, place = divmod(self.drawn, in_pass)
        seeded = torch.Generator().manual_seed(self.seed + number)
        order = torch.randperm(len(self.dataset), generator=seeded)
        first = place * each + self.rank * self.size
        self.drawn += 1
        return self.collate([self.dataset[int(i)] for i in order[first : first + self.size]])
