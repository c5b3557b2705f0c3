"""One short rule per torch function that takes parameters: what the layerwise engine knows about layers.

Every function here is linear in its parameters P: y = f(a; P). So for a direction G

    alignment   q_j = ⟨δ_j, f(a_j; G)⟩                 the same function once more, with G in place of P
    gradient    Σ_j c_j ∂ℓ_j/∂P = f(a; ·)ᵀ (c δ)       the ordinary weight gradient, from scaled δ

with a the layer's input and δ_j the gradient of ℓ_j at its output. Neither forms a per-example gradient. Parameters
that are small compared with the activations, y = x̂·scale + shift (biases, a norm's weight), are treated differently:
their per-example gradients are sums over δ·x̂ and over δ, cheap, and alignment and gradient follow by one product each.

A call that a rule does not fit is differentiated as it is (``functions.rule_for``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.engines.interface import as_dtype, reductions_dtype

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """How one function uses its parameters.

    arguments: the function's argument names, in order
    large: the parameter treated by ``tangent``, ``adjoint`` and ``gradient``
    scale, shift: the small parameters, of y = x̂·scale + shift
    hat: the arguments and a to x̂; None: a itself
    channels: whether scale and shift have one entry per channel (dimension 1), else they broadcast from the right
    fits: whether the rule holds for a call with these arguments
    refuse: the reason why a call with these arguments cannot be treated example by example, or None
    tangent: a and G to f(a; G)
    adjoint: δ and G to f(·; G)ᵀδ, of a's shape; used instead of ``tangent`` where a is smaller than δ
    gradient: a, δ and the coefficients to the gradient of the large parameter
    spread: calls the function with one copy of the small parameters per example, so that its ordinary backward gives
        their per-example gradients
    lowered: whether autocast runs the function in the lower precision
    """

    arguments: tuple[str, ...]
    large: str | None = None
    scale: str | None = None
    shift: str | None = None
    hat: Callable[[Arguments, Tensor], Tensor] | None = None
    channels: bool = False
    fits: Callable[[Arguments], bool] = lambda _: True
    refuse: Callable[[Arguments], str | None] = lambda _: None
    tangent: Callable[[Arguments, Tensor, Tensor], Tensor] | None = None
    adjoint: Callable[[Tensor, Tensor], Tensor] | None = None
    gradient: Callable[[Arguments, Tensor, Tensor, Tensor | None], Tensor] | None = None
    spread: Callable[[Arguments, Tensor, dict[str, Tensor]], Tensor] | None = None
    lowered: bool = False

    @cached_property
    def small(self) -> list[str]:
        return [name for name in (self.scale, self.shift) if name is not None]

    @cached_property
    def parameters(self) -> list[str]:
        return self.small if self.large is None else [self.large, *self.small]

    @property
    def keeps_input(self) -> bool:
        return self.large is not None or self.scale is not None

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}

    def per_example(self, names: Iterable[str], arguments: Arguments, a: Tensor, delta: Tensor) -> dict[str, Tensor]:
        """The gradients of these small parameters, one row per example, in float32 or better."""
        found = {}
        for name in names:
            values, shape = delta, arguments[name].shape
            if name == self.scale:
                values = delta * (a if self.hat is None else self.hat(arguments, a))
            summed, dtype = _summed(values.ndim, shape, self.channels), reductions_dtype(values.dtype)
            each = values.sum(summed, dtype=dtype) if summed else as_dtype(values, dtype)
            found[name] = each if each.shape[1:] == shape else each.reshape(len(delta), *shape)
        return found


@cache
def _summed(ndim: int, shape: tuple[int, ...], channels: bool) -> list[int]:
    """The dimensions over which each row of a tensor is summed to a parameter that broadcasts to it."""
    own = without_leading_ones((*shape, *[1] * (ndim - 2)) if channels else shape)
    padded = [1] * (ndim - 1 - len(own)) + list(own)
    return [dim for dim, size in enumerate(padded, 1) if size == 1]


def without_leading_ones(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(itertools.dropwhile(lambda size: size == 1, shape))


def scale(rows: Tensor, coefficients: Tensor | None) -> Tensor:
    """c_j times row j."""
    if coefficients is None:
        return rows
    return rows * as_dtype(coefficients, rows.dtype).view(-1, *[1] * (rows.ndim - 1))


def _scale_one(a: Tensor, delta: Tensor, coefficients: Tensor | None) -> tuple[Tensor, Tensor]:
    """A weight gradient is bilinear in a and δ: scale the smaller one."""
    if a.numel() < delta.numel():
        return scale(a, coefficients), delta
    return a, scale(delta, coefficients)


# --- linear layers and convolutions ---------------------------------------------------------------------------


def _linear_gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
    a, delta = _scale_one(a, delta, coefficients)
    return delta.reshape(-1, delta.shape[-1]).T @ a.reshape(-1, a.shape[-1])


LINEAR = Rule(
    ("input", "weight", "bias"),
    large="weight",
    shift="bias",
    tangent=lambda arguments, a, direction: F.linear(a, direction),
    adjoint=lambda delta, direction: delta @ direction,
    gradient=_linear_gradient,
    lowered=True,
)


_SETTINGS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def _convolution_gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
    a, delta = _scale_one(a, delta, coefficients)
    weight = arguments["weight"]
    if weight.dtype != delta.dtype:  # only its shape and memory format are read
        weight = torch.empty_like(weight, dtype=delta.dtype)
    *sizes, groups = (arguments.get(k, default) for k, default in _SETTINGS.items())
    stride, padding, dilation = ([size] if isinstance(size, int) else size for size in sizes)
    return torch.ops.aten.convolution_backward(
        delta, a, weight, None, stride, padding, dilation, False, [0], groups, [False, True, False]
    )[1]


def _convolution(call: Callable[..., Tensor]) -> Rule:
    def tangent(arguments: Arguments, a: Tensor, direction: Tensor) -> Tensor:
        return call(a, direction, None, **{k: arguments[k] for k in _SETTINGS if k in arguments})

    return Rule(
        ("input", "weight", "bias", *_SETTINGS),
        large="weight",
        shift="bias",
        channels=True,
        fits=lambda arguments: not isinstance(arguments.get("padding"), str),
        tangent=tangent,
        gradient=_convolution_gradient,
        lowered=True,
    )


# --- embedding ------------------------------------------------------------------------------------------------


def _embedding_gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
    index, rows = a.reshape(-1), scale(delta, coefficients).reshape(-1, delta.shape[-1])
    zeros = torch.zeros_like(arguments["weight"], dtype=rows.dtype)
    return zeros.index_add_(0, index, _not_padding(arguments, index, rows))


def _embedding_tangent(arguments: Arguments, a: Tensor, direction: Tensor) -> Tensor:
    return _not_padding(arguments, a, F.embedding(a, direction))


def _not_padding(arguments: Arguments, index: Tensor, rows: Tensor) -> Tensor:
    """Zero for the padding row, which has no gradient and hence no part in the alignment."""
    padding = arguments.get("padding_idx")
    if padding is None:
        return rows
    padding = padding % arguments["weight"].shape[0]
    return rows * (index != padding).unsqueeze(-1).to(rows.dtype)


def _refuse_embedding(arguments: Arguments) -> str | None:
    """The weights are rewritten in the forward, the examples of a batch mixed, or the gradient is sparse."""
    special = arguments.get("max_norm") is not None or arguments.get("scale_grad_by_freq") or arguments.get("sparse")
    return "max_norm, scale_grad_by_freq and sparse gradients have no rule" if special else None


EMBEDDING = Rule(
    ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    large="weight",
    refuse=_refuse_embedding,
    gradient=_embedding_gradient,
    tangent=_embedding_tangent,
)


# --- norms: x̂ is the normalised input --------------------------------------------------------------------------


def _layer_hat(arguments: Arguments, a: Tensor) -> Tensor:
    return F.layer_norm(a, arguments["normalized_shape"], None, None, arguments.get("eps", 1e-5))


def _rms_hat(arguments: Arguments, a: Tensor) -> Tensor:
    return F.rms_norm(a, arguments["normalized_shape"], None, arguments.get("eps"))


def _group_norm_spread(arguments: Arguments, x: Tensor, copies: dict[str, Tensor]) -> Tensor:
    """The batch as one image of n·C channels in n·G groups, by sizes rather than views (in-place layers follow)."""
    n, c = x.shape[:2]
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = x.float()  # as autocast does for group_norm
    weight, bias, eps = copies.get("weight"), copies.get("bias"), arguments.get("eps", 1e-5)
    groups, area = n * arguments["num_groups"], x.numel() // (n * c)
    return torch.native_group_norm(x.contiguous(), weight, bias, 1, n * c, area, groups, eps)[0]


def _group_hat(arguments: Arguments, a: Tensor) -> Tensor:
    return F.group_norm(a, arguments["num_groups"], None, None, arguments.get("eps", 1e-5))


def _instance_hat(arguments: Arguments, a: Tensor) -> Tensor:
    if arguments.get("use_input_stats", True):  # without the running statistics, which would be updated again
        return F.instance_norm(a, eps=arguments.get("eps", 1e-5))
    return _batch_hat(arguments, a)


def _batch_hat(arguments: Arguments, a: Tensor) -> Tensor:
    """By the running statistics."""
    mean, var = arguments["running_mean"].to(a.dtype), arguments["running_var"].to(a.dtype)
    return F.batch_norm(a, mean, var, None, None, False, 0.0, arguments.get("eps", 1e-5))


def _refuse_batch_norm(arguments: Arguments) -> str | None:
    return "BatchNorm in training mode mixes the examples of a batch" if arguments.get("training", False) else None


LAYER_NORM = Rule(("input", "normalized_shape", "weight", "bias", "eps"), scale="weight", shift="bias", hat=_layer_hat)
RMS_NORM = Rule(("input", "normalized_shape", "weight", "eps"), scale="weight", hat=_rms_hat)
GROUP_NORM = Rule(
    ("input", "num_groups", "weight", "bias", "eps"),
    scale="weight",
    shift="bias",
    hat=_group_hat,
    channels=True,
    spread=_group_norm_spread,
)
INSTANCE_NORM = Rule(
    ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    scale="weight",
    shift="bias",
    hat=_instance_hat,
    channels=True,
)
BATCH_NORM = Rule(
    ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    scale="weight",
    shift="bias",
    hat=_batch_hat,
    channels=True,
    refuse=_refuse_batch_norm,
)


# --- a bare parameter broadcast over the batch: layer scales, RMSNorm in language models ---


def _is_small(arguments: Arguments) -> bool:
    """Whether ``other`` is one vector for every row of ``input``: its gradients are kept until the end of the backward.

    By structure alone: ranks of a sharded model must all gather its direction at the same time, whatever their batches.
    """
    x, parameter = arguments["input"], arguments["other"]
    if len(arguments) > 2 or not isinstance(x, Tensor) or x.ndim == 0 or parameter.ndim > x.ndim:
        return False
    own = without_leading_ones(parameter.shape)
    return len(own) < x.ndim and parameter.numel() == max(own, default=1)


ADD = Rule(("input", "other"), shift="other", fits=_is_small)
MULTIPLY = Rule(("input", "other"), scale="other", fits=_is_small)

RULES: dict[Any, Rule] = {
    F.linear: LINEAR,
    F.conv1d: _convolution(F.conv1d),
    F.conv2d: _convolution(F.conv2d),
    F.conv3d: _convolution(F.conv3d),
    F.embedding: EMBEDDING,
    F.layer_norm: LAYER_NORM,
    F.rms_norm: RMS_NORM,
    F.group_norm: GROUP_NORM,
    F.instance_norm: INSTANCE_NORM,
    F.batch_norm: BATCH_NORM,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), ADD),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), MULTIPLY),
}
