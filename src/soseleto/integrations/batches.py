"""Examples with their places in the source, and target batches without end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from soseleto.data.batches import TargetCycle

INDEX = "soseleto_index"  # the entry of a batch with the places of its examples in the source


class Numbered(torch.utils.data.Dataset[tuple[int, Any]]):
    """The items of a data set, each with its place."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, i: int) -> tuple[int, Any]:
        return i, self.dataset[i]


class WithIndex:
    """A collator of ``Numbered`` items: (index, batch)."""

    def __init__(self, collate: Callable[[Sequence[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Sequence[tuple[int, Any]]) -> Any:
        index, batch = zip(*items, strict=True)
        return torch.tensor(index), self._collate(list(batch))


class TargetBatches:
    """Endless batches of a small data set, the same ones in every run with the same seed; ``drawn`` counts them.

    Every rank takes its own part of each batch. Of several data sets by name, the tasks, there are equally many
    examples in each batch, up to one.
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
        tasks = [*dataset.values()] if isinstance(dataset, Mapping) else [dataset]
        self.collate = collate
        self.dataset: torch.utils.data.ConcatDataset[Any] = torch.utils.data.ConcatDataset(tasks)
        self.size = min(size, len(self.dataset) // ranks)
        self.drawn = 0
        of_task = torch.arange(len(tasks)).repeat_interleave(torch.tensor([*map(len, tasks)]))
        self._cycle = TargetCycle(len(self.dataset), self.size * ranks, seed, of_task if len(tasks) > 1 else None)
        self._mine = slice(rank * self.size, (rank + 1) * self.size)

    def __next__(self) -> Any:
        places = self._cycle(self.drawn)[self._mine]
        self.drawn += 1
        return self.collate([self.dataset[i] for i in places.tolist()])
