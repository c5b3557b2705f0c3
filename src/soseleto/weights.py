"""A weight, a score and a number of visits per source example: 12 bytes together."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from soseleto.errors import DataError, UsageError


class Weights:
    """α, the score and the visits of n source examples, in the order of the data set.

    The weight is clipped to [0, 1]. The score is the running mean of an example's alignments and is never clipped, so
    that it still ranks examples whose weights tie at 0 or 1.
    """

    def __init__(self, n: int, *, initial: Tensor | float = 1.0, device: torch.device | str = "cpu") -> None:
        if n < 1:
            raise UsageError(f"there are {n} source examples: at least one is needed.")
        first = torch.as_tensor(initial, dtype=torch.float32)
        if not bool(((first >= 0.0) & (first <= 1.0)).all()):
            raise UsageError(f"the initial weight must lie in [0, 1], got {initial}.")
        self._hold(torch.zeros(3, n, dtype=torch.float32, device=device))
        self.values.copy_(first)

    def _hold(self, table: Tensor) -> None:
        """Keep everything in one table, so that a step reads and writes it in one operation each."""
        self._table = table
        self.values, self.scores, self._visits = table

    def __len__(self) -> int:
        return len(self.values)

    @property
    def visits(self) -> Tensor:
        """How often each example was seen, int32 (counted in float32, which is exact up to 16 million)."""
        return self._visits.to(torch.int32)

    def step(self, index: Tensor, change: Tensor, alignment: Tensor, rows: Tensor | None = None) -> Tensor:
        """α ← CLIP(α + change) for these examples, and the alignment enters their scores. Returns the new α, (B,).

        rows: the result of ``rows(index)``, if it was read before; it is changed in place.
        """
        rows = self.rows(index) if rows is None else rows
        moved, scores, visits = rows
        moved.add_(change).clamp_(0.0, 1.0)  # the only clip
        visits.add_(1.0)
        scores.addcdiv_(alignment - scores, visits)
        self.put(index, rows)
        return moved

    def rows(self, index: Tensor) -> Tensor:
        """Weights, scores and visits of these examples, (3, B); no index may occur twice (not checked on a GPU, which
        would have to synchronise)."""
        if not index.is_cuda and len(index):  # a rank's part of a batch may be empty
            self.check(index)
        return self._table.index_select(1, index)

    def put(self, index: Tensor, rows: Tensor) -> None:
        """Write back what ``rows`` returned."""
        self._table.index_copy_(1, index, rows)

    def check(self, index: Tensor) -> None:
        """Raise unless ``index`` holds indices of this source, each at most once."""
        if index.dtype != torch.int64 or index.ndim != 1:
            raise UsageError(f"source indices must be a vector of int64, got {index.dtype} {tuple(index.shape)}.")
        if len(index) == 0:
            raise UsageError("the batch has no source index: give at least one.")
        low, high = int(index.min()), int(index.max())
        if low < 0 or high >= len(self):
            raise UsageError(
                f"source index {low if low < 0 else high} is out of range for {len(self)} source examples: "
                f"use 0 to {len(self) - 1}."
            )
        places, counts = index.unique(return_counts=True)
        if len(places) != len(index):
            raise UsageError(
                f"source index {int(places[counts.argmax()])} occurs twice in one batch: "
                "draw batches without replacement."
            )

    def first(self, n: int) -> Weights:
        """The weights of the first n examples, in the same memory."""
        part = copy.copy(self)
        part._hold(self._table[:, :n])
        return part

    def summary(self, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums) -> dict[str, float]:
        """The distribution of the weights; ``effective_source`` is (Σα)²/Σα², the effective number of examples.

        over_ranks: sums over the processes that own the source examples
        """
        values = self.values.double()
        parts = [torch.ones_like(values), values, values.square(), values <= 0.0, values >= 1.0]
        sums = torch.stack([part.sum(dtype=torch.float64) for part in parts])
        n, total, squares, zeros, ones = over_ranks(sums.cpu()).tolist()
        return {
            "mean_weight": total / n,
            "effective_source": total * total / squares if squares else 0.0,
            "share_at_zero": zeros / n,
            "share_at_one": ones / n,
        }

    def order(self) -> Tensor:
        """Indices from the best example to the worst: by score, then by weight, then in the source's order."""
        by_weight = torch.sort(self.values, descending=True, stable=True).indices
        return by_weight[torch.sort(self.scores[by_weight], descending=True, stable=True).indices]

    def state(self) -> dict[str, Tensor]:
        return {"weights": self.values, "scores": self.scores, "visits": self.visits}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        for row, (name, mine) in zip(self._table, self.state().items(), strict=True):
            if name not in state or state[name].shape != mine.shape or state[name].dtype != mine.dtype:
                raise DataError(
                    f"the saved {name} do not fit {len(self)} source examples: they belong to another source."
                )
            row.copy_(state[name])
