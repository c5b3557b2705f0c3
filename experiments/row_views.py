"""Views of embeddings, for the strong recipe on rows of numbers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from soseleto.data.augment import AnyViews
from soseleto.data.batches import ExampleRandom


@dataclass(frozen=True)
class FeatureViews(AnyViews):
    """Views of rows of numbers (N, D).

    The weak view is the row itself. In a strong view some values are replaced by the source's mean of that number.

    drop: the probability that a value is dropped
    count: strong views of every row, each with its own draws
    missing: (D,) what stands for a missing value
    """

    drop: float = 0.4
    count: int = 2
    missing: tuple[float, ...] = field(default=(), repr=False)
    made_of, wanted = "rows", "views of rows are made of numbers (D,)"

    def __call__(self, inputs: Tensor, random: ExampleRandom) -> tuple[Tensor, ...]:
        missing = torch.tensor(self.missing, dtype=inputs.dtype, device=inputs.device)
        numbers = random.uniform(self.count * len(self.missing)).view(self.count, -1, len(inputs))
        dropped = (numbers < self.drop).transpose(1, 2)  # (count, N, D)
        return inputs, *(torch.where(mask, missing, inputs) for mask in dropped)
