"""Which labels ProMix trains on as they are, and which classes both networks agree on."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def selected(losses: Tensor, labels: Tensor, *, classes: int, share: float, confidence: float) -> Tensor:
    """(N,) bool: the small losses of every class, and labels that the network predicts confidently.

    losses: −log p_y of all examples (N,); labels: (N,)
    share: of all N examples, divided evenly over the classes
    confidence: above 1/2, so that a label of this probability is the prediction
    """
    most = math.ceil(share * len(losses) / classes)
    return small_losses(losses, labels, classes, most) | ((-losses).exp() >= confidence)


def small_losses(losses: Tensor, labels: Tensor, classes: int, most: int) -> Tensor:
    """(N,) bool: the ``most`` smallest losses among the examples of every label, or all where there are fewer."""
    order = losses.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]  # by label, then by loss
    counts = torch.zeros(classes, dtype=torch.int64, device=labels.device)
    counts.scatter_add_(0, labels, torch.ones_like(labels))
    first = counts.cumsum(0) - counts  # place of every label's smallest loss
    rank = torch.arange(len(order), device=order.device) - first[labels[order]]
    found = torch.empty(len(order), dtype=torch.bool, device=order.device)
    found[order] = rank < most
    return found


def agreed(p: Tensor, confidence: float) -> tuple[Tensor, Tensor]:
    """(B,) bool: both networks predict the same class confidently; and that class. p: (2, B, C)."""
    highest, predictions = p.max(2)
    sure = (highest >= confidence).all(0)
    return sure & (predictions[0] == predictions[1]), predictions[0]
