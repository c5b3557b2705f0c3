"""The direction that source gradients are compared with: the target gradient, of one batch or averaged over steps.

    g ← decay·g + (1 − decay)·∂L_t/∂θ          q = Qᵀ g / (1 − decayᵐ) after m target batches, as in Adam

A target batch of 32 gives a direction that is mostly noise; a mean over tens of steps is mostly signal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, NAdam

from soseleto.engines.interface import as_dtype, reductions_dtype
from soseleto.errors import UsageError
from soseleto.pieces.piece import Direction, ParameterStates, State, Step
from soseleto.task.task import Task, peak_rate

ADAMS = (Adam, AdamW, NAdam)


@dataclass(frozen=True)
class running_mean(Direction):
    """An exponential moving average of the target gradient, bias-corrected as in Adam.

    decay: of the average, in [0, 1).
    layers: only parameters whose names begin with one of these; None takes all of θ. The noise of a large layer can
        hide the signal of a small one.
    """

    decay: float = 0.99
    layers: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.decay < 1.0:
            raise UsageError(f"decay of running_mean must lie in [0, 1), got {self.decay}: 0 averages nothing.")

    def init(self, task: Task) -> State:
        layers = self.layers
        if not isinstance(layers, str | tuple | None):
            raise UsageError(
                f"layers must be a tuple of names, got {layers!r}: write layers=('encoder.',), for example."
            )
        if layers is not None and not any(name.startswith(layers) for name in task.shared):
            raise UsageError(f"layers={layers} match none of θ's parameters: {', '.join(sorted(task.shared))}.")
        return {"means": {}, "batches": torch.zeros((), dtype=torch.float64, device=task.device)}

    def update(self, value: dict[str, Tensor], state: State, step: Step) -> dict[str, Tensor]:
        gradients = {name: g for name, g in value.items() if name in step.task.shared}
        if self.layers is not None:
            gradients = {name: g for name, g in gradients.items() if name.startswith(self.layers)}
        if self.decay == 0.0:
            return gradients
        gradients = {name: as_dtype(g, reductions_dtype(g.dtype)) for name, g in gradients.items()}
        for name, g in gradients.items():
            if name not in state["means"]:  # one that is trained from now on is corrected with the others
                state["means"][name] = g * (1.0 - self.decay ** state["batches"]).to(g.dtype)
        means = {name: state["means"][name] for name in gradients}
        if len(gradients) == 1:  # one layer's weight: on a GPU the multi-tensor kernel would leave most of it idle
            for name, g in gradients.items():
                means[name].lerp_(g, 1.0 - self.decay)
        elif gradients:
            torch._foreach_lerp_(list(means.values()), list(gradients.values()), 1.0 - self.decay)
        return means

    def correct(self, q: Tensor, state: State) -> Tensor:
        state["batches"].add_(1)
        return q * self.correction(state["batches"])

    def correction(self, batches: Tensor) -> Tensor | float:
        """1/(1 − decayᵐ): the average starts at 0."""
        return (1.0 - torch.pow(self.decay, batches)).reciprocal() if self.decay else 1.0


def last_batch(layers: tuple[str, ...] | None = None) -> running_mean:
    """The target gradient of the step's own batch: the paper's."""
    return running_mean(0.0, layers)


@dataclass(frozen=True)
class preconditioned(Direction):
    """The direction as the optimizer would step along it: q says whether the optimizer's own step would help.

        θ ← θ − Λ P ∂L/∂θ        P: the optimizer's preconditioner, diagonal;  Λ: the learning rates of the groups
        q = Qᵀ Λ P g             the decrease of the target loss by a step of this optimizer on each example

    of: the direction to precondition. The optimizer is torch's Adam, AdamW or NAdam.

    Plain alignments, Qᵀg, are those of a step of SGD. Adam and AdamW divide by √v̂ + ε, so that a parameter with small
    gradients moves as far as one with large ones. P is read from the optimizer's state before the step, and Λ are the
    peak rates of the schedule, since the weight step follows the schedule already. Before the optimizer's
    first step it has no state; every P here would after a first step with the gradient g make it sign(g), which is then
    the direction. A parameter that the optimizer does not step is left out of the alignments.

    Example:
        >>> from soseleto import Soseleto
        >>> method = Soseleto(direction=preconditioned(running_mean(0.95)))
    """

    of: running_mean = field(default_factory=running_mean)

    def init(self, task: Task) -> State:
        return self.of.init(task)

    def update(self, value: dict[str, Tensor], state: State, step: Step) -> dict[str, Tensor]:
        if step.optimizer is None:
            raise UsageError("preconditioned reads the optimizer's state: write Selection(..., optimizer=optimizer).")
        found = self.of.update(value, state, step)
        # ``correct`` multiplies by the correction, which is for g's size
        return as_optimizer_steps(found, step.optimizer, lambda: 1.0 / self.of.correction(state["batches"] + 1))

    @property
    def layers(self) -> tuple[str, ...] | None:
        return self.of.layers

    def correct(self, q: Tensor, state: State) -> Tensor:
        return self.of.correct(q, state)


def as_optimizer_steps(
    gradients: Mapping[str, Tensor], states: ParameterStates, first: Callable[[], Tensor | float] = lambda: 1.0
) -> dict[str, Tensor]:
    """Λ P g of the parameters that the optimizer steps; ``first`` is the size of P g before its first step."""
    if not isinstance(states.optimizer, ADAMS):
        raise UsageError(
            "preconditioned knows the optimizers Adam, AdamW and NAdam, got "
            f"{type(states.optimizer).__name__}: leave it out."
        )
    direction: dict[str, Tensor] = {}
    for name, g in gradients.items():
        if (kept := states.of(name)) is not None:
            scale = _of_adam(*kept)
            along = g.sign() * first() if scale is None else g / scale
            direction[name] = along * peak_rate(kept[1])
    return direction


def _of_adam(state: Mapping[str, Any], group: Mapping[str, Any]) -> Tensor | None:
    """√v̂ + ε, v̂ = v/(1 − β₂ᵗ); None before the first step. A count on a GPU is not read, which would synchronise."""
    if not state:
        return None
    step = state["step"].double() if state["step"].is_cuda else float(state["step"])
    if not isinstance(step, Tensor) and not step:
        return None
    squares: Tensor = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
    return (squares / (1.0 - group["betas"][1] ** step)).sqrt_().add_(group["eps"])
