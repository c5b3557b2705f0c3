"""What a training with source weights carries from step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from soseleto.data.batches import Batch
from soseleto.engines.contract import Engine, Losses, Passes
from soseleto.engines.unchanged import is_recording
from soseleto.task.task import Task, lr_left
from soseleto.weights import Weights

REFRESH = 25  # steps between two refreshes of what pieces do not compute in every step


class ParameterState(NamedTuple):
    """A parameter, what the optimizer keeps about it (nothing before its first step), and its group's settings."""

    parameter: nn.Parameter
    state: Mapping[str, Any]
    group: Mapping[str, Any]


class ParameterStates:
    """Reads an optimizer's state by parameter name; the state is neither copied nor changed."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer, self._model = optimizer, model
        self._groups = 0  # that the places are from
        self._places: dict[str, tuple[nn.Parameter, int]] = {}

    def of(self, name: str) -> ParameterState | None:
        """None for a parameter that the optimizer does not step."""
        if len(self.optimizer.param_groups) != self._groups:
            self._find()
        if name not in self._places:
            return None
        parameter, group = self._places[name]
        return ParameterState(parameter, self.optimizer.state.get(parameter, {}), self.optimizer.param_groups[group])

    def _find(self) -> None:
        groups = self.optimizer.param_groups
        of_group = {id(p): at for at, group in enumerate(groups) for p in group["params"]}
        named = self._model.named_parameters()
        self._places = {name: (p, of_group[id(p)]) for name, p in named if id(p) in of_group}
        self._groups = len(groups)


@dataclass
class SoseletoState:
    """Weights, optimizer and the pieces' states.

    Every number is a tensor on the device that is changed in place: nothing here synchronises with a GPU, and a step
    can be recorded as a CUDA graph.
    """

    task: Task
    plain_losses: Losses  # the task's, with the last layer recorded where a piece reads it
    losses: Losses  # what is differentiated
    engine: Engine
    weights: Weights
    pieces: dict[str, Any]  # the state of each piece, by its argument
    refresh: Callable[[dict[str, Any]], None]  # of the pieces' states, between steps
    optimizer: Optimizer = None  # type: ignore[assignment]  # set by ``follow``
    schedule: LRScheduler | None = None
    parameter_states: ParameterStates | None = None  # of the optimizer
    first_lr: float = 0.0
    taken: int = 0  # steps

    def follow(self, optimizer: Optimizer, schedule: LRScheduler | None = None) -> None:
        """Step with this optimizer; the weight step follows its learning rate."""
        self.optimizer, self.schedule = optimizer, schedule
        self.parameter_states = ParameterStates(optimizer, self.task.model)
        group = optimizer.param_groups[0]
        self.first_lr = float(group.get("initial_lr", group["lr"]))

    def lr_left(self) -> Tensor | float:
        """The learning rate now, as a share of the first."""
        return lr_left(self.optimizer, self.first_lr) if self.first_lr else 1.0

    def advance(self, steps: int) -> None:
        """Count steps, taken or replayed."""
        self.taken += steps
        if steps > 0 and self.taken % REFRESH == 0 and not is_recording():
            self.refresh(self.pieces)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside model, optimizer and schedule."""
        return {"weights": self.weights.state(), "pieces": self.pieces, "taken": self.taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what ``state`` returned."""
        self.weights.load_state(state["weights"])
        self.pieces = load_tree(self.pieces, state["pieces"], self.task.device)
        self.taken = state["taken"]


def load_tree(mine: Any, saved: Any, device: torch.device) -> Any:
    """``saved`` on the device, in tensors of the same place and type as ``mine`` where there are such."""
    if isinstance(mine, Tensor):
        mine.copy_(saved)
        return mine
    if isinstance(mine, list):
        return [load_tree(its, theirs, device) for its, theirs in zip(mine, saved, strict=True)]
    if isinstance(saved, Mapping):
        return {name: load_tree((mine or {}).get(name), value, device) for name, value in saved.items()}
    return saved.to(device) if isinstance(saved, Tensor) else saved


def without_alignments(
    task: Task,
    losses: Losses,
    source: Batch,
    target: Batch | None,
    coefficients: Tensor,
    *,
    target_gradient_too: bool = True,
) -> Passes:
    """The passes of a step without an engine: ordinary gradients, of the target only where it is given.

    target_gradient_too: False where a forward pass of the target is enough.
    """
    of_source, gradient = task.sharing.gradient(task.model, losses.source, source, "source", coefficients)
    of_target, target_gradient = of_source[:0], dict[str, Tensor]()
    if target is not None and target_gradient_too:
        of_target, target_gradient = task.sharing.gradient(task.model, losses.target, target, "target")
    elif target is not None:
        of_target = task.sharing.losses(task.model, losses.target, target)
    return Passes(of_source, of_target, of_source[:0], gradient, target_gradient)
