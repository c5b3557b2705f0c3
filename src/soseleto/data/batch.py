"""One batch of source or target examples: indices, inputs and labels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soseleto.data import structure
from soseleto.data.structure import Inputs


@dataclass(frozen=True)
class Batch:
    """Source or target examples: indices into the data set, inputs and labels, all of length B.

    inputs: a tensor, or any structure of tensors; a mapping is passed to the model as keyword arguments, a tuple or
        list as positional ones
    whole: size of the step's whole batch if this is only a part of it.
    """

    index: Tensor
    inputs: Inputs
    labels: Tensor
    whole: int | None = None

    def __len__(self) -> int:
        return len(self.index)

    @property
    def total(self) -> int:
        """The size of the whole batch."""
        return len(self) if self.whole is None else self.whole

    def split(self, size: int | list[int]) -> list[Batch]:
        """Parts of at most ``size`` examples, or of the given sizes."""
        inputs = structure.split(self.inputs, size)
        pieces = zip(self.index.split(size), inputs, self.labels.split(size), strict=True)
        return [Batch(*piece, whole=self.total) for piece in pieces]

    def to(self, device: torch.device) -> Batch:
        index, inputs, labels = structure.to_device((self.index, self.inputs, self.labels), device)
        return replace(self, index=index, inputs=inputs, labels=labels)
