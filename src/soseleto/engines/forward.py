"""Forward mode: one directional derivative of the whole loss vector, exact for BatchNorm too.

    q = d/dε ℓ(θ + ε·direction) at ε = 0, computed together with the losses.

In units of one forward pass F of the source batch: the forward, its tangents (each layer twice, with da and with dW)
and the backward cost 5F, an ordinary step 3F. Tangents are computed by our own rules (``tangents``) where a check on
the first batch of a model shows that they are right, else by PyTorch's forward mode, which is slower.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from soseleto.engines.autograd import cudnn_allowed, gradient
from soseleto.engines.contract import (
    Direction,
    PerExampleLoss,
    as_loss_vector,
    inner,
    named_in,
    reductions_dtype,
    trainable,
)
from soseleto.engines.tangents import CannotFollow, Dual, Tangents
from soseleto.engines.tolerance import Tolerance
from soseleto.engines.unchanged import unchanged
from soseleto.errors import first_line

logger = logging.getLogger("soseleto")

TOLERANCE = Tolerance(half=5e-2, tf32=1e-2, single=1e-3, double=1e-8)


class Forward:
    """Tangents by our own rules where they were checked for the model, else by PyTorch's forward mode."""

    def __init__(self) -> None:
        self._by_hand: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        named_in(direction, model)
        case = (tuple(direction), tuple(module.training for module in model.modules()))
        known = self._by_hand.setdefault(model, {})
        if case not in known:
            why_not = _why_not_by_hand(model, per_example_loss, batch, direction)
            known[case] = why_not is None
            if why_not is not None:
                logger.info("tangents by PyTorch's slower forward mode, because %s", why_not)
        return (by_hand if known[case] else by_autograd)(model, per_example_loss, batch, direction)


def by_hand(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Losses with their ordinary graph, and alignments; raises ``CannotFollow``."""
    losses = _follow(model, per_example_loss, batch, direction)[0]
    return as_loss_vector(losses.primal), losses.tangent.to(reductions_dtype(losses.tangent.dtype)).detach()


def _follow(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
) -> tuple[Dual, set[torch.dtype]]:
    """The losses with their tangents, and the dtypes of the activations."""
    parameters = named_in(direction, model)
    mode = Tangents({id(p): direction[name].to(p.dtype) for name, p in parameters.items()})
    with mode:
        losses = per_example_loss(model, batch)
    if not isinstance(losses, Dual):
        raise CannotFollow("the losses have no tangent")
    return losses, mode.dtypes


def _why_not_by_hand(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, named: Iterable[str]
) -> str | None:
    """Why our own tangents cannot be used for this model, or None if they agree with autograd.

    Compared are, for random c, the gradient g = Σ c_j ∂ℓ_j/∂θ itself, and Σ c_j q_j with ⟨g, d⟩, where
    d_p = g_p/‖g_p‖ + noise of norm 1, so that every parameter counts.
    """
    parameters = trainable(model)
    with unchanged(model):
        losses = as_loss_vector(per_example_loss(model, batch))
        seeded = torch.Generator().manual_seed(len(losses))
        c = (torch.rand(len(losses), generator=seeded) + 0.5).to(losses)
        right = gradient(losses, parameters, c)
    norms = {name: right[name].norm() for name in named if name in right}
    if not norms:
        return "the losses depend on none of the named parameters"
    noise = {name: torch.randn(right[name].shape, generator=seeded).to(right[name]) for name in norms}
    along = {
        name: right[name] / norm.clamp_min(1e-30) + noise[name] / noise[name].norm() for name, norm in norms.items()
    }
    try:
        with unchanged(model):
            dual, dtypes = _follow(model, per_example_loss, batch, along)
            mine = gradient(dual.primal, parameters, c)
    except (RuntimeError, TypeError, AttributeError) as error:  # PyTorch's forward mode works, or raises its own error
        return first_line(error)
    if mine.keys() != right.keys():
        return "the graph of the losses is not the ordinary one"
    length = torch.stack(list(norms.values())).sum()
    wanted = inner({name: right[name] for name in along}, along)
    off = (torch.dot(dual.tangent.to(c.dtype), c) - wanted).abs() / length
    apart = max(float((mine[name] - g).norm() / (g.norm() + 1e-2 * length)) for name, g in right.items())
    worst = max(float(off), apart)
    return None if worst <= TOLERANCE.of(dtypes, is_cuda=losses.is_cuda) else f"our own are off by {worst:.1e}"


def by_autograd(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Losses and alignments by PyTorch's forward mode."""
    parameters = named_in(direction, model)
    with (
        forward_ad.dual_level(),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=cudnn_allowed(model)),
        _PaddingWithoutTangent(),
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


class _PaddingWithoutTangent(TorchFunctionMode):
    """Removes the tangent of an embedding's padding row, which has no gradient by PyTorch's convention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.embedding:
            return out
        given = {**dict(zip(("input", "weight", "padding_idx"), args, strict=False)), **(kwargs or {})}
        if given.get("padding_idx") is None:
            return out
        padding = given["padding_idx"] % given["weight"].shape[0]
        primal = forward_ad.unpack_dual(out).primal
        return torch.where((given["input"] == padding).unsqueeze(-1), primal, out)
