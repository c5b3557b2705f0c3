"""Early stopping around any method: training ends with the model of the best held-out accuracy.

Every ``every`` steps the model is evaluated on held-out examples that no step trains on; after the last step the
parameters and buffers of the best evaluation are restored (the earliest on ties). Training itself always runs to its
last step, so that the learning-rate schedule is the same as for every other method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.data.structure import call, scores_of, split
from soseleto.methods.wrappers import WrapperState
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.task.task import Method, Task, after_step, state_of

_ROWS = 1000  # held-out examples per forward pass


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """method: what is trained; every: steps between evaluations.

    heldout: labelled examples, with inputs as the model takes them
    """

    method: Method
    heldout: Batch = field(repr=False)
    every: int

    @property
    def name(self) -> str:
        return f"{self.method.name}, early stopped"

    def init(self, task: Task) -> EarlyStoppingState:
        return EarlyStoppingState(task, self.method.init(task), self.heldout, self.every)

    def step(
        self, state: EarlyStoppingState, source: Batch, target: Batch, *, monitor: bool = False
    ) -> dict[str, Tensor]:
        numbers = self.method.step(state.inner, source, target, monitor=monitor)
        state.steps += 1
        return numbers


@dataclass
class EarlyStoppingState(WrapperState):
    """The inner method's state, and the best model so far."""

    heldout: Batch
    every: int
    steps: int = 0
    best_accuracy: float = -1.0
    best: dict[str, Tensor] = field(default_factory=dict)

    def after_step(self) -> None:
        """Evaluate the model if it is time; after the last step restore the best one."""
        after_step(self.inner)
        last = self.steps == self.task.steps
        if last or self.steps % self.every == 0:
            self.consider(accuracy(self.task.model, self.heldout.to(self.task.device)))
        if last:
            self.task.model.load_state_dict(self.best)

    def advance(self, steps: int) -> None:
        """Count ``steps`` steps that were taken by replaying a CUDA graph."""
        self.steps += steps
        if hasattr(self.inner, "advance"):
            self.inner.advance(steps)

    def state(self) -> dict[str, Any]:
        own = {"steps": self.steps, "best_accuracy": self.best_accuracy, "best": self.best}
        return {**own, "inner": state_of(self.inner)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps, self.best_accuracy = state["steps"], state["best_accuracy"]
        self.best = {name: value.to(self.task.device) for name, value in state["best"].items()}
        self.inner.load_state(state["inner"])

    def consider(self, found: float) -> None:
        """Keep a copy of the model if this accuracy is the best so far."""
        if found > self.best_accuracy:
            self.best_accuracy = found
            self.best = {name: value.detach().clone() for name, value in self.task.model.state_dict().items()}


def accuracy(model: nn.Module, batch: Batch) -> float:
    """The share of correct predictions in evaluation mode; the modules' training flags are restored."""
    with evaluation_mode(model), torch.no_grad():
        answers = torch.cat([scores_of(call(model, piece)).argmax(1) for piece in split(batch.inputs, _ROWS)])
    return float((answers == batch.labels).double().mean())
