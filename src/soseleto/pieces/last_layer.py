"""Alignments over the last layer's weight, in coordinates of choice, without a backward pass.

    G ← decay·G + (1 − decay)·mean over the target batch of r_t h_tᵀ        q_j = r_jᵀ G h_j / (1 − decayᵐ)

r is the gradient of an example's loss at the outputs of the last linear layer, p − onehot(label) for cross-entropy, and
h are the inputs of that layer. As it stands this is the exact alignment over the layer's weight, which the engines
compute for ``running_mean(decay, layers=...)``; it needs the forward pass of training, one of the target, and a matrix
product. Each form changes r or h before the product, on the side it is for: see ``residuals`` and ``inputs``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.task.last_layer import LastLayer
from soseleto.task.piece import Alignment, Piece, State, Step
from soseleto.task.task import Task


class Form:
    """A change of coordinates of the last layer: no state, no change."""

    def update(self, seen: Mapping[str, LastLayer], state: State, step: Step) -> Mapping[str, LastLayer]:
        """``seen`` by side, changed; the state is made by the first batch and then changed in place."""
        return seen

    def refresh(self, state: State) -> None:
        """Between steps, outside of CUDA graphs: what need not be computed in every step."""


@dataclass(frozen=True, init=False)
class last_layer(Piece):
    """Alignments of the last layer in place of the engine's: in ``alignment`` for the weights, in ``scores`` for those.

    forms: changes of coordinates, in order; none is the exact alignment over the layer's weight.
    decay: of the running mean of the target's r hᵀ.
    layer: the name of the layer; None takes the last linear layer that the model calls.

    Example:
        >>> from soseleto import Soseleto
        >>> from soseleto.pieces import at_temperature, centred, last_layer, unit_length, without_own_error
        >>> ranking = last_layer(centred(), unit_length(), at_temperature(4.0), without_own_error())
        >>> method = Soseleto(alignment=last_layer(), scores=ranking)
    """

    forms: tuple[Form, ...]
    decay: float = 0.99
    layer: str | None = None

    slot: ClassVar[str] = "alignment"
    replaces_engine: ClassVar[bool] = True

    def __init__(self, *forms: Form, decay: float = 0.99, layer: str | None = None) -> None:
        for name, value in (("forms", forms), ("decay", decay), ("layer", layer)):
            object.__setattr__(self, name, value)
        for form in forms:
            if not isinstance(form, Form):
                raise UsageError(f"last_layer takes forms such as centred() or at_temperature(4.0), got {form!r}.")
        if not 0.0 <= decay < 1.0:
            raise UsageError(f"decay of last_layer must lie in [0, 1), got {decay}: 0 averages nothing.")

    def __repr__(self) -> str:
        named = [] if self.layer is None else [f"layer={self.layer!r}"]
        return f"last_layer({', '.join([*map(repr, self.forms), f'decay={self.decay}', *named])})"

    @property
    def watched(self) -> frozenset[str | None]:  # type: ignore[override]
        return frozenset({self.layer})

    def init(self, task: Task) -> State:
        if task.target_head:
            raise UsageError("last_layer needs one head for source and target, and mode='transfer' has two: drop it.")
        batches = torch.zeros((), dtype=torch.float64, device=task.device)
        return {"forms": [{} for _ in self.forms], "mean": {}, "batches": batches}

    def update(self, value: Alignment, state: Any, step: Step) -> Alignment:
        seen = _whole(step, state)
        for form, its in zip(self.forms, state["forms"], strict=True):
            seen = form.update(seen, its, step)
        if step.target_loss is not None:
            self._average(seen["target"], state, step)
        source = seen["source"]
        q = (torch.matmul(source.inputs, state["mean"]["gradient"].T) * source.residuals).sum((1, 2))
        return replace(value, q=q * self._correction(state), unit=1.0, evidence=None)

    def _average(self, target: LastLayer, state: State, step: Step) -> None:
        """The target batch's mean of r hᵀ enters the running mean G."""
        product = torch.matmul(target.residuals.flatten(0, 1).T, target.inputs.flatten(0, 1))
        found = step.task.sharing.sum(product) / step.target.total
        mean = state["mean"].setdefault("gradient", torch.zeros_like(found))
        mean.lerp_(found, 1.0 - self.decay)
        state["batches"].add_(1)

    def _correction(self, state: State) -> Tensor | float:
        return (1.0 - torch.pow(self.decay, state["batches"])).reciprocal() if self.decay else 1.0

    def refresh(self, state: Any) -> None:
        for form, its in zip(self.forms, state["forms"], strict=True):
            form.refresh(its)


def _whole(step: Step, state: State) -> Mapping[str, LastLayer]:
    """Both sides that the step evaluates; a rank whose part of a batch is empty has run no pass for it."""
    sides = ("source",) if step.target_loss is None else ("source", "target")
    seen = step.last_layer
    if all(side in seen for side in sides):
        return seen
    if seen:
        empty = next(iter(seen.values())).without_examples()
    else:
        classes, width = state["mean"]["gradient"].shape
        h, z = (state["mean"]["gradient"].new_zeros(0, 1, size) for size in (width, classes))
        empty = LastLayer(h, z, z)
    return {side: seen.get(side, empty) for side in sides}
