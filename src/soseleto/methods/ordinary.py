"""Ordinary training on the source, as if every label were right.

    θ ← θ − λ_p · mean_j ∂ℓ_j/∂θ

The target is not used. The learning rate follows the schedule; for early stopping wrap it:
``EarlyStopping(method=Ordinary(), ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.methods.state import State, require_noisy, shared_gradient
from soseleto.task.task import Task


@dataclass(frozen=True, kw_only=True)
class Ordinary:
    """Ordinary training; it has no settings."""

    name = "ordinary"
    shares_work = True

    def init(self, task: Task) -> State:
        require_noisy(task, self.name)
        return State.start(task)

    def step(self, state: State, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        losses, found = shared_gradient(state.task, "source", source)
        state.take(found)
        return {"source_loss": state.task.sharing.mean(losses, source)}
