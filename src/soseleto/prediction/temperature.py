"""Temperature scaling: one scalar that calibrates a classifier's probabilities.

    T = argmin Σ_i −log softmax(z_i / T)[y_i]

over held-out examples with logits z. The predicted classes do not change. (Guo et al. 2017.)
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.errors import DataError

_LOWEST, _HIGHEST = 0.05, 20.0
_GOLDEN = (math.sqrt(5) - 1) / 2


def fit_temperature(outputs: Tensor, labels: Tensor) -> float:
    """The temperature in [0.05, 20] with the smallest cross-entropy, by golden-section search: it is convex in 1/T.

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
    >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])), 2)  # 3 of 4 correct: logit log 3
    3.64
    """
    if outputs.ndim != 2 or labels.shape != (len(outputs),) or labels.is_floating_point() or not len(labels):
        raise DataError(
            f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)} cannot be calibrated: "
            "give (N, classes) outputs and N class indices."
        )
    logits = outputs.detach().to("cpu", torch.float64)
    if not bool(logits.isfinite().all()):
        raise DataError("some outputs are NaN or infinite and cannot be calibrated: check the inputs.")
    low, high = 1 / _HIGHEST, 1 / _LOWEST
    while high - low > 1e-6:
        left, right = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
        if _loss(logits, labels, left) <= _loss(logits, labels, right):
            high = right
        else:
            low = left
    return 2 / (low + high)


def calibration_error(probabilities: Tensor, labels: Tensor, bins: int = 15) -> float:
    """Expected calibration error: mean absolute gap between confidence and accuracy over the bins."""
    confidence, predicted = probabilities.to(torch.float64).max(1)
    correct = (predicted == labels).double()
    bin_of = (confidence * bins).long().clamp(max=bins - 1)
    gaps = torch.zeros(bins, dtype=torch.float64).index_add_(0, bin_of, confidence - correct)
    return float(gaps.abs().sum() / len(labels))


def _loss(logits: Tensor, labels: Tensor, inverse: float) -> float:
    return float(F.cross_entropy(logits * inverse, labels))
