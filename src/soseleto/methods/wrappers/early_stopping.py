"""Early stopping around any method: the model of the best held-out accuracy is the one that is left at the end.

Every ``every`` steps the model is tried on held-out examples that no step trains on; after the last step the
parameters and buffers of the best trial are put back (the earliest among equals). Training itself runs to its end,
so that the schedule is the one that every other method has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from soseleto.data.batch import Batch
from soseleto.errors import UsageError
from soseleto.models.evaluation import evaluation_mode
from soseleto.task.task import Method, Task, state_of
from soseleto.weights import Weights

_ROWS = 1000  # held-out examples at a time


@dataclass(frozen=True, kw_only=True)
class EarlyStopping:
    """method: what is trained; heldout: inputs as the model takes them, and labels; every: steps between trials."""

    method: Method
    heldout: Batch
    every: int

    def __post_init__(self) -> None:
        if self.every < 1 or len(self.heldout) < 1:
            raise UsageError(f"every and the held-out examples must be 1 or more, got {self.every}: give both.")

    @property
    def name(self) -> str:
        return f"{self.method.name}, early stopped"

    def __repr__(self) -> str:
        return f"EarlyStopping(method={self.method!r}, heldout={len(self.heldout)} examples, every={self.every})"

    def init(self, task: Task) -> EarlyStoppingState:
        return EarlyStoppingState(task, self.method.init(task), self.every)

    def step(
        self, state: EarlyStoppingState, source: Batch, target: Batch, *, monitor: bool = False
    ) -> dict[str, Tensor]:
        numbers = self.method.step(state.inner, source, target, monitor=monitor)
        state.steps += 1
        if state.is_due(state.steps):
            state.consider(accuracy(state.task.model, self.heldout.to(state.task.device)))
        if state.steps == state.task.steps:
            state.task.model.load_state_dict(state.best)
        return numbers


@dataclass
class EarlyStoppingState:
    """The inner method's state, and the best model so far."""

    task: Task
    inner: Any
    every: int
    steps: int = 0
    best_accuracy: float = -1.0
    best: dict[str, Tensor] = field(default_factory=dict)

    def is_due(self, step: int) -> bool:
        """Whether held-out examples are tried after this step."""
        return step % self.every == 0 or step == self.task.steps

    @property
    def capturable(self) -> bool:
        return not self.is_due(self.steps + 1) and getattr(self.inner, "capturable", True)

    @property
    def kind(self) -> Any:
        return getattr(self.inner, "kind", None)

    def advance(self, steps: int) -> None:
        """Steps were taken by replaying them."""
        self.steps += steps
        if hasattr(self.inner, "advance"):
            self.inner.advance(steps)

    @property
    def optimizer(self) -> Optimizer:
        return self.inner.optimizer

    @property
    def schedule(self) -> LRScheduler | None:
        return self.inner.schedule

    @property
    def weights(self) -> Weights | None:
        return self.inner.weights

    def state(self) -> dict[str, Any]:
        own = {"steps": self.steps, "best_accuracy": self.best_accuracy, "best": self.best}
        return {**own, "inner": state_of(self.inner)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.steps, self.best_accuracy = state["steps"], state["best_accuracy"]
        self.best = {name: value.to(self.task.device) for name, value in state["best"].items()}
        self.inner.load_state(state["inner"])

    def consider(self, found: float) -> None:
        if found > self.best_accuracy:
            self.best_accuracy = found
            self.best = {name: value.detach().clone() for name, value in self.task.model.state_dict().items()}


def accuracy(model: nn.Module, batch: Batch) -> float:
    """The share of right answers, with the model in evaluation mode and left as it was."""
    with evaluation_mode(model), torch.no_grad():
        answers = torch.cat([model(piece).argmax(1) for piece in batch.inputs.split(_ROWS)])
    return float((answers == batch.labels).double().mean())
