"""Learning to Reweight Examples (Ren et al. 2018): weights from one virtual step, discarded after the step.

    θ̂(ε) = θ − λ_p ∂/∂θ Σ_j ε_j ℓ_j                      a virtual step
    u_j  = −∂L_t(θ̂(ε))/∂ε_j at ε = 0  =  λ_p ⟨∂ℓ_j/∂θ, ∂L_t/∂θ⟩
    w̃_j = max(0, u_j),     w_j = w̃_j / Σ_i w̃_i           (all 0 where the sum is 0)
    θ ← θ − λ_p ∂/∂θ Σ_j w_j ℓ_j

At ε = 0 the virtual step does not move θ, so u is the alignment times λ_p, and λ_p cancels in w: no double backward is
needed, and the engines compute u exactly. The weight of an example is not carried to its next visit: that is the
difference from SOSELETO. There is no deviation from the paper; as there, the step is that of the user's optimizer.
``target_share`` and ``clip`` are not the paper's: a share of the target's own gradient in θ's step, and a bound on the
norm of that step's gradient, as SOSELETO may have them.

``state.weights`` is for reports only: the value is w_j as a share of the batch's largest at the last visit, the score
the running mean of that share.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.engines import Engine, make_engine
from soseleto.engines.interface import Passes, Step
from soseleto.engines.model_state import Restore
from soseleto.task.task import State, Task
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Reweight:
    """engine: how alignments are computed

    target_share: share of the target's own gradient in θ's step; clip: the largest norm of its gradient, None for any
    """

    engine: str | Engine = "auto"
    target_share: float = 0.0
    clip: float | None = None

    name = "reweight"

    def init(self, task: Task) -> ReweightState:
        weights = Weights(task.n_source, device=task.device)
        return ReweightState.start(task, engine=make_engine(self.engine), weights=weights)

    def step(self, state: ReweightState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        task, again = state.task, Restore(state.task.model)
        passes = state.engine.passes(
            Step(
                task.model,
                task.losses,
                source,
                target,
                to_direction=lambda gradient: {name: g for name, g in gradient.items() if name in task.shared},
                coefficients=torch.ones(len(source), device=task.device),
            )
        )
        w = normalized(passes.alignment)
        again()  # the second pass draws the same random numbers
        _, weighted = task.sharing.gradient(task.model, task.losses.source, source, w)
        passes = replace(passes, source_gradient=weighted)
        task.guard("source", passes.source_losses, source.index)
        task.guard("target", passes.target_losses, target.index)
        state.take(self._clipped(self._of_both(passes, task)))
        state.report(source.index, w / w.max().clamp_min(torch.finfo(w.dtype).tiny))
        return {"source_loss": passes.source_losses.mean(), "target_loss": passes.target_losses.mean()}

    def _of_both(self, passes: Passes, task: Task) -> dict[str, Tensor]:
        """The weighted source gradient with the target's share; the target's head has its own gradient alone."""
        found = {k: g for k, g in passes.source_gradient.items() if k not in task.target_head}
        if self.target_share:
            own = passes.target_gradient
            found |= {k: torch.lerp(g, own[k], self.target_share) for k, g in found.items() if k in own}
        return found | {k: g for k, g in passes.target_gradient.items() if k in task.target_head}

    def _clipped(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        if self.clip is None:
            return gradients
        norm = torch.nn.utils.get_total_norm(list(gradients.values()))
        factor = torch.clamp(self.clip / (norm + 1e-6), max=1.0)
        return {name: g * factor.to(g.dtype) for name, g in gradients.items()}


def normalized(alignment: Tensor) -> Tensor:
    """w = max(0, u)/Σ max(0, u), and 0 where no example helps."""
    helping = alignment.clamp_min(0.0)
    return helping / helping.sum().clamp_min(torch.finfo(helping.dtype).tiny)


@dataclass(kw_only=True)
class ReweightState(State):
    engine: Engine
