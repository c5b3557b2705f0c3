"""A linear layer on long sequences, from its per-example gradients.

    W_j = Σ_p δ_jp a_jpᵀ over the positions p of example j,     q_j = ⟨W_j, G⟩,     gradient = Σ_j c_j W_j

One product of N·in·out gives alignments and gradient together, where ⟨δ_j, G a_j⟩ and the weighted gradient take two.
The intermediate W_j has in·out numbers per example, written once and read twice. That pays if an example has many
positions; a few examples are treated at a time to limit memory. It was measured on CPUs and is not used on GPUs.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

POSITIONS = 64  # the number of positions per example from which it pays
AT_ONCE = 1 << 24  # the largest number of entries of all W_j held at a time


def each_pays(a: Tensor, delta: Tensor) -> bool:
    """Whether forming per-example gradients is faster than the direct form."""
    full = delta.device.type == "cpu" and delta.dtype in (torch.float32, torch.float64)
    return full and a.ndim > 2 and math.prod(a.shape[1:-1]) >= POSITIONS


def each_example(delta: Tensor, a: Tensor, direction: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """q (B,) and Σ_j c_j W_j (out, in)."""
    high, wide = direction.shape
    total, alignment = direction.new_zeros(high * wide), []
    count = max(1, AT_ONCE // (high * wide))  # examples at a time
    for d, x, c in zip(delta.split(count), a.split(count), coefficients.split(count), strict=True):
        gradients = torch.bmm(d.reshape(len(d), -1, high).mT, x.reshape(len(x), -1, wide)).flatten(1)
        alignment.append(gradients @ direction.flatten())
        total.addmv_(gradients.T, c)
    return torch.cat(alignment), total.view(high, wide)
