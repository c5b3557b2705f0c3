"""Examples with their places in the source, and batches of them for every rank without repetitions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


class Numbered(torch.utils.data.Dataset[tuple[int, Any]]):
    """The items of a data set, each with its place; ~i is item i where it only fills a batch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[int, Any]:
        return i, self.dataset[max(i, ~i)]


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
