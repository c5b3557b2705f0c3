"""Move a weight only by evidence beyond its own noise: the mean of an example's alignments, minus its standard error.

    ū, n, s²     mean, number and variance of the example's alignments u over its visits, this one included
    s²           (ν s₀² + Σ(u − ū)²)/(ν + n − 1), shrunk towards the mean variance s₀² of all examples
    evidence     sign(ū)·max(|ū| − z·s/√n, 0), by which the weight moves in place of u

A single alignment is mostly noise of the target batch. Without this piece a weight is the clipped sum of all of them:
that of a right but hard example, whose alignments scatter around zero, is a random walk that starts at 1 and can only
fall. Here it stays where it is, while a wrong label, whose mean is well below zero, falls after a few visits. In the
first epoch no variance is known, and weights move by the alignments as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.task.piece import Alignment, Piece, State, Step
from soseleto.task.task import Task

PRIOR = 4.0  # ν: how many visits the variance of all examples counts for


@dataclass(frozen=True)
class beyond_noise(Piece):
    """Weights move by the part of an example's mean alignment beyond ``z`` standard errors; scores by all of it."""

    z: float = 2.0

    slot: ClassVar[str] = "alignment"

    def __post_init__(self) -> None:
        if not self.z > 0:
            raise UsageError(f"z of beyond_noise must be above 0, got {self.z}: leave the piece out.")

    def init(self, task: Task) -> State:
        return visit_statistics(task)

    def update(self, value: Alignment, state: Any, step: Step) -> Alignment:
        noise = self.z * standard_error(state, step, value.moving.to(torch.float32))
        mean = state["examples"]["means"][step.source.index]
        return replace(value, evidence=mean.sign() * (mean.abs() - noise).clamp_min(0.0))


def visit_statistics(task: Task) -> State:
    """What ``standard_error`` keeps of every example's alignments and of all together."""
    examples = {name: torch.zeros(task.n_source, device=task.device) for name in ("visits", "means", "squares")}
    pooled = torch.zeros(2, dtype=torch.float64, device=task.device)  # Σ of squares and of degrees of freedom
    return {"examples": examples, "pooled": pooled}


def standard_error(state: State, step: Step, u: Tensor) -> Tensor:
    """s/√n of the batch's examples after this visit, (B,)."""
    examples, index = state["examples"], step.source.index
    visits, mean, squares = (examples[name][index] for name in ("visits", "means", "squares"))
    visits = visits + 1.0
    change = u - mean
    mean = mean + change / visits
    added = change * (u - mean)
    for name, values in (("visits", visits), ("means", mean), ("squares", squares + added)):
        examples[name][index] = values
    sums = torch.stack([added.sum(), (visits > 1.0).sum().to(u.dtype)]).double()
    state["pooled"].add_(step.task.sharing.sum(sums))
    all_squares, freedom = state["pooled"].unbind()
    usual = (all_squares / freedom.clamp_min(1.0)).to(u.dtype)
    variance = (PRIOR * usual + squares + added) / (PRIOR + visits - 1.0)
    return (variance / visits).sqrt()
