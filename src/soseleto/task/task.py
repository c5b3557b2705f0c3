"""The task that a method trains, and the interface of a method: ``init`` and ``step``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from soseleto.data.batches import Batch
from soseleto.engines.contract import Losses
from soseleto.engines.shards import reshard
from soseleto.errors import CannotSave, UsageError
from soseleto.parallel.micro_batches import Sharing
from soseleto.task.finite import Guard, require_finite
from soseleto.weights import Weights

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeSchedule = Callable[[Optimizer, int], LRScheduler]


@dataclass(frozen=True)
class Task:
    """A model, its losses and the settings of a training.

    Every trainable parameter belongs to one of three parts: θ (named in ``shared``), φᵗ (named in ``target_head``) or
    φˢ (the others). In noisy-label mode all are shared. ``n_source`` counts the source examples of this process;
    ``sharing`` divides the work of a step over ranks and micro-batches. ``target_shares`` are the target's class
    shares, where its batches are class-balanced.
    """

    model: nn.Module
    losses: Losses
    n_source: int
    steps: int
    shared: frozenset[str]
    target_head: frozenset[str]
    make_optimizer: MakeOptimizer
    make_schedule: MakeSchedule | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    guard: Guard = field(default_factory=lambda: require_finite)
    classes: int | None = None  # of the source; None if its labels are not class indices
    sharing: Sharing = field(default_factory=Sharing)
    target_shares: Tensor | None = None


class MethodState(Protocol):
    """What a method keeps from step to step. The training loop steps the schedule after every step.

    It also calls ``after_step()``, where there is one: what a method does between steps, such as ending a phase. That
    is no part of the step, which may have been undone, and is never recorded as a CUDA graph.
    """

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def schedule(self) -> LRScheduler | None: ...

    @property
    def weights(self) -> Weights | None: ...


class Method(Protocol):
    """A training method: SOSELETO or one that it is compared with."""

    @property
    def name(self) -> str: ...

    def init(self, task: Task) -> Any: ...

    def step(self, state: Any, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One update. Returns its metrics as 0-d tensors, without synchronising with a GPU."""
        ...


def after_step(state: Any) -> None:
    """To be called after every step of a method."""
    if hasattr(state, "after_step"):
        state.after_step()


def take_step(task: Task, state: MethodState, gradients: dict[str, Tensor]) -> None:
    """One step of the optimizer with these gradients; none are left on the model."""
    for name, parameter in task.model.named_parameters():
        parameter.grad = laid_out_like(parameter, gradients[name]) if name in gradients else None
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


def laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the parameter's strides, as autograd lays out ``.grad``; fused optimizers rely on that."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def optimizer_and_schedule(task: Task) -> tuple[Optimizer, LRScheduler | None]:
    reshard(task.model)
    optimizer = task.make_optimizer([p for p in task.model.parameters() if p.requires_grad])
    _require_plain_step(optimizer)
    schedule = None if task.make_schedule is None else task.make_schedule(optimizer, task.steps)
    return optimizer, schedule


def _require_plain_step(optimizer: Optimizer) -> None:
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise UsageError(
            f"{type(optimizer).__name__} evaluates the loss itself, several times in a step, which no method does: "
            "write optimizer=soseleto.sgd(0.1), or another one that steps by the gradient alone."
        ) from error


def lr_left(optimizer: Optimizer, first_lr: float) -> Tensor | float:
    """The current learning rate as a share of the first, so that other step sizes can follow the schedule."""
    return optimizer.param_groups[0]["lr"] / first_lr if first_lr else 1.0


def state_of(state: Any) -> dict[str, Any]:
    """A method's state besides model, optimizer and schedule; raises if it has no state() and load_state()."""
    if not hasattr(state, "state") or not hasattr(state, "load_state"):
        raise CannotSave(f"{type(state).__name__} has no state() and load_state()")
    return state.state()
