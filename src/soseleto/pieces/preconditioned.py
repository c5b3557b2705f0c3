"""The direction as the optimizer would step along it.

    θ ← θ − Λ P ∂L/∂θ            P: the optimizer's preconditioner, diagonal;  Λ: the learning rates of the groups
    q = Qᵀ Λ P g                 the decrease of the target loss by a step of this optimizer on each example

Plain alignments, Qᵀg, are those of a step of SGD. Adam and AdamW divide by √v̂ + ε, with v̂ the bias-corrected running
mean of squared gradients, so that a parameter with small gradients moves as far as one with large ones.

P is read from the optimizer's state before the step, and Λ are the rates that the schedule starts from: the weight step
follows the schedule already. Before the optimizer's first step it has no state; every P here would after a first step
with the gradient g make it sign(g), which is then the direction. A parameter that the optimizer does not step is left
out of the alignments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, NAdam, Optimizer, RMSprop

from soseleto.errors import UsageError
from soseleto.pieces.target_average import last_batch, running_mean
from soseleto.task.parameter_states import ParameterStates
from soseleto.task.piece import DirectionPiece, State
from soseleto.task.task import Task

# by(parameter, state, group) -> what the optimizer multiplies the parameter's gradient by, beside the learning rate
Preconditioner = Callable[[Tensor, Mapping[str, Any], Mapping[str, Any]], Tensor]


@dataclass(frozen=True)
class preconditioned(DirectionPiece):
    """``of``, multiplied by the preconditioner of the optimizer: q asks whether the optimizer's own step would help.

    of: ``running_mean(...)`` or ``last_batch(...)``.
    by: None takes that of torch's Adam, AdamW, NAdam, Adagrad, RMSprop or Adafactor. For another optimizer a function
        ``by(parameter, state, group)`` of what it keeps about a parameter (``optimizer.state[parameter]``, never empty)
        and of the parameter's group in ``optimizer.param_groups``. It returns what the gradient is multiplied by, in
        the parameter's shape, without the learning rate.

    Example:
        >>> from soseleto import Soseleto
        >>> method = Soseleto(direction=preconditioned(running_mean(0.95)))
    """

    of: last_batch | running_mean = field(default_factory=running_mean)
    by: Preconditioner | None = None

    slot: ClassVar[str] = "direction"

    def __post_init__(self) -> None:
        given: object = self.of
        if not isinstance(given, last_batch | running_mean):
            raise UsageError(f"preconditioned takes running_mean(...) or last_batch(...), got {self.of!r}.")

    def init(self, task: Task) -> State:
        return self.of.init(task)

    def require(self, optimizer: Optimizer | None) -> None:
        if optimizer is None:
            raise UsageError("preconditioned reads the optimizer's state: write Selection(..., optimizer=optimizer).")
        if self.by is None:
            _of_kind(optimizer)

    def looks(self, taken: int) -> bool:
        return self.of.looks(taken)

    def begin(self, state: State) -> None:
        self.of.begin(state)

    def update(self, found: dict[str, Tensor], state: State, task: Task) -> dict[str, Tensor]:
        return self.of.update(found, state, task)

    def last(self, state: State) -> Mapping[str, Tensor]:
        return self.of.last(state)

    def correction(self, state: State) -> Tensor | float:
        return self.of.correction(state)

    def precondition(
        self, found: Mapping[str, Tensor], state: State, kept: ParameterStates | None
    ) -> dict[str, Tensor]:
        assert kept is not None  # by ``require``
        by = self.by or _of_kind(kept.optimizer)
        direction: dict[str, Tensor] = {}
        for name, g in found.items():
            if (its := kept.of(name)) is None:
                continue
            if _has_stepped(its.state):
                step = g * by(its.parameter.detach(), its.state, its.group)
            else:  # alignments are multiplied by the correction, which is for the size of g
                step = g.sign() / self.correction(state)
            direction[name] = step * its.group.get("initial_lr", its.group["lr"])
        return direction


def _has_stepped(state: Mapping[str, Any]) -> bool:
    """Whether the optimizer has stepped a parameter; a count on a GPU is not read, which would synchronise."""
    steps = state.get("step", 1) if state else 0
    return bool(getattr(steps, "is_cuda", False) or steps > 0)


def _of_adam(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """1/(√v̂ + ε), v̂ = v/(1 − β₂ᵗ)."""
    squares: Tensor = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    so_far = 1.0 - group["betas"][1] ** state["step"].double()
    return (squares / so_far).sqrt_().add_(group["eps"]).reciprocal_()


def _of_adagrad(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    total: Tensor = state["sum"]
    return total.sqrt().add_(group["eps"]).reciprocal_()


def _of_rmsprop(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    squares: Tensor = state["square_avg"]
    if group["centered"]:
        squares = squares - state["grad_avg"].square()
    return squares.sqrt().add_(group["eps"]).reciprocal_()


def _of_adafactor(parameter: Tensor, state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor:
    """max(ε₂, rms(θ))/√V, V factored into rows and columns; without the clip, which only a gradient decides."""
    smallest, smallest_scale = group["eps"]
    smallest = torch.finfo(parameter.dtype).eps if smallest is None else smallest
    squares: Tensor
    if "variance" in state:
        squares = state["variance"]
    else:
        rows = state["row_var"]
        squares = (rows @ state["col_var"]) / rows.mean(dim=-2, keepdim=True).clamp_(min=smallest)
    scale = parameter.square().mean().sqrt_().clamp_(min=smallest_scale)
    return squares.clamp(min=smallest * smallest).rsqrt_().mul_(scale)


_KINDS: Mapping[type[Optimizer], Preconditioner] = {
    Adam: _of_adam,
    AdamW: _of_adam,
    NAdam: _of_adam,
    Adagrad: _of_adagrad,
    RMSprop: _of_rmsprop,
    Adafactor: _of_adafactor,
}


def _of_kind(optimizer: Optimizer) -> Preconditioner:
    for kind, found in _KINDS.items():
        if isinstance(optimizer, kind):
            return found
    name = type(optimizer).__name__
    if isinstance(optimizer, SGD):
        raise UsageError("preconditioned has no effect with SGD, which has no preconditioner: leave it out.")
    raise UsageError(f"preconditioned does not know {name}: write preconditioned(by=function), see its help.")
