"""What every rival carries from step to step, and the small checks they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from soseleto.data.batch import Batch
from soseleto.errors import UsageError
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.task.losses import FULL
from soseleto.task.task import Task, lr_left, optimizer_and_schedule, take_step
from soseleto.weights import Weights


@dataclass(kw_only=True)
class State:
    """The task, its optimizer and schedule, the number of steps taken, and weights where the method has any."""

    task: Task
    optimizer: Optimizer
    schedule: LRScheduler | None
    first_lr: float
    weights: Weights | None = None
    steps: int = 0

    @classmethod
    def start(cls, task: Task, **more: Any) -> Self:
        """The state before the first step; ``more`` are the fields a method adds."""
        optimizer, schedule = optimizer_and_schedule(task)
        group = optimizer.param_groups[0]
        first_lr = float(group.get("initial_lr", group["lr"]))
        return cls(task=task, optimizer=optimizer, schedule=schedule, first_lr=first_lr, **more)

    @property
    def lr(self) -> Tensor | float:
        """The learning rate now."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def lr_left(self) -> Tensor | float:
        """The current learning rate as a share of the first; step sizes besides the optimizer's are scaled by it."""
        return lr_left(self.optimizer, self.first_lr)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside model, optimizer and schedule; a method with fields of its own adds them."""
        return {"steps": self.steps, "weights": None if self.weights is None else self.weights.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.steps = state["steps"]
        if state["weights"] is not None:
            self.weights = self.weights or Weights(self.task.n_source, device=self.task.device)
            self.weights.load_state(state["weights"])

    def report(self, index: Tensor, values: Tensor) -> None:
        """For methods without memory: the weight becomes ``values``, the score their running mean over visits."""
        if self.weights is None:
            self.weights = Weights(self.task.n_source, device=self.task.device)
        self.weights.step(index, values - self.weights.take(index), values)

    def take(self, gradients: dict[str, Tensor]) -> None:
        """One step of the model."""
        take_step(self.task, self, gradients)
        self.advance(1)

    def advance(self, steps: int) -> None:
        """Steps were taken, by ``take`` or by replaying a recorded one."""
        self.steps += steps


@dataclass(kw_only=True)
class PhasedState(State):
    """For methods that do one thing for their first so many steps, and another afterwards."""

    first_phase: int

    @property
    def in_first_phase(self) -> bool:
        return self.steps < self.first_phase

    @property
    def kind(self) -> bool:
        """The steps of a phase are all alike, so that one can be recorded and replayed."""
        return self.in_first_phase


def require_transfer(task: Task, name: str) -> None:
    """Raise for a method that compares features, and so needs to know which part of the model is the trunk."""
    if not isinstance(task.model, TrunkAndHeads):
        raise UsageError(f"the method {name!r} compares the features of a trunk: say mode='transfer'.")


def require_noisy(task: Task, name: str) -> None:
    """Raise for a method that knows only one classifier for both sides."""
    if task.target_head:
        raise UsageError(f"the method {name!r} has no target head of its own: say mode='noisy', or use another method.")


def require_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{name} must lie in [0, 1], got {value}.")


def source_losses(task: Task, batch: Batch) -> Tensor:
    """The source's losses (B,) with their graph, finite."""
    losses = task.losses.source(task.model, batch)
    task.guard("source", losses.detach(), batch.index)
    return losses


def target_losses(task: Task, batch: Batch) -> Tensor:
    """The target's losses (T,) with their graph, finite."""
    losses = task.losses.target(task.model, batch)
    task.guard("target", losses.detach(), batch.index)
    return losses


def shared_gradient(task: Task, side: str, batch: Batch, share: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """This process's losses of a side, finite, and the gradient of ``share`` times the whole batch's mean loss."""
    c = torch.full((len(batch),), share / batch.total, device=task.device, dtype=torch.float64)
    losses, found = task.sharing.gradient(task.model, getattr(task.losses, side), batch, side, c)
    task.guard(side, losses, batch.index)
    return losses, found


def class_scores(task: Task, model: nn.Module, batch: Batch, name: str) -> Tensor:
    """The model's outputs (B, classes), for a method that reads them as the logits of a softmax."""
    outputs = getattr(task.losses, "precision", FULL)(model, batch.inputs)
    if outputs.ndim != 2 or batch.labels.is_floating_point():
        raise UsageError(
            f"the method {name!r} needs class scores (B, classes) and class indices, got outputs of shape "
            f"{tuple(outputs.shape)} and labels of {batch.labels.dtype}: use it for classification."
        )
    return outputs


def scores_of_both(task: Task, source: Batch, target: Batch, name: str) -> tuple[Tensor, Tensor]:
    """``class_scores`` of the two batches, from one forward."""
    whole = Batch(source.index, torch.cat([source.inputs, target.inputs]), source.labels)
    scores = class_scores(task, task.model, whole, name)
    return scores[: len(source)], scores[len(source) :]
