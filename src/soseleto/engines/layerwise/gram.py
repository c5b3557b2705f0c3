"""Alignments of a linear layer with the target batch's own gradient, from two Gram matrices.

If the direction is the gradient of the current target batch, G = Σ_t δ_t a_tᵀ, and a source position j has

    ⟨δ_j, G a_j⟩ = Σ_t (δ_j·δ_t)(a_j·a_t),

which is T·(in + out) multiplications instead of in·out. A position is an example, or one element of its sequence.
"""

from __future__ import annotations

import math

from torch import Tensor

from soseleto.engines.contract import reductions_dtype

SAVING = 2  # the Gram form launches two products and the direct form one: its work must be at most half


def gram_pays(a: Tensor, delta: Tensor, targets: int) -> bool:
    """Whether Gram matrices with ``targets`` target rows take fewer multiplications than the product with G."""
    positions = targets * math.prod(a.shape[1:-1])
    wide, high = a.shape[-1], delta.shape[-1]
    return SAVING * positions * (wide + high) <= wide * high


def gram_alignment(delta: Tensor, a: Tensor, target_delta: Tensor, target_a: Tensor) -> Tensor:
    """⟨δ_j, G a_j⟩ of each source row, summed over its positions in float32 or better."""
    along = _gram(delta, target_delta).to(reductions_dtype(delta.dtype)).mul_(_gram(a, target_a))
    return along.sum(1).view(len(delta), math.prod(delta.shape[1:-1])).sum(1)


def _gram(source: Tensor, target: Tensor) -> Tensor:
    width = source.shape[-1]
    return source.reshape(-1, width) @ target.reshape(-1, width).T
