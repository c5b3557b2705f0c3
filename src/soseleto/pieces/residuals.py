"""Forms of ``last_layer`` that change residuals: those of the target at a temperature, those of the source in size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.pieces.last_layer import Form
from soseleto.task.last_layer import LastLayer, replace_side
from soseleto.task.piece import State, Step

_SMALLEST_ERROR = 1e-4


@dataclass(frozen=True)
class at_temperature(Form):
    """The target's residuals at a temperature: r_t = softmax(z_t/τ) − y_t in place of softmax(z_t) − y_t.

    Once a network is sure of the trusted examples their residuals vanish, and with them every alignment; those that
    remain are of the few examples it gets wrong, and a mean of these can turn over. A temperature above 1 keeps the
    residuals of all trusted examples alive, and the direction of their labels in it. For cross-entropy: y is read from
    the residuals themselves, as softmax(z) − r, so soft and smoothed labels are served too.
    """

    temperature: float = 4.0

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise UsageError(f"temperature must be above 0, got {self.temperature}: 4 is a good first value.")

    def update(self, seen: Mapping[str, LastLayer], state: State, step: Step) -> Mapping[str, LastLayer]:
        if "target" not in seen:
            return seen
        target = seen["target"]
        if not state:  # once: it synchronises with the device
            _require_cross_entropy(target)
            state["checked"] = torch.ones((), device=target.outputs.device)
        z, used = target.outputs, target.used.unsqueeze(-1)
        change = ((z / self.temperature).softmax(-1) - z.softmax(-1)) * used
        return replace_side(seen, "target", residuals=target.residuals + change)


def _require_cross_entropy(target: LastLayer) -> None:
    """Raise unless softmax(z) − r is a label: entries from 0 to 1 with a sum of 1, one of them at least a half."""
    label = (target.outputs.softmax(-1) - target.residuals)[target.used]
    largest, sums = label.amax(-1), label.sum(-1)
    fine = (label.amin(-1) > -0.05) & (largest > 0.45) & (largest < 1.05) & ((sums - 1.0).abs() < 0.05)
    if not bool(fine.all()):
        raise UsageError(
            "at_temperature needs a cross-entropy of the last layer's outputs, one label per example, and this loss "
            "has other gradients: leave it out."
        )


@dataclass(frozen=True)
class without_own_error(Form):
    """The source's residuals at unit length, r_j/‖r_j‖: an example's own error is taken out of its alignment.

    A gradient is an error times a direction. Examples that the network has fitted, right or memorised, have small
    residuals and alignments near zero; at unit length they still show whether their label agrees with the target's.
    """

    def update(self, seen: Mapping[str, LastLayer], state: State, step: Step) -> Mapping[str, LastLayer]:
        r = seen["source"].residuals
        return replace_side(seen, "source", residuals=r / _length(r).clamp_min(_SMALLEST_ERROR))


def _length(residuals: Tensor) -> Tensor:
    """Of an example's whole residual, (n, 1, 1)."""
    return residuals.square().sum((1, 2), keepdim=True).sqrt()
