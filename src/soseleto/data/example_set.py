"""What training needs of a data set, whether it is in memory, read by worker processes, or a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from soseleto.data.structure import Inputs


class ExampleSet(Protocol):
    """Examples by index. ``Examples`` holds them in memory, ``Live`` reads them when they are needed."""

    @property
    def labels(self) -> Tensor: ...

    @property
    def ids(self) -> tuple[str, ...] | None: ...

    @property
    def classes(self) -> tuple[str, ...] | None: ...

    @property
    def truth(self) -> Tensor | None: ...

    @property
    def paths(self) -> tuple[str, ...] | None: ...

    @property
    def device(self) -> torch.device:
        """Where batches are."""
        ...

    @property
    def nbytes(self) -> int:
        """Memory that the inputs and labels take."""
        ...

    @property
    def reads_ahead(self) -> bool:
        """Whether batches are read one by one before they are needed, so that many are never gathered at once."""
        ...

    def __len__(self) -> int: ...

    def id_of(self, index: int) -> str:
        """The id of one example, by its index in the data set."""
        ...

    def take(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and labels of a few examples."""
        ...

    def read(
        self, batches: Iterable[Tensor], *, seed: int = 0, purpose: str = "read"
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels of each batch of indices; what is random in an item follows (seed, purpose, index)."""
        ...

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        """The index batches of an epoch; together they hold every example exactly once.

        device: where the examples are; indices for other processes stay on the CPU
        """
        ...

    def sample(self) -> Inputs:
        """Inputs from which statistics are computed: of all examples, or of many."""
        ...

    def sample_labels(self) -> Tensor:
        """Labels of all examples, or of some where reading all would take an epoch."""
        ...

    def subset(self, index: Tensor | Sequence[int]) -> Self:
        """The selected examples, in this order; ``index`` holds indices or is a boolean mask."""
        ...

    def to(self, device: torch.device | str) -> Self: ...

    def fingerprint(self) -> str:
        """Differs between different data, and is the same in every run."""
        ...

    def close(self) -> None:
        """Release what reading holds, such as worker processes."""
        ...


def in_pieces(n: int, size: int = 1000) -> tuple[Tensor, ...]:
    """The indices 0 to n - 1, at most ``size`` at a time."""
    return torch.arange(n).split(size)
