"""A weight, a score and a number of visits per source example: 12 bytes each, on disk where they are many."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soseleto.errors import DataError, UsageError

BINS = 20
MOST_IN_MEMORY = 1 << 30  # bytes; a larger table of numbers per example is memory-mapped
_CHUNK = 1 << 24  # examples summarised at a time, to need little temporary memory for 10⁸ of them


@dataclass(frozen=True)
class Summary:
    """The distribution of the weights. ``effective`` is (Σα)²/Σα², the effective number of source examples."""

    mean: float
    effective: float
    share_at_zero: float
    share_at_one: float
    histogram: tuple[int, ...]  # BINS equal bins over [0, 1]


class Weights:
    """α, the score and the visits of n source examples, in the order of the data set.

    The weight is clipped to [0, 1]. The score is the running mean of an example's alignments and is never clipped, so
    that it still ranks examples whose weights tie at 0 or 1.
    """

    def __init__(self, n: int, *, initial: float = 1.0, device: torch.device | str = "cpu") -> None:
        if n < 1:
            raise UsageError(f"there are {n} source examples: at least one is needed.")
        if not 0.0 <= initial <= 1.0:
            raise UsageError(f"the initial weight must lie in [0, 1], got {initial}.")
        self._hold(per_example(3, n, device))
        self.values.fill_(initial)

    def _hold(self, table: Tensor) -> None:
        """Keep everything in one table, so that a step reads and writes it in one operation each."""
        self._table = table
        self._by_example = table.T if table.T.is_contiguous() and len(table.T) > 1 else None  # mapped: see per_example
        self.values, self.scores, self._visits = table

    def __len__(self) -> int:
        return len(self.values)

    @property
    def visits(self) -> Tensor:
        """How often each example was seen, int32 (counted in float32, which is exact up to 16 million)."""
        return self._visits.to(torch.int32)

    def take(self, index: Tensor) -> Tensor:
        """The weights of these examples, (B,)."""
        return self.rows(index)[0]

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
        if self._by_example is not None:
            return self._by_example.index_select(0, index).T
        return self._table.index_select(1, index)

    def put(self, index: Tensor, rows: Tensor) -> None:
        """Write back what ``rows`` returned."""
        if self._by_example is not None:
            self._by_example.index_copy_(0, index, rows.T)
        else:
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

    def summary(self, over_ranks: Callable[[Tensor], Tensor] = lambda sums: sums) -> Summary:
        """The distribution of the weights; ``over_ranks`` sums over the processes that own the source examples."""
        sums = torch.zeros(5 + BINS, dtype=torch.float64)  # n, Σα, Σα², at zero, at one, histogram
        for piece in self.values.split(_CHUNK):
            numbers = [len(piece), piece.sum(dtype=torch.float64), piece.square().sum(dtype=torch.float64)]
            numbers += [(piece <= 0.0).sum(), (piece >= 1.0).sum()]
            sums[:5] += torch.tensor([float(number) for number in numbers], dtype=torch.float64)
            sums[5:] += torch.histc(piece, BINS, 0.0, 1.0).double().cpu()
        n, total, squares, zeros, ones, *histogram = over_ranks(sums).tolist()
        return Summary(
            mean=total / n,
            effective=total * total / squares if squares else 0.0,
            share_at_zero=zeros / n,
            share_at_one=ones / n,
            histogram=tuple(int(count) for count in histogram),
        )

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

    def save(self, path: str | Path) -> None:
        """Write weights, scores and visits as safetensors (no pickle)."""
        _safetensors().torch.save_file({k: v.cpu().contiguous() for k, v in self.state().items()}, str(path))

    @classmethod
    def load(cls, path: str | Path, *, device: torch.device | str = "cpu") -> Weights:
        """Read what ``save`` wrote."""
        library = _safetensors()
        try:
            state = library.torch.load_file(str(path))
            loaded = cls(len(state["weights"]), device=device)
        except (OSError, KeyError, UsageError, library.SafetensorError) as error:
            raise DataError(f"{path} is not a file of saved weights ({error}): write one with Weights.save.") from error
        loaded.load_state(state)
        return loaded


def per_example(numbers: int, n: int, device: torch.device | str = "cpu") -> Tensor:
    """Zeros (numbers, n), float32. On the CPU a table above MOST_IN_MEMORY is mapped from a file without a name, in the
    folder SOSELETO_CACHE or else that of temporary files, with the numbers of one example side by side."""
    size = numbers * n
    if torch.device(device).type != "cpu" or 4 * size <= MOST_IN_MEMORY:
        return torch.zeros(numbers, n, dtype=torch.float32, device=device)
    folder = os.environ.get("SOSELETO_CACHE") or tempfile.gettempdir()
    try:
        os.makedirs(folder, exist_ok=True)
        handle, path = tempfile.mkstemp(prefix="soseleto-weights-", dir=folder)
        try:
            if hasattr(os, "posix_fallocate"):  # a full disk is noticed now, and not as a crash in a step
                os.posix_fallocate(handle, 0, 4 * size)
            else:
                os.truncate(handle, 4 * size)
            return torch.from_file(path, shared=True, size=size, dtype=torch.float32).view(n, numbers).T
        finally:
            os.close(handle)
            os.unlink(path)  # the mapping keeps the file until it is released
    except OSError as error:
        raise UsageError(
            f"{n:,} source examples need {4 * size / 2**30:.1f} GiB for their weights in {folder}, which failed "
            f"({error}): set SOSELETO_CACHE to a folder on a larger disk."
        ) from error


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise UsageError("saving weights needs safetensors: type pip install safetensors.") from error
    return safetensors
