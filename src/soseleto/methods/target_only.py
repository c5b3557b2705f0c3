"""Training on the small trusted target alone: what one has without any source.

    θ ← θ − λ_p · ∂L_t/∂θ

It takes as many steps as every other method, each on one target batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soseleto.batch import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.state import State, target_losses
from soseleto.task import Task


@dataclass(frozen=True, kw_only=True)
class TargetOnly:
    """Training on the target alone; it has no settings."""

    name = "target_only"

    def init(self, task: Task) -> State:
        return State.start(task)

    def step(self, state: State, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        loss = target_losses(state.task, target).mean()
        state.take(gradient(loss, trainable(state.task.model)))
        return {"target_loss": loss.detach()}
