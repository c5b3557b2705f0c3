"""Which labels are right, by a mixture of two Gaussians on the losses of all examples.

    x = (ℓ − min ℓ)/(max ℓ − min ℓ)
    r_ik = π_k N(x_i; μ_k, σ_k²) / Σ_j π_j N(x_i; μ_j, σ_j²)
    π_k = mean_i r_ik,   μ_k = Σ_i r_ik x_i / Σ_i r_ik,   σ_k² = Σ_i r_ik (x_i − μ_k)² / Σ_i r_ik + 5e-4

The probability that a label is right is r_i of the component with the smaller mean. As published: the two clusters of
k-means to start from, ten iterations and the variance that is added. Here all ten are taken, where the authors' stop
when the likelihood rises by less than 0.01.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

ITERATIONS = 10
ADDED_VARIANCE = 5e-4
_FEWEST = 1e-12  # examples in a component, so that an empty one has a mean


def right_probability(losses: Tensor) -> Tensor:
    """(N,) float64, of the losses (N,) of all examples."""
    x = losses.double()
    x = (x - x.min()) / (x.max() - x.min()).clamp(min=_FEWEST)
    r = _clusters(x)
    for _ in range(ITERATIONS):
        count = r.sum(1, keepdim=True) + _FEWEST
        mean = (r * x).sum(1, keepdim=True) / count
        variance = (r * (x - mean) ** 2).sum(1, keepdim=True) / count + ADDED_VARIANCE
        density = -0.5 * ((x - mean) ** 2 / variance + variance.log() + math.log(2 * math.pi))
        r = (density + (count / len(x)).log()).softmax(0)
    return torch.where(mean[0] <= mean[1], r[0], r[1])


def _clusters(x: Tensor) -> Tensor:
    """(2, N) of 0 and 1: the clusters of k-means, which starts from the smallest and the largest."""
    low, high = x.min(), x.max()
    for _ in range(ITERATIONS):
        upper = (x > (low + high) / 2).to(x.dtype)
        high = (upper * x).sum() / upper.sum().clamp(min=1.0)
        low = ((1 - upper) * x).sum() / (1 - upper).sum().clamp(min=1.0)
    return torch.stack([1 - upper, upper])
