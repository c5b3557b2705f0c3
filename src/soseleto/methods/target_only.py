"""Training on the small trusted target alone: the baseline without any source.

    θ ← θ − λ_p · ∂L_t/∂θ

It takes as many steps as every other method, each on one target batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.methods.state import State, shared_gradient
from soseleto.task.task import Task


@dataclass(frozen=True, kw_only=True)
class TargetOnly:
    """Training on the target alone; it has no settings."""

    name = "target_only"
    shares_work = True

    def init(self, task: Task) -> State:
        return State.start(task)

    def step(self, state: State, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        losses, found = shared_gradient(state.task, "target", target)
        state.take(found)
        return {"target_loss": state.task.sharing.mean(losses, target)}
