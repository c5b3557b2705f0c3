"""The direction over named layers, in coordinates in which their inputs are centred and whitened.

    y = W a + b = W̃ ã + b̃,    ã = A(a − m),    AᵀA = C⁻¹            m, C: running mean and covariance of the inputs a
    q_j = ⟨∂ℓ_j/∂W̃, ∂L_t/∂W̃⟩ = ⟨∂ℓ_j/∂W, D⟩ − ⟨∂ℓ_j/∂b, D m⟩,      D = (∂L_t/∂W − ∂L_t/∂b mᵀ) C⁻¹

So alignments in the new coordinates are those of the old ones with another direction, exact with every engine. C is
shrunk, C + shrink·(tr C/d)·I. A convolution is a linear layer on patches, whose covariance is taken in Kronecker form,
C ⊗ I, from the covariance C of the channels; their mean is that of the channels at every position. A layer without bias
cannot be centred: m is 0 there, and C the second moment. m and C⁻¹ are computed between steps, every ``REFRESH`` of
them (``soseleto.task.state``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from soseleto.errors import UsageError
from soseleto.pieces.target_average import running_mean
from soseleto.task.layer_inputs import Moments
from soseleto.task.piece import DirectionPiece, State
from soseleto.task.task import Task

_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


@dataclass(frozen=True)
class whitened_layers(DirectionPiece):
    """A running mean of the target gradient over ``layers``, preconditioned by the covariance of their inputs.

    layers: names of linear layers and convolutions, such as ("features.0", "classifier").
    decay: of the target gradient and of the inputs' moments.
    shrink: the share of the mean variance that is added to every direction's.

    Source and target take separate passes, since a layer's bias has a part in its weight's direction.
    """

    layers: tuple[str, ...]
    decay: float = 0.99
    shrink: float = 0.1

    slot: ClassVar[str] = "direction"

    def __post_init__(self) -> None:
        given: object = self.layers
        if not isinstance(given, tuple) or not given:
            raise UsageError(f"layers of whitened_layers must be a tuple of names, got {self.layers!r}.")
        if not self.shrink > 0:
            raise UsageError(f"shrink of whitened_layers must be above 0, got {self.shrink}.")
        running_mean(self.decay)  # checks it

    @property
    def inputs_of(self) -> tuple[str, ...]:
        return self.layers

    @property
    def _average(self) -> running_mean:
        return running_mean(self.decay, layers=tuple(f"{layer}." for layer in self.layers))

    def init(self, task: Task) -> State:
        modules = dict(task.model.named_modules())
        for layer in self.layers:
            module = modules.get(layer)
            if not isinstance(module, _KINDS) or getattr(module, "groups", 1) != 1:
                raise UsageError(f"{layer!r} is no linear layer or ungrouped convolution of the model: name others.")
            if f"{layer}.weight" not in task.shared:
                raise UsageError(f"the weight of {layer!r} is not trained, or not by both sides: name other layers.")
        return {"average": self._average.init(task), "inputs": {}}

    def looks(self, taken: int) -> bool:
        return True

    def begin(self, state: State) -> None:
        self._average.begin(state["average"])

    def update(self, found: dict[str, Tensor], state: State, task: Task) -> dict[str, Tensor]:
        averaged = self._average.update(found, state["average"], task)
        direction: dict[str, Tensor] = {}
        for layer in self.layers:
            weight, bias = averaged[f"{layer}.weight"], averaged.get(f"{layer}.bias")
            d, of_bias = _preconditioned(weight, bias, state["inputs"].get(layer))
            direction[f"{layer}.weight"] = d
            if of_bias is not None:
                direction[f"{layer}.bias"] = of_bias
        return direction

    def last(self, state: State) -> Mapping[str, Tensor]:
        raise AssertionError("every step evaluates the target")

    def correction(self, state: State) -> Tensor | float:
        return self._average.correction(state["average"])

    def learn(self, moments: Mapping[str, Moments], state: State, task: Task) -> None:
        parameters = dict(task.model.named_parameters())
        for layer, new in moments.items():
            new_mean = new.sums / new.count
            if layer not in state["inputs"]:
                zero = {"mean": torch.zeros_like(new_mean), "squares": torch.zeros_like(new.squares)}
                has_bias = new_mean.new_full((), float(f"{layer}.bias" in parameters))
                state["inputs"][layer] = {**zero, "weight": new_mean.new_zeros(()), "centred": has_bias}
            its = state["inputs"][layer]
            its["mean"].lerp_(new_mean, 1.0 - self.decay)
            its["squares"].lerp_(new.squares / new.count, 1.0 - self.decay)
            its["weight"].mul_(self.decay).add_(1.0 - self.decay)
            if "inverse" not in its:
                its["inverse"], its["at"] = torch.zeros_like(its["squares"]), torch.zeros_like(its["mean"])
                self._invert(its)

    def refresh(self, state: State) -> None:
        for its in state["inputs"].values():
            self._invert(its)

    def _invert(self, its: State) -> None:
        """m and C⁻¹ as the moments are now."""
        mean = its["centred"] * its["mean"] / its["weight"]
        covariance = its["squares"] / its["weight"] - torch.outer(mean, mean)
        eye = torch.eye(len(mean), dtype=mean.dtype, device=mean.device)
        ridge = self.shrink * covariance.diagonal().mean() + torch.finfo(mean.dtype).tiny
        lower, _ = torch.linalg.cholesky_ex(covariance + ridge * eye)  # without a check, which would synchronise
        its["inverse"].copy_(torch.cholesky_inverse(lower))
        its["at"].copy_(mean)


def _preconditioned(weight: Tensor, bias: Tensor | None, its: State | None) -> tuple[Tensor, Tensor | None]:
    """D and −D m, from the target gradients of weight and bias; until inputs were seen, m is 0 and C the identity."""
    if its is None:
        return weight, None
    mean, inverse = its["at"].to(weight.dtype), its["inverse"].to(weight.dtype)
    channels = weight.movedim(1, -1)  # (out, positions ..., in)
    if bias is None:
        return (channels @ inverse).movedim(-1, 1), None
    shape = (-1, *(1 for _ in channels.shape[1:]))
    d = (channels - bias.view(shape) * mean) @ inverse
    return d.movedim(-1, 1), -(d @ mean).reshape(len(bias), -1).sum(1)
