"""Scores from several visits of an example: recent ones count more, or noisy means count less.

Without a piece in ``scores`` a score is the mean of an example's alignments over all of its visits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.pieces.beyond_noise import standard_error, visit_statistics
from soseleto.task.piece import Alignment, Piece, State, Step
from soseleto.task.task import Task


@dataclass(frozen=True)
class recent_visits(Piece):
    """The mean over an example's visits in which every earlier one counts ``decay`` times as much as the next.

        score = Σ_i decayⁿ⁻ⁱ u_i / Σ_i decayⁿ⁻ⁱ

    Alignments of the first epochs are those of a network that knows little.
    """

    decay: float = 0.8

    slot: ClassVar[str] = "scores"

    def __post_init__(self) -> None:
        if not 0.0 < self.decay < 1.0:
            raise UsageError(f"decay of recent_visits must lie in (0, 1), got {self.decay}: leave the piece out for 1.")

    def init(self, task: Task) -> State:
        return {"examples": {name: torch.zeros(task.n_source, device=task.device) for name in ("means", "weights")}}

    def update(self, value: Alignment, state: Any, step: Step) -> Tensor:
        examples, index = state["examples"], step.source.index
        weight = self.decay * examples["weights"][index] + 1.0
        mean = examples["means"][index]
        mean = mean + (value.scaled.to(mean.dtype) - mean) / weight
        examples["weights"][index], examples["means"][index] = weight, mean
        return mean


@dataclass(frozen=True)
class shrunk_by_spread(Piece):
    """The mean over an example's visits, drawn to the mean of all as far as its own spread makes it uncertain.

        score = m + s·(ū − m),   s = τ²/(τ² + e²)

    ū and e: mean and standard error of the example's alignments (``beyond_noise``); m: the mean of all alignments so
    far; τ²: their variance less that between visits of one example. An example that was seen seldom, or whose
    alignments scatter, is placed in the middle and not at an end of the ranking.
    """

    slot: ClassVar[str] = "scores"

    def init(self, task: Task) -> State:
        return {**visit_statistics(task), "all": torch.zeros(3, dtype=torch.float64, device=task.device)}

    def update(self, value: Alignment, state: Any, step: Step) -> Tensor:
        u = value.scaled.to(torch.float32)
        error = standard_error(state, step, u)
        wide = u.double()
        state["all"].add_(step.task.sharing.sum(torch.stack([torch.ones_like(wide), wide, wide.square()]).sum(1)))
        count, total, squares = state["all"].unbind()  # of alignments, Σu, Σu²
        of_visits = state["pooled"][0] / state["pooled"][1].clamp_min(1.0)
        middle = total / count
        between = (squares / count - middle.square() - of_visits).clamp_min(0.0).to(u.dtype)  # τ²
        own = between / (between + error.square()).clamp_min(torch.finfo(u.dtype).tiny)
        mean = state["examples"]["means"][step.source.index]
        return middle.to(u.dtype) + own * (mean - middle.to(u.dtype))
