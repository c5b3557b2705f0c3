"""A linear layer over long sequences, from its per-example gradients.

    W_j = Σ_p δ_jp a_jpᵀ over the positions p of example j,     q_j = ⟨W_j, G⟩,     gradient = Σ_j c_j W_j

One product of N·in·out gives alignments and gradient together, where ⟨δ_j, G a_j⟩ and the weighted gradient take two.
Between stand in·out numbers for each example, which are written once and read twice: that pays where an example has
many positions, and is done for a few examples at a time. It was timed on CPUs; GPUs do without it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

POSITIONS = 64  # of an example, from where on it pays
AT_ONCE = 1 << 24  # numbers that stand between


def each_pays(a: Tensor, delta: Tensor) -> bool:
    """Whether forming per-example gradients is less work than doing without."""
    full = delta.device.type == "cpu" and delta.dtype in (torch.float32, torch.float64)
    return full and a.ndim > 2 and math.prod(a.shape[1:-1]) >= POSITIONS


def each_example(delta: Tensor, a: Tensor, direction: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """q (B,) and Σ_j c_j W_j (out, in)."""
    high, wide = direction.shape
    total, alignment = direction.new_zeros(high * wide), []
    few = max(1, AT_ONCE // (high * wide))
    for d, x, c in zip(delta.split(few), a.split(few), coefficients.split(few), strict=True):
        gradients = torch.bmm(d.reshape(len(d), -1, high).mT, x.reshape(len(x), -1, wide)).flatten(1)
        alignment.append(gradients @ direction.flatten())
        total.addmv_(gradients.T, c)
    return torch.cat(alignment), total.view(high, wide)
