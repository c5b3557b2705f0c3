"""A linear layer on long sequences, from its per-example gradients.

    W_j = Σ_p δ_jp a_jpᵀ over the positions p of example j,     q_j = ⟨W_j, G⟩,     gradient = Σ_j c_j W_j

One product of N·in·out gives alignments and gradient together, where ⟨δ_j, G a_j⟩ and the weighted gradient take two.
The intermediate W_j has in·out numbers per example, written once and read again. That pays if an example has many
positions; a few examples are treated at a time to limit memory.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from soseleto.engines.layerwise import kernels

# The number of positions per example from which it pays on a CPU; on x86 it takes 1.6 to 2 times the direct form at 64
# positions, 0.6 to 1.3 times at 128, and 0.5 to 0.9 times at 256 (layers of 384 to 3,072, B=32).
POSITIONS = 192
POSITIONS_ON_GPU = 320  # measured on an H200: at 197 positions it costs up to 1.5 times the direct form, at 1,024 half
AT_ONCE = 1 << 24  # the largest number of entries of all W_j held at a time
AT_ONCE_ON_GPU = 1 << 27


def each_pays(a: Tensor, delta: Tensor) -> bool:
    """Whether forming per-example gradients is faster than the direct form."""
    if a.ndim < 3:
        return False
    positions = math.prod(a.shape[1:-1])
    if delta.is_cuda:
        return positions >= POSITIONS_ON_GPU and delta.dtype in kernels.HALF and kernels.found()
    return positions >= POSITIONS and delta.dtype in (torch.float32, torch.float64)


def each_example(delta: Tensor, a: Tensor, direction: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """q (B,) and Σ_j c_j W_j (out, in); on a GPU both in float32."""
    high, wide = direction.shape
    total = torch.zeros(high * wide, dtype=_total_dtype(direction), device=direction.device)
    count = max(1, (AT_ONCE_ON_GPU if delta.is_cuda else AT_ONCE) // (high * wide))  # examples at a time
    along, coefficients = direction.flatten(), coefficients.to(total.dtype)
    reduce = kernels.reduce_gradients if delta.is_cuda else _reduce
    alignment = []
    for d, x, c in zip(delta.split(count), a.split(count), coefficients.split(count), strict=True):
        gradients = torch.bmm(d.reshape(len(d), -1, high).mT, x.reshape(len(x), -1, wide)).flatten(1)
        alignment.append(reduce(gradients, along, c, total))
    return torch.cat(alignment), total.view(high, wide)


def _total_dtype(direction: Tensor) -> torch.dtype:
    return torch.float32 if direction.is_cuda else direction.dtype


def _reduce(gradients: Tensor, direction: Tensor, coefficients: Tensor, total: Tensor) -> Tensor:
    total.addmv_(gradients.T, coefficients)
    return gradients @ direction
