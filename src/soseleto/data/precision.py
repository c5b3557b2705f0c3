"""Where float32 is not enough: values far from 0 and close together, such as Unix times and ids."""

from __future__ import annotations

import torch
from torch import Tensor

SHARE = 1e-4  # of a column's spread by which rounding may move its values
_ROWS = 1024  # at a time, to bound the memory


def rounded_away(values: Tensor, most: Tensor) -> bool:
    """Whether float32 would move a value of (N, C, ...) by more than ``most``, (C,) by column or (1,) for all."""
    if values.dtype != torch.float64:
        return False
    limit = most.to(values.device).reshape((1, -1) + (1,) * (values.ndim - 2))
    return any(bool(((rows - rows.float()).abs() > limit).any()) for rows in values.split(_ROWS))
