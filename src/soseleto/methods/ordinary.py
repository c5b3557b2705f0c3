"""Ordinary training on the source, as if every label were right.

    θ ← θ − λ_p · mean_j ∂ℓ_j/∂θ

The target is not looked at. Constant or falling learning rates are the schedule's business; for early stopping wrap
it: ``EarlyStopping(Ordinary(), ...)``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soseleto.batch import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.state import State, require_noisy, source_losses
from soseleto.task import Task


@dataclass(frozen=True, kw_only=True)
class Ordinary:
    """Ordinary training; it has no settings."""

    name = "ordinary"

    def init(self, task: Task) -> State:
        require_noisy(task, self.name)
        return State.start(task)

    def step(self, state: State, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        loss = source_losses(state.task, source).mean()
        state.take(gradient(loss, trainable(state.task.model)))
        return {"source_loss": loss.detach()}
