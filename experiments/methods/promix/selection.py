"""Which labels ProMix trains on as they are, and which examples both networks agree on."""

from __future__ import annotations

import torch
from torch import Tensor


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


def agreed(p: Tensor, kept: Tensor, confidence: float, most: int) -> Tensor:
    """(B,) bool: not ``kept``, but both networks predict the same class with more than this confidence.

    The surest ones, so that at most ``most`` examples are labelled with those that are kept. p: (2, B, C)
    """
    highest, predictions = p.max(2)
    sure = (highest > confidence).all(0) & (predictions[0] == predictions[1]) & ~kept
    order = torch.where(sure, -highest.mean(0), torch.inf).argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return sure & (rank < most - kept.sum())
