"""An example's usefulness estimated from few and noisy alignments: drawn towards the mean of its class.

    u_jm = m_c + e_j + noise_m           the alignment of example j of class c at its m-th visit
    τ² = E[(u − m_c)(ū − m_c)]           how much of it belongs to the example: u is of this visit, ū of earlier ones
    σ² = E[(u − m_c)²] − τ²              how much is the visit's noise
    E[m_c + e_j | n visits] = m_c + s·(ū_j − m_c),        s = τ²/(τ² + σ²/n)

This is the empirical-Bayes estimate of a two-level normal model; every expectation is a running mean over all visits.
Where whole classes are useless, their means say so long before any single example can: single alignments are mostly
noise (σ² ≫ τ²), and a class has thousands of them. Where labels are wrong at random, class means are alike, and s lets
the example's own visits speak.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


class Pooling:
    """Running means of n examples and of their classes, on the device, changed in place."""

    def __init__(self, n: int, classes: int, device: torch.device) -> None:
        self.means = torch.zeros(n, device=device)  # ū_j
        self.visits = torch.zeros(n, device=device)
        self.totals = torch.zeros(2, classes, dtype=torch.float64, device=device)  # Σu and the count, by class
        # Σ(u − m)(ū − m) and its count, Σ(u − m)² and its count
        self.spread = torch.zeros(2, 2, dtype=torch.float64, device=device)

    def estimate(self, index: Tensor, labels: Tensor, u: Tensor) -> Tensor:
        """The usefulness of the examples at ``index`` after this visit, (B,); their alignments join the means."""
        u = u.to(torch.float32)
        self.totals.index_add_(1, labels, torch.stack([u, torch.ones_like(u)]).double())
        m = (self.totals[0] / self.totals[1].clamp_min(1.0))[labels].float()
        before, visits = self.means[index], self.visits[index] + 1.0
        seen = (visits > 1.0).to(u.dtype)
        # Alignments drift as training goes on; what a batch has in common says nothing about its examples.
        now, earlier = _centred(u - m, torch.ones_like(u)), _centred(before - m, seen)
        self.spread[0].add_(torch.stack([(now * earlier).sum(), seen.sum()]))
        self.spread[1].add_(torch.stack([(now * now).sum(), torch.ones_like(u).sum()]))
        mean = before + (u - before) / visits
        self.means[index], self.visits[index] = mean, visits
        return m + self.trust(visits) * (mean - m)

    def trust(self, visits: Tensor) -> Tensor:
        """s: how far an example's own mean over so many visits is believed."""
        persistent, total = (self.spread[:, 0] / self.spread[:, 1].clamp_min(1.0)).float()
        own = torch.minimum(persistent.clamp_min(0.0), total)
        return own / (own + (total - own) / visits).clamp_min(torch.finfo(own.dtype).tiny)

    def state(self) -> dict[str, Any]:
        return {"means": self.means, "visits": self.visits, "totals": self.totals, "spread": self.spread}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, mine in self.state().items():
            mine.copy_(state[name])


def _centred(values: Tensor, there: Tensor) -> Tensor:
    """Minus their mean, over those that are there; 0 for the others."""
    mean = (values * there).sum() / there.sum().clamp_min(1.0)
    return (values - mean) * there
