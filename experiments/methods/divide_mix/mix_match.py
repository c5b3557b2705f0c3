"""What DivideMix trains a network on, after MixMatch (Berthelot et al., 2019), and the loss."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from soseleto.data.batches import ExampleRandom
from soseleto.methods.teacher import one_hot, quantiles, sharpened


def given_classes(own: Tensor, both: Tensor, labels: Tensor, w: Tensor, labelled: Tensor, temperature: float) -> Tensor:
    """s (B, C): co-refined labels where ``labelled`` (B,), co-guessed classes elsewhere.

    own: p of the network (B, C); both: mean of the two networks'; w: probability that the label is right (B,)
    """
    w = w[:, None].to(own.dtype)
    refined = w * one_hot(labels, own.shape[1]) + (1 - w) * own
    return sharpened(torch.where(labelled[:, None], refined, both), temperature)


def mixed_alike(
    inputs: Tensor, classes: Tensor, draws: ExampleRandom, a: float, side: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mixup with one λ = max(b, 1 − b) of the whole batch, b ~ Beta(a, a): every row stays nearer to its own image.

    side: (R,) bool; rows are mixed with rows of the same side
    """
    order, u = draws.uniform(2)
    b = quantiles(u[:1], a)  # an index without dimensions would wait for the GPU
    partner = order.argsort() if side is None else partners(order, side)
    share = torch.maximum(b, 1 - b)
    blend, inverse = share.to(inputs.dtype), (1 - share).to(inputs.dtype)
    return blend * inputs + inverse * inputs[partner], share * classes + (1 - share) * classes[partner]


def partners(order: Tensor, side: Tensor) -> Tensor:
    """(R,) a permutation, random by ``order`` in [0, 1), that maps every row to one of the same side."""
    places = torch.arange(len(side), device=side.device)
    listed = (places + len(side) * side).argsort()  # both lists: one side, then the other
    drawn = (order + side).argsort()
    found = torch.empty_like(drawn)
    found[listed] = drawn
    return found


def loss_of(scores: Tensor, classes: Tensor, labelled: Tensor, unlabelled: Tensor | float) -> tuple[Tensor, Tensor]:
    """L, and H(y, p) of every row (R,).

    scores, classes: (R, C); labelled: (R,) bool; unlabelled: λ_u
    """
    log_p = scores.log_softmax(1)
    p, each = log_p.exp(), -(classes * log_p).sum(1)
    apart = ((p - classes) ** 2).mean(1)
    uneven = -(math.log(p.shape[1]) + p.mean(0).log().mean())  # Σ_c 1/C log((1/C)/p̄_c)
    return mean_over(each, labelled) + unlabelled * mean_over(apart, ~labelled) + uneven, each


def mean_over(values: Tensor, rows: Tensor) -> Tensor:
    """Mean over the marked rows; 0 if there are none."""
    marked = rows.to(values.dtype)
    return (values * marked).sum() / marked.sum().clamp(min=1.0)
