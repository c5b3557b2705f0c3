"""The direction that source gradients are compared with: the target gradient of one batch, or a mean over steps.

    g ← decay·g + (1 − decay)·∂L_t/∂θ          q = Qᵀ g / (1 − decayᵐ) after m target batches, as in Adam

A target batch of 32 gives a direction that is mostly noise; a mean over tens of steps is mostly signal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.task.piece import DirectionPiece, State
from soseleto.task.task import Task


@dataclass(frozen=True)
class last_batch(DirectionPiece):
    """The target gradient of the step's own batch: the paper's.

    layers: only parameters whose names begin with one of these; None takes all of θ.
    """

    layers: tuple[str, ...] | None = None

    slot: ClassVar[str] = "direction"

    def init(self, task: Task) -> State:
        _require_layers(self.layers, task)
        return {}

    def looks(self, taken: int) -> bool:
        return True

    def begin(self, state: State) -> None:
        pass

    def update(self, found: dict[str, Tensor], state: State, task: Task) -> dict[str, Tensor]:
        return _over(found, self.layers, task)

    def last(self, state: State) -> Mapping[str, Tensor]:
        raise AssertionError("every step evaluates the target")

    def correction(self, state: State) -> Tensor | float:
        return 1.0


@dataclass(frozen=True)
class running_mean(DirectionPiece):
    """An exponential moving average of the target gradient, bias-corrected as in Adam.

    decay: of the average, in [0, 1).
    every: evaluate the target every ``every`` steps only and reuse the average in between: exactness for speed, for
        noisy-label mode, where the target takes no step of its own.
    layers: only parameters whose names begin with one of these; None takes all of θ. A large layer can hide in its
        noise the signal of a small one.
    """

    decay: float = 0.99
    every: int = 1
    layers: tuple[str, ...] | None = None

    slot: ClassVar[str] = "direction"

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise UsageError(f"decay of running_mean must lie in [0, 1), got {self.decay}: 0 averages nothing.")
        if self.every < 1:
            raise UsageError(f"every of running_mean must be at least 1, got {self.every}.")

    def init(self, task: Task) -> State:
        _require_layers(self.layers, task)
        if task.target_head and self.every > 1:
            raise UsageError(
                f"running_mean(every={self.every}) would leave the target head untrained in between: leave every out."
            )
        return {"means": {}, "batches": torch.zeros((), dtype=torch.float64, device=task.device)}

    def looks(self, taken: int) -> bool:
        return taken % self.every == 0

    def begin(self, state: State) -> None:
        state["batches"].add_(1)

    def update(self, found: dict[str, Tensor], state: State, task: Task) -> dict[str, Tensor]:
        found = _over(found, self.layers, task)
        if self.decay == 0.0 and self.every == 1:
            return found
        for name, g in found.items():
            if name not in state["means"]:
                state["means"][name] = torch.zeros_like(g)
        means = {name: state["means"][name] for name in found}
        if len(found) == 1:  # one layer's weight: on a GPU the multi-tensor kernel would leave most of it idle
            for name, g in found.items():
                means[name].lerp_(g, 1.0 - self.decay)
        elif found:
            torch._foreach_lerp_(list(means.values()), list(found.values()), 1.0 - self.decay)
        return means

    def last(self, state: State) -> Mapping[str, Tensor]:
        means: dict[str, Tensor] = state["means"]
        return means

    def correction(self, state: State) -> Tensor | float:
        """1/(1 − decayᵐ): the average starts at 0."""
        return (1.0 - torch.pow(self.decay, state["batches"])).reciprocal() if self.decay else 1.0


def _over(found: dict[str, Tensor], layers: tuple[str, ...] | None, task: Task) -> dict[str, Tensor]:
    """The gradients over θ, or over the layers of θ that were asked for."""
    shared = {name: g for name, g in found.items() if name in task.shared}
    return shared if layers is None else {name: g for name, g in shared.items() if name.startswith(layers)}


def _require_layers(layers: tuple[str, ...] | None, task: Task) -> None:
    if not isinstance(layers, str | tuple | None):
        raise UsageError(f"layers must be a tuple of names, got {layers!r}: write layers=('encoder.',), for example.")
    if layers is not None and not any(name.startswith(layers) for name in task.shared):
        raise UsageError(f"layers={layers} match none of θ's parameters: {', '.join(sorted(task.shared))}.")
