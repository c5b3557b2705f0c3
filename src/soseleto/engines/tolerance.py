"""How far two computations of the same gradient may differ by rounding."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Relative errors, by the lowest precision that takes part in the computation."""

    half: float  # bfloat16 or float16
    tf32: float  # float32 on a GPU, where products may be computed with ten bits
    single: float
    double: float

    def of(self, dtypes: set[torch.dtype], *, is_cuda: bool) -> float:
        if dtypes & {torch.bfloat16, torch.float16}:
            return self.half
        if torch.float32 in dtypes:
            return self.tf32 if is_cuda else self.single
        return self.double
