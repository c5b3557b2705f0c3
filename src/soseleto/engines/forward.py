"""Forward mode: one directional derivative of the whole loss vector, exact for BatchNorm too.

    q = d/dε ℓ(θ + ε·direction) at ε = 0, computed together with the losses.

In units of one forward pass F of the source batch: the forward, its tangents (each layer twice, with da and with dW)
and the backward cost 5F, an ordinary step 3F. Tangents are computed by our own rules (``tangents``) where a proof shows
that they are right, else by PyTorch's forward mode, which is slower.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from soseleto.engines.autograd import differentiable_recurrence
from soseleto.engines.contract import Direction, PerExampleLoss, as_loss_vector, named_in, reductions_dtype
from soseleto.engines.tangents import CannotFollow, Dual, Tangents, dense


def by_hand(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Losses with their ordinary graph, and alignments; raises ``CannotFollow``."""
    parameters = named_in(direction, model)
    with Tangents({id(p): direction[name].to(p.dtype) for name, p in parameters.items()}):
        losses = per_example_loss(model, batch)
    if not isinstance(losses, Dual):
        raise CannotFollow("the losses have no tangent")
    tangent = dense(losses.tangent)
    return as_loss_vector(losses.primal), tangent.to(reductions_dtype(tangent.dtype)).detach()


def by_autograd(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Losses and alignments by PyTorch's forward mode."""
    parameters = named_in(direction, model)
    with (
        forward_ad.dual_level(),
        sdpa_kernel(SDPBackend.MATH),
        differentiable_recurrence(model),
        _AsInBackward(),
    ):
        duals = {
            f"model.{name}": forward_ad.make_dual(p, direction[name].to(p.dtype)) for name, p in parameters.items()
        }
        dual_losses = functional_call(_LossModule(model, per_example_loss), duals, (batch,))
        losses, alignment = forward_ad.unpack_dual(as_loss_vector(dual_losses))
        if alignment is None:
            alignment = torch.zeros_like(losses)
        return losses, alignment.to(reductions_dtype(alignment.dtype)).detach()


class _LossModule(nn.Module):
    """Holds the user's model, so that functional_call can replace its parameters for one call."""

    def __init__(self, model: nn.Module, per_example_loss: PerExampleLoss) -> None:
        super().__init__()
        self.model = model
        self.per_example_loss = per_example_loss
        self.training = model.training

    def forward(self, batch: Any) -> Tensor:
        return self.per_example_loss(self.model, batch)


class _AsInBackward(TorchFunctionMode):
    """Removes tangents where the backward has no gradient: under ``no_grad``, and at an embedding's padding row."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not torch.is_grad_enabled():
            return func(*tree_map_only(Tensor, _primal, args), **tree_map_only(Tensor, _primal, kwargs))
        out = func(*args, **kwargs)
        if func is not F.embedding:
            return out
        given = {**dict(zip(("input", "weight", "padding_idx"), args, strict=False)), **kwargs}
        if given.get("padding_idx") is None:
            return out
        padding = given["padding_idx"] % given["weight"].shape[0]
        return torch.where((given["input"] == padding).unsqueeze(-1), _primal(out), out)


def _primal(value: Tensor) -> Tensor:
    primal, tangent = forward_ad.unpack_dual(value)
    return value if tangent is None else primal
