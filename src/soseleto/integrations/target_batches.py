"""Target batches without end, the same ones in every run with the same seed, from any position on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from soseleto.errors import UsageError


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
