"""Scores from few and noisy alignments: an example's mean alignment, shrunk towards the mean of its class.

    u_jm = m_c + e_j + noise_m           the alignment of example j of class c at its m-th visit
    τ² = E[(u − m_c)(ū − m_c)]           variance between examples: u is of this visit, ū the mean of earlier ones
    σ² = E[(u − m_c)²] − τ²              variance between visits
    E[m_c + e_j | n visits] = m_c + s·(ū_j − m_c),        s = τ²/(τ² + σ²/n)

This is the empirical-Bayes estimate of a two-level normal model; every expectation is a running mean over all visits.
Where whole classes are useless, their means show it long before any single example can: single alignments are mostly
noise (σ² ≫ τ²), and a class has thousands of them. Where labels are wrong at random, class means are equal, and s
leaves the example's own mean as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.task.piece import Alignment, Piece, State, Step
from soseleto.task.task import Task


@dataclass(frozen=True)
class pooled_by_class(Piece):
    """Scores are shrunk towards the mean of their class; for sources with whole classes of no use.

    Weights follow the example's own alignments: a class that helps less than others still has examples that help.
    """

    slot: ClassVar[str] = "scores"
    shares_work: ClassVar[bool] = False

    def init(self, task: Task) -> State:
        if task.classes is None:
            raise UsageError("pooled_by_class needs class indices as source labels: leave it out.")
        examples = {name: torch.zeros(task.n_source, device=task.device) for name in ("means", "visits")}  # ū_j
        totals = torch.zeros(2, task.classes, dtype=torch.float64, device=task.device)  # Σu and the count, by class
        # Σ(u − m)(ū − m) and its count, Σ(u − m)² and its count
        spread = torch.zeros(2, 2, dtype=torch.float64, device=task.device)
        return {"examples": examples, "totals": totals, "spread": spread}

    def update(self, value: Alignment, state: Any, step: Step) -> Tensor:
        """The scores of the batch's examples after this visit, (B,)."""
        return value.unit * estimate(state, step.source.index, step.source.labels, value.q)


def estimate(state: State, index: Tensor, labels: Tensor, u: Tensor) -> Tensor:
    """The usefulness of the examples at ``index`` after this visit, (B,); their alignments join the means."""
    u = u.to(torch.float32)
    totals, spread = state["totals"], state["spread"]
    means, counts = state["examples"]["means"], state["examples"]["visits"]
    totals.index_add_(1, labels, torch.stack([u, torch.ones_like(u)]).double())
    m = (totals[0] / totals[1].clamp_min(1.0))[labels].float()
    before, visits = means[index], counts[index] + 1.0
    seen = (visits > 1.0).to(u.dtype)
    # Alignments drift during training; what a whole batch has in common says nothing about its examples.
    now, earlier = _centred(u - m, torch.ones_like(u)), _centred(before - m, seen)
    spread[0].add_(torch.stack([(now * earlier).sum(), seen.sum()]))
    spread[1].add_(torch.stack([(now * now).sum(), torch.ones_like(u).sum()]))
    mean = before + (u - before) / visits
    means[index], counts[index] = mean, visits
    return m + _shrinkage(spread, visits) * (mean - m)


def _shrinkage(spread: Tensor, visits: Tensor) -> Tensor:
    """s: how far an example's own mean over its visits is trusted."""
    persistent, total = (spread[:, 0] / spread[:, 1].clamp_min(1.0)).float()
    own = torch.minimum(persistent.clamp_min(0.0), total)
    return own / (own + (total - own) / visits).clamp_min(torch.finfo(own.dtype).tiny)


def _centred(values: Tensor, there: Tensor) -> Tensor:
    """Minus their mean, over those that are there; 0 for the others."""
    mean = (values * there).sum() / there.sum().clamp_min(1.0)
    return (values - mean) * there
