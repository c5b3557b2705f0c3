"""Views of the rows of a table: as they are to judge them by, and without some of their values to learn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from soseleto.data.draws import Draws
from soseleto.errors import UsageError


@dataclass(frozen=True)
class FeatureViews:
    """Makes of rows of numbers (N, D) the tuple (weak view, strong view, ...), for methods that take such batches.

    The weak view is the row itself. In a strong view some values are replaced by what stands for a missing one: the
    source's mean of that number; in a table with a preparation the median, or the code of a missing category.

    drop: the probability that a value is dropped
    count: strong views of every row, each with its own draws
    missing: (D,) what stands for a missing value; ``fit`` finds it in the source
    columns: (D,) numbers of one column are dropped together; by default each is a column
    """

    drop: float = 0.4
    count: int = 2
    missing: tuple[float, ...] = field(default=(), repr=False)
    columns: tuple[int, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not 0.0 <= self.drop < 1.0:
            raise UsageError(f"drop of FeatureViews must be a probability below 1, got {self.drop}: say 0.4.")
        if self.count < 1:
            raise UsageError(f"count of FeatureViews must be at least 1, got {self.count}.")

    @property
    def nothing(self) -> bool:
        """Whether batches are returned unchanged; views are always made."""
        return False

    def __call__(self, inputs: Tensor, draws: Draws) -> tuple[Tensor, ...]:
        missing, column = _constants(self, str(inputs.device), inputs.dtype)
        numbers = draws.uniform(self.count * (max(self.columns) + 1)).view(self.count, -1, len(inputs))
        dropped = (numbers < self.drop).transpose(1, 2).index_select(2, column)  # (count, N, D)
        return inputs, *(torch.where(one, missing, inputs) for one in dropped)


@lru_cache(maxsize=8)
def _constants(views: FeatureViews, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    missing = torch.tensor(views.missing, dtype=dtype, device=device)
    return missing, torch.tensor(views.columns, device=device)
