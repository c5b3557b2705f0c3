"""Examples with their places in the source, and target batches for every rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from soseleto.errors import UsageError


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

    def __call__(self, items: Sequence[tuple[int, Any]]) -> tuple[Tensor, Any]:
        return torch.tensor([i for i, _ in items]), self._collate([item for _, item in items])


class TargetBatches:
    """Batches of a small map-style data set in a new random order at every pass; ``drawn`` counts them.

    They are the same in every run with the same seed, from any position on; every rank takes its own part of each.
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
