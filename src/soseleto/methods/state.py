"""The state that the baselines carry from step to step, and the checks and losses they share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from soseleto.data.batches import Batch
from soseleto.data.structure import scores_of
from soseleto.errors import UsageError
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.task.losses import FULL, joined_inputs
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
        """The current learning rate."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def lr_left(self) -> Tensor | float:
        """The current learning rate as a share of the first; step sizes besides the optimizer's are scaled by it."""
        return lr_left(self.optimizer, self.first_lr)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores besides model, optimizer and schedule; subclasses add their own fields."""
        return {"steps": self.steps, "weights": None if self.weights is None else self.weights.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self.steps = state["steps"]
        if state["weights"] is not None:
            self.weights = self.weights or Weights(self.task.n_source, device=self.task.device)
            self.weights.load_state(state["weights"])

    def report(self, index: Tensor, values: Tensor, *, later: int = 0) -> None:
        """For methods without persistent weights: store ``values`` as weights, and their running means as scores.

        later: p, for means in which the t-th visit counts about as tᵖ: s ← s + (p + 1)/(t + p)·(value − s)
        """
        if self.weights is None:
            self.weights = Weights(self.task.n_source, device=self.task.device)
        rows = self.weights.rows(index)
        before, scores, visits = rows
        counted = values
        if later:  # what, entering the mean with weight 1/t, moves it by that rate
            t = visits + 1.0
            counted = scores + (later + 1.0) * t / (t + later) * (values - scores)
        self.weights.step(index, values - before, counted, rows)

    def take(self, gradients: dict[str, Tensor]) -> None:
        """One step of the model."""
        take_step(self.task, self, gradients)
        self.advance(1)

    def advance(self, steps: int) -> None:
        """Count steps that were taken, by ``take`` or by replaying a CUDA graph."""
        self.steps += steps


@dataclass(kw_only=True)
class PhasedState(State):
    """For methods with two phases: the first ``first_phase`` steps, and the steps after them."""

    first_phase: int

    @property
    def in_first_phase(self) -> bool:
        return self.steps < self.first_phase

    @property
    def kind(self) -> bool:
        """Steps of one kind do the same work, so that one captured CUDA graph serves them all."""
        return self.in_first_phase


def require_transfer(task: Task, name: str) -> None:
    """Raise in noisy mode, for a method that compares features and so needs to know the model's trunk."""
    if not isinstance(task.model, TrunkAndHeads):
        raise UsageError(f"the method {name!r} compares the features of a trunk: say mode='transfer'.")


def require_noisy(task: Task, name: str) -> None:
    """Raise in transfer mode, for a method with one classifier for source and target."""
    if task.target_head:
        raise UsageError(f"the method {name!r} has no target head of its own: say mode='noisy', or use another method.")


def require_share(name: str, value: float) -> None:
    if not (is_number(value) and 0.0 <= value <= 1.0):
        raise UsageError(f"{name} must lie in [0, 1], got {value!r}.")


def is_number(value: object) -> bool:
    """Python compares a text or None with no number."""
    return isinstance(value, Real)


def source_losses(task: Task, batch: Batch) -> Tensor:
    """The source's losses (B,) with their graph; raises if one is not finite."""
    losses = task.losses.source(task.model, batch)
    task.guard("source", losses.detach(), batch.index)
    return losses


def target_losses(task: Task, batch: Batch) -> Tensor:
    """The target's losses (T,) with their graph; raises if one is not finite."""
    losses = task.losses.target(task.model, batch)
    task.guard("target", losses.detach(), batch.index)
    return losses


def shared_gradient(task: Task, side: str, batch: Batch, share: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """This process's losses of one side, checked, and the gradient of ``share`` times the whole batch's mean loss."""
    c = torch.full((len(batch),), share / batch.total, device=task.device, dtype=torch.float64)
    losses, found = task.sharing.gradient(task.model, getattr(task.losses, side), batch, side, c)
    task.guard(side, losses, batch.index)
    return losses, found


def class_scores(task: Task, model: nn.Module, batch: Batch, name: str) -> Tensor:
    """The model's outputs (B, classes), for a method that takes them as the logits of a softmax."""
    outputs = scores_of(getattr(task.losses, "precision", FULL)(model, batch.inputs))
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or batch.labels.is_floating_point():
        raise UsageError(
            f"the method {name!r} needs class scores (B, classes) and class indices, got outputs of "
            f"{_shown(outputs)} and labels of {batch.labels.dtype}: use it for classification."
        )
    return outputs


def _shown(outputs: Any) -> str:
    return f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"type {type(outputs).__name__}"


def scores_of_both(task: Task, source: Batch, target: Batch, name: str) -> tuple[Tensor, Tensor]:
    """``class_scores`` of the two batches, from one forward pass."""
    whole = Batch(source.index, joined_inputs(source, target), source.labels)
    scores = class_scores(task, task.model, whole, name)
    return scores[: len(source)], scores[len(source) :]
