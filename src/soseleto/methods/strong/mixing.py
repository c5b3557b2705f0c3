"""Mixup and cutmix: every example is mixed with another of the batch, its inputs and its classes alike.

    x ← λ x_i + (1 − λ) x_j,   y ← λ y_i + (1 − λ) y_j,   λ ~ Beta(a, a) per example      (Zhang et al., 2018)

Cutmix (Yun et al., 2019) takes a rectangle of x_j instead, of area 1 − λ.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from soseleto.data.randomness import ExampleRandom

_KNOTS = 4096  # of the table of Beta quantiles


def mixed(
    inputs: Tensor, classes: Tensor, draws: ExampleRandom, *, mixup: float, cutmix: float
) -> tuple[Tensor, Tensor]:
    """Inputs (B, ...) and class shares (B, C) after mixing.

    draws: one stream per row
    mixup: a of Beta(a, a), 0 for no mixing; cutmix: the share of examples that are mixed by a rectangle
    """
    if not mixup:
        return inputs, classes
    order, u, which, x, y = draws.uniform(5)
    partner = order.argsort()
    share = quantiles(u, mixup)
    blend = share.view(-1, *[1] * (inputs.ndim - 1)).to(inputs.dtype)
    made = blend * inputs + (1 - blend) * inputs[partner]
    if cutmix:
        inside = _rectangles(1 - share, x, y, *inputs.shape[2:])
        chosen = which < cutmix
        pasted = torch.where(inside[:, None], inputs[partner], inputs)
        made = torch.where(chosen.view(-1, 1, 1, 1), pasted, made)
        share = torch.where(chosen, 1 - inside.float().mean((1, 2)), share)
    return made, share[:, None] * classes + (1 - share[:, None]) * classes[partner]


def quantiles(u: Tensor, a: float) -> Tensor:
    """λ with P(λ ≤ quantile) = u for Beta(a, a), interpolated from a table; u in [0, 1)."""
    table = _table(a, str(u.device))
    place = u * (_KNOTS - 1)
    low = place.to(torch.int64)
    return torch.lerp(table[low], table[(low + 1).clamp(max=_KNOTS - 1)], place - low)


@lru_cache(maxsize=8)
def _table(a: float, device: str) -> Tensor:
    """Beta quantiles at 0, 1/(K − 1), ..., 1. In the angle t with λ = sin² t the density is (sin t cos t)^(2a − 1)."""
    edges = torch.linspace(0.0, torch.pi / 2, 1 << 18, dtype=torch.float64)
    middle = (edges[1:] + edges[:-1]) / 2
    mass = torch.cumsum((middle.sin() * middle.cos()) ** (2 * a - 1), 0)
    below = torch.cat([mass.new_zeros(1), mass / mass[-1]])
    at = torch.searchsorted(below, torch.linspace(0.0, 1.0, _KNOTS, dtype=torch.float64)).clamp(max=len(edges) - 1)
    return edges[at].sin().square().float().to(device)


def _rectangles(area: Tensor, x: Tensor, y: Tensor, h: int, w: int) -> Tensor:
    """(B, H, W) masks of rectangles with these shares of the area, where they lie inside."""
    half = area.sqrt().view(-1, 1, 1) / 2
    rows = ((torch.arange(h, device=area.device) + 0.5) / h).view(1, h, 1)
    columns = ((torch.arange(w, device=area.device) + 0.5) / w).view(1, 1, w)
    return ((rows - y.view(-1, 1, 1)).abs() < half) & ((columns - x.view(-1, 1, 1)).abs() < half)
