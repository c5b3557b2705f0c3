"""Label-noise matrices: Q[j, i] = p(label j | class i), so every column sums to 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def project(matrix: Tensor) -> Tensor:
    """The nearest matrix (least squares) whose columns are probabilities.

    >>> project(torch.tensor([[2.0, 0.5], [0.0, 0.5]]))
    tensor([[1.0000, 0.5000],
            [0.0000, 0.5000]])
    """
    n = len(matrix)
    ordered = matrix.sort(dim=0, descending=True).values
    ranks = torch.arange(1, n + 1, device=matrix.device, dtype=matrix.dtype)[:, None]
    surplus = (ordered.cumsum(0) - 1.0) / ranks
    kept = (ordered > surplus).sum(0, keepdim=True).clamp_min(1)  # below 1 only for NaN, which is propagated
    return (matrix - surplus.gather(0, kept - 1)).clamp_min(0.0)


def label_counts(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Σ over examples of p(class k | x)·[label = j], as a matrix (k, j)."""
    return probabilities.T @ F.one_hot(labels, probabilities.shape[1]).to(probabilities.dtype)


def from_confusions(clean: Tensor, noisy: Tensor) -> Tensor:
    """Q from one classifier's confusion matrices on clean and on noisy labels.

    With C[k, i] = p(prediction k, class i) on clean examples and C̃[k, j] = p(prediction k, label j) on noisy ones, and
    labels that depend on the class alone, C̃ = C Qᵀ. For a weak classifier many Q explain C̃ about equally well, so the
    least-squares solution is regularised towards the best symmetric noise, in which a share η of every class is spread
    evenly over the others: even a classifier that is hardly better than chance determines η well.
    """
    clean, noisy = clean.cpu().double() / clean.cpu().sum(), noisy.cpu().double() / noisy.cpu().sum()
    identity = torch.eye(len(clean), dtype=clean.dtype)
    spread = (1.0 - identity) / (len(clean) - 1) - identity
    explained = clean @ spread
    eta = ((noisy - clean) * explained).sum() / explained.square().sum().clamp_min(torch.finfo(clean.dtype).tiny)
    even = identity + eta.clamp(0.0, 1.0) * spread
    squares = clean.T @ clean
    pull = _PULL * squares.trace() / len(clean) * identity
    return project(torch.linalg.solve(squares + pull, clean.T @ noisy + pull @ even).T)


_PULL = 0.03  # strength of the regularisation, in units of the mean square of C
