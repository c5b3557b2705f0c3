"""Fine-tuning: train on the source, then continue on the target.

    first  θ, φˢ ← θ, φˢ − λ_p · mean_j ∂ℓ_j/∂(θ, φˢ)
    then   θ, φᵗ ← θ, φᵗ − λ_p · ∂L_t/∂(θ, φᵗ)

In transfer mode the second phase trains the target's own head; in noisy mode there is one head for both.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.state import PhasedState, require_share, source_losses, target_losses
from soseleto.task.task import Task


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """pretrain: the share of all steps that train on the source."""

    pretrain: float = 0.5

    name = "fine_tuning"

    def __post_init__(self) -> None:
        require_share("pretrain", self.pretrain)

    def init(self, task: Task) -> PhasedState:
        return PhasedState.start(task, first_phase=round(self.pretrain * task.steps))

    def step(self, state: PhasedState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        first = state.in_first_phase
        loss = (source_losses(state.task, source) if first else target_losses(state.task, target)).mean()
        state.take(gradient(loss, trainable(state.task.model)))
        return {"source_loss" if first else "target_loss": loss.detach()}
