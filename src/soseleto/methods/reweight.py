"""Learning to Reweight Examples (Ren et al. 2018): weights from one virtual step, forgotten after it.

    θ̂(ε) = θ − λ_p ∂/∂θ Σ_j ε_j ℓ_j                      a virtual step
    u_j  = −∂L_t(θ̂(ε))/∂ε_j at ε = 0  =  λ_p ⟨∂ℓ_j/∂θ, ∂L_t/∂θ⟩
    w̃_j = max(0, u_j),     w_j = w̃_j / Σ_i w̃_i           (all 0 where the sum is 0)
    θ ← θ − λ_p ∂/∂θ Σ_j w_j ℓ_j

At ε = 0 the virtual step stands still, so u is the alignment times λ_p, and λ_p cancels in w: no double backward is
needed, and the engines give u exactly. The weight of an example is not carried to its next visit: that is the
difference from SOSELETO. With the defaults nothing deviates from the paper, whose step is that of the user's optimizer
too.

``state.weights`` only reports: the value is w_j as a share of the batch's largest at the last visit, the score the
running mean of that share.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soseleto.batch import Batch
from soseleto.engines import Engine, make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.state import PhasedState, require_share, source_losses
from soseleto.task import Task
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Reweight:
    """engine: how alignments are computed; max_norm: clip the norm of the gradient that the optimizer sees;
    pretrain: share of all steps that is ordinary training on the source, for networks that reweighting alone cannot
    start (the paper has none)."""

    engine: str | Engine = "auto"
    max_norm: float | None = None
    pretrain: float = 0.0

    name = "reweight"

    def __post_init__(self) -> None:
        require_share("pretrain", self.pretrain)

    def init(self, task: Task) -> ReweightState:
        weights = Weights(task.n_source, device=task.device)
        first = round(self.pretrain * task.steps)
        return ReweightState.start(task, engine=make_engine(self.engine), weights=weights, first_phase=first)

    def step(self, state: ReweightState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        task = state.task
        if state.in_first_phase:
            losses = source_losses(task, source)
            state.take(gradient(losses.mean(), trainable(task.model)), max_norm=self.max_norm)
            return {"source_loss": losses.detach().mean()}
        passes = state.engine.passes(
            task.model,
            task.losses,
            source,
            target,
            to_direction=lambda found: {name: g for name, g in found.items() if name in task.shared},
            coefficients=normalized,
        )
        task.guard("source", passes.source_losses, source.index)
        task.guard("target", passes.target_losses, target.index)
        of_source = {k: g for k, g in passes.source_gradient.items() if k not in task.target_head}
        of_target = {k: g for k, g in passes.target_gradient.items() if k in task.target_head}
        state.take(of_source | of_target, max_norm=self.max_norm)
        w = normalized(passes.alignment)
        state.report(source.index, w / w.max().clamp_min(torch.finfo(w.dtype).tiny))
        return {"source_loss": passes.source_losses.mean(), "target_loss": passes.target_losses.mean()}


def normalized(alignment: Tensor) -> Tensor:
    """w = max(0, u)/Σ max(0, u), and 0 where no example helps."""
    helping = alignment.clamp_min(0.0)
    return helping / helping.sum().clamp_min(torch.finfo(helping.dtype).tiny)


@dataclass(kw_only=True)
class ReweightState(PhasedState):
    engine: Engine
