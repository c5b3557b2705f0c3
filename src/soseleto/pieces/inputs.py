"""Forms of ``last_layer`` that change the layer's inputs h: centred, whitened, at unit length.

    z = W h + b = W A⁻¹ · A(h − m) + (b + W m)

The layer is linear, so its inputs may be read in other coordinates, A(h − m), without a change of the model; its weight
is then W A⁻¹, and alignments over that are other ones. In the old coordinates they are rᵀ G AᵀA (h − m): the target
gradient is preconditioned by AᵀA, the inverse covariance of the inputs where they are whitened, which is one factor of
K-FAC's Kronecker form.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soseleto.errors import UsageError
from soseleto.pieces.last_layer import Form
from soseleto.task.last_layer import LastLayer
from soseleto.task.piece import State, Step


@dataclass(frozen=True)
class centred(Form):
    """Inputs minus their running mean over source examples, h − m.

    Inputs that follow a ReLU have a large common part, which makes every alignment large and equal in sign to the
    agreement of the labels alone; what distinguishes examples is in the rest.
    """

    decay: float = 0.99

    def __post_init__(self) -> None:
        _require_decay(self.decay)

    def update(self, seen: Mapping[str, LastLayer], state: State, step: Step) -> Mapping[str, LastLayer]:
        m = _running(state, "mean", _mean(seen["source"].inputs, seen["source"], step), self.decay)
        return {side: replace(layer, inputs=layer.inputs - m) for side, layer in seen.items()}


@dataclass(frozen=True)
class whitened(Form):
    """Centred inputs times L⁻¹, where L Lᵀ is their running covariance, shrunk: C + shrink·(tr C/d)·I.

    shrink: the share of the mean variance that is added to every direction's; a large one leaves inputs centred alone.

    L⁻¹ is computed between steps, every ``REFRESH`` of them (``soseleto.task.state``).
    """

    shrink: float = 0.1
    decay: float = 0.99

    def __post_init__(self) -> None:
        _require_decay(self.decay)
        if not self.shrink > 0:
            raise UsageError(f"shrink of whitened must be above 0, got {self.shrink}: 0.1 is a good first value.")

    def update(self, seen: Mapping[str, LastLayer], state: State, step: Step) -> Mapping[str, LastLayer]:
        source = seen["source"]
        m = _running(state, "mean", _mean(source.inputs, source, step), self.decay)
        _running(state, "covariance", _covariance(source.inputs - m, source, step), self.decay)
        if "factor" not in state:
            state["factor"] = torch.zeros_like(state["covariance"]["sum"])
            self.refresh(state)
        return {side: replace(layer, inputs=(layer.inputs - m) @ state["factor"].T) for side, layer in seen.items()}

    def refresh(self, state: State) -> None:
        if "factor" not in state:
            return
        c = _corrected(state["covariance"])
        ridge = self.shrink * c.diagonal().mean() + torch.finfo(c.dtype).tiny
        eye = torch.eye(len(c), dtype=c.dtype, device=c.device)
        lower, _ = torch.linalg.cholesky_ex(c + ridge * eye)  # without a check, which would synchronise
        state["factor"].copy_(torch.linalg.solve_triangular(lower, eye, upper=False))


@dataclass(frozen=True)
class unit_length(Form):
    """Inputs of both sides at unit length, h/‖h‖: alignments do not grow with the size of an example's features."""

    def update(self, seen: Mapping[str, LastLayer], state: State, step: Step) -> Mapping[str, LastLayer]:
        return {side: replace(layer, inputs=_at_unit_length(layer.inputs)) for side, layer in seen.items()}


def _at_unit_length(h: Tensor) -> Tensor:
    return torch.nn.functional.normalize(h, dim=-1)


def _require_decay(decay: float) -> None:
    if not 0.0 <= decay < 1.0:
        raise UsageError(f"decay of the inputs' mean must lie in [0, 1), got {decay}: 0 takes each batch's own.")


def _mean(values: Tensor, layer: LastLayer, step: Step) -> Tensor:
    """Over the rows of the whole batch that are used, (d,)."""
    used = layer.used.to(values.dtype)
    total = step.task.sharing.sum(torch.cat([(values * used.unsqueeze(-1)).sum((0, 1)), used.sum().view(1)]))
    return total[:-1] / total[-1].clamp_min(1.0)


def _covariance(centred_inputs: Tensor, layer: LastLayer, step: Step) -> Tensor:
    used = layer.used.to(centred_inputs.dtype)
    rows = (centred_inputs * used.unsqueeze(-1)).flatten(0, 1)
    total = step.task.sharing.sum(rows.T @ rows)
    return total / step.task.sharing.sum(used.sum()).clamp_min(1.0)


def _running(state: State, name: str, new: Tensor, decay: float) -> Tensor:
    """The exponential moving average after this batch, corrected for its start."""
    if name not in state:
        state[name] = {"sum": torch.zeros_like(new), "weight": torch.zeros((), dtype=new.dtype, device=new.device)}
    state[name]["sum"].lerp_(new, 1.0 - decay)
    state[name]["weight"].mul_(decay).add_(1.0 - decay)
    return _corrected(state[name])


def _corrected(average: Mapping[str, Tensor]) -> Tensor:
    return average["sum"] / average["weight"]
