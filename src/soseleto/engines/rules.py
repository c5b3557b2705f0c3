"""One short rule per torch function that takes parameters: what the layerwise engine knows about layers.

Every function here is linear in its parameters P: y = f(a; P). So for a direction G

    alignment   q_j = ⟨δ_j, f(a_j; G)⟩                 the same function once more, with G in place of P
    gradient    Σ_j c_j ∂ℓ_j/∂P = f(a; ·)ᵀ (c δ)       the ordinary weight gradient, from scaled δ

with a the layer's input and δ_j the gradient of ℓ_j at its output. Neither forms a per-example gradient. Parameters
that are small compared with the activations (biases, a norm's weight) are treated differently: their per-example
gradients are sums over δ and cheap, and alignment and gradient follow from them by one product each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.engines.interface import reductions_dtype

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """How one function uses its parameters.

    arguments: the function's argument names, in order
    large: the parameter treated by ``tangent``, ``adjoint`` and ``gradient``
    small: the parameters treated by ``per_example`` and ``spread``
    refuse: the reason why a call with these arguments cannot be treated example by example, or None
    tangent: a and G to f(a; G)
    adjoint: δ and G to f(·; G)ᵀδ, of a's shape; used instead of ``tangent`` where a is smaller than δ
    gradient: a, δ and the coefficients to the gradient of the large parameter
    per_example: the gradients of the small parameters, one row per example, in float32 or better
    spread: calls the function with one copy of the small parameters per example, so that its ordinary backward gives
        their per-example gradients
    lowered: whether autocast runs the function in the lower precision
    """

    arguments: tuple[str, ...]
    large: str | None = None
    small: tuple[str, ...] = ()
    refuse: Callable[[Arguments], str | None] = lambda _: None
    tangent: Callable[[Arguments, Tensor, Tensor], Tensor] | None = None
    adjoint: Callable[[Tensor, Tensor], Tensor] | None = None
    gradient: Callable[[Arguments, Tensor, Tensor, Tensor | None], Tensor] | None = None
    per_example: Callable[[Arguments, Tensor, Tensor], dict[str, Tensor]] | None = None
    spread: Callable[[Arguments, Tensor, dict[str, Tensor]], Tensor] | None = None
    lowered: bool = False

    @property
    def parameters(self) -> tuple[str, ...]:
        return self.small if self.large is None else (self.large, *self.small)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


def scale(rows: Tensor, coefficients: Tensor | None) -> Tensor:
    """c_j times row j."""
    if coefficients is None:
        return rows
    return rows * coefficients.to(rows.dtype).view(-1, *[1] * (rows.ndim - 1))


def _scale_one(a: Tensor, delta: Tensor, coefficients: Tensor | None) -> tuple[Tensor, Tensor]:
    """A weight gradient is bilinear in a and δ: scale the smaller one."""
    if a.numel() < delta.numel():
        return scale(a, coefficients), delta
    return a, scale(delta, coefficients)


# --- linear ---------------------------------------------------------------------------------------------------


def _linear_gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
    a, delta = _scale_one(a, delta, coefficients)
    return delta.reshape(-1, delta.shape[-1]).T @ a.reshape(-1, a.shape[-1])


def _linear_bias(arguments: Arguments, a: Tensor, delta: Tensor) -> dict[str, Tensor]:
    dtype = reductions_dtype(delta.dtype)
    if delta.ndim == 2:
        return {"bias": delta.to(dtype)}
    return {"bias": delta.reshape(len(delta), -1, delta.shape[-1]).sum(1, dtype=dtype)}


LINEAR = Rule(
    ("input", "weight", "bias"),
    large="weight",
    small=("bias",),
    tangent=lambda arguments, a, direction: F.linear(a, direction),
    adjoint=lambda delta, direction: delta @ direction,
    gradient=_linear_gradient,
    per_example=_linear_bias,
    lowered=True,
)


# --- convolutions ---------------------------------------------------------------------------------------------


def _channel_bias(arguments: Arguments, a: Tensor, delta: Tensor) -> dict[str, Tensor]:
    return {"bias": delta.sum(list(range(2, delta.ndim)), dtype=reductions_dtype(delta.dtype))}


def _convolution(call: Callable[..., Tensor], dims: int, *, transposed: bool) -> Rule:
    tail = ("output_padding", "groups", "dilation") if transposed else ("dilation", "groups")

    def settings(arguments: Arguments) -> dict[str, Any]:
        return {k: arguments[k] for k in ("stride", "padding", *tail) if k in arguments}

    def tangent(arguments: Arguments, a: Tensor, direction: Tensor) -> Tensor:
        return call(a, direction, None, **settings(arguments))

    def gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
        weight = arguments["weight"]
        a, delta = _scale_one(a, delta, coefficients)
        return torch.ops.aten.convolution_backward(
            delta,
            a,
            weight if weight.dtype == delta.dtype else torch.empty_like(weight, dtype=delta.dtype),  # only its shape
            None,
            _tuple(arguments.get("stride", 1), dims),
            _padding(arguments, weight, dims),
            _tuple(arguments.get("dilation", 1), dims),
            transposed,
            _tuple(arguments.get("output_padding", 0), dims),
            arguments.get("groups", 1),
            [False, True, False],
        )[1]

    def refuse(arguments: Arguments) -> str | None:
        is_known = _padding(arguments, arguments["weight"], dims) is not None
        return None if is_known else "padding='same' with an even kernel pads more on one side"

    return Rule(
        ("input", "weight", "bias", "stride", "padding", *tail),
        large="weight",
        small=("bias",),
        refuse=refuse,
        tangent=tangent,
        gradient=gradient,
        per_example=_channel_bias,
        lowered=True,
    )


def _padding(arguments: Arguments, weight: Tensor, dims: int) -> tuple[int, ...] | None:
    padding = arguments.get("padding", 0)
    if padding == "valid":
        return (0,) * dims
    if padding == "same":
        dilation = _tuple(arguments.get("dilation", 1), dims)
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        return None if any(total % 2 for total in totals) else tuple(total // 2 for total in totals)
    return _tuple(padding, dims)


def _tuple(value: Any, dims: int) -> tuple[int, ...]:
    if isinstance(value, int):
        return (value,) * dims
    return tuple(value) * dims if len(value) == 1 else tuple(value)


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


# --- norms: y = x̂·weight + bias, with x̂ the normalised input ----------------------------------------------------


def _over_channels(normalised: Callable[[Arguments, Tensor], Tensor]) -> Any:
    """Per-example gradients of a norm with one weight and bias per channel (dimension 1)."""

    def per_example(arguments: Arguments, a: Tensor, delta: Tensor) -> dict[str, Tensor]:
        rows = delta.flatten(2) if delta.ndim > 2 else delta.unsqueeze(2)
        x_hat, dtype = normalised(arguments, a).reshape(rows.shape), reductions_dtype(delta.dtype)
        return {"weight": (rows * x_hat).sum(2, dtype=dtype), "bias": rows.sum(2, dtype=dtype)}

    return per_example


def _over_last(normalised: Callable[[Arguments, Tensor], Tensor]) -> Any:
    """Per-example gradients of a norm whose weight and bias have the shape of the last dimensions."""

    def per_example(arguments: Arguments, a: Tensor, delta: Tensor) -> dict[str, Tensor]:
        shape, dtype = tuple(arguments["normalized_shape"]), reductions_dtype(delta.dtype)
        rows = delta.reshape(len(delta), -1, math.prod(shape))
        x_hat = normalised(arguments, a).reshape(rows.shape)
        found = {"weight": (rows * x_hat).sum(1, dtype=dtype), "bias": rows.sum(1, dtype=dtype)}
        return {name: value.reshape(-1, *shape) for name, value in found.items()}

    return per_example


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


LAYER_NORM = Rule(
    ("input", "normalized_shape", "weight", "bias", "eps"), small=("weight", "bias"), per_example=_over_last(_layer_hat)
)
RMS_NORM = Rule(("input", "normalized_shape", "weight", "eps"), small=("weight",), per_example=_over_last(_rms_hat))
GROUP_NORM = Rule(
    ("input", "num_groups", "weight", "bias", "eps"),
    small=("weight", "bias"),
    per_example=_over_channels(_group_hat),
    spread=_group_norm_spread,
)
INSTANCE_NORM = Rule(
    ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    small=("weight", "bias"),
    per_example=_over_channels(_instance_hat),
)
BATCH_NORM = Rule(
    ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    small=("weight", "bias"),
    refuse=_refuse_batch_norm,
    per_example=_over_channels(_batch_hat),
)


# --- a bare parameter broadcast over the batch: position embeddings, class tokens, layer scales ---


def without_leading_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(itertools.dropwhile(lambda size: size == 1, shape))


def _own(parameter: Tensor) -> Tensor:
    """The parameter in the shape that it has within a row."""
    return parameter.reshape(without_leading_ones(parameter.shape))


def _sum_to(delta: Tensor, arguments: Arguments, coefficients: Tensor | None) -> Tensor:
    other = arguments["other"]
    return scale(delta, coefficients).sum_to_size(without_leading_ones(other.shape)).view(other.shape)


def _rows_of(delta: Tensor, arguments: Arguments) -> dict[str, Tensor]:
    """One gradient per row, in float32 or better."""
    shape, dtype = arguments["other"].shape, reductions_dtype(delta.dtype)
    own = without_leading_ones(shape)
    padded = [1] * (delta.ndim - 1 - len(own)) + list(own)
    summed = [dim for dim, size in enumerate(padded, 1) if size == 1]
    rows = delta.sum(summed, dtype=dtype) if summed else delta.to(dtype)
    return {"other": rows.reshape(len(delta), *shape)}


def _refuse_broadcast(arguments: Arguments) -> str | None:
    if set(arguments) - {"input", "other"}:
        return f"{', '.join(sorted(set(arguments) - {'input', 'other'}))} is not supported there"
    if not isinstance(arguments["input"], Tensor) or arguments["input"].ndim == 0:
        return "the parameter is not combined with a batch there"
    shape, parameter = arguments["input"].shape, arguments["other"].shape
    if len(parameter) > len(shape) or (len(parameter) == len(shape) and parameter[0] != 1):
        return "the parameter has a separate entry for each example of the batch"
    return None


ADD = Rule(
    ("input", "other"),
    large="other",
    refuse=_refuse_broadcast,
    gradient=lambda arguments, a, delta, c: _sum_to(delta, arguments, c),
    tangent=lambda arguments, a, direction: _own(direction).clone(),  # the caller overwrites it
)
MULTIPLY = Rule(
    ("input", "other"),
    large="other",
    refuse=_refuse_broadcast,
    gradient=lambda arguments, a, delta, c: _sum_to(delta * a, arguments, c),
    tangent=lambda arguments, a, direction: a * _own(direction),
)
_AS_SMALL: dict[str, Any] = {"large": None, "small": ("other",)}
SMALL_ADD = replace(ADD, **_AS_SMALL, per_example=lambda arguments, a, delta: _rows_of(delta, arguments))
SMALL_MULTIPLY = replace(MULTIPLY, **_AS_SMALL, per_example=lambda arguments, a, delta: _rows_of(delta * a, arguments))
BROADCAST = (ADD, MULTIPLY, SMALL_ADD, SMALL_MULTIPLY)
_SMALL = 8  # at most 1/8 of a row: such gradients are kept until the end of the backward, all together


def broadcast_rule(rule: Rule, arguments: Arguments, rows: int) -> Rule:
    """The form of ``ADD`` or ``MULTIPLY`` for a parameter of this size."""
    is_small = arguments["other"].numel() * _SMALL * rows <= arguments["input"].numel()
    return rule if not is_small else SMALL_ADD if rule is ADD else SMALL_MULTIPLY


RULES: dict[Any, Rule] = {
    F.linear: LINEAR,
    F.conv1d: _convolution(F.conv1d, 1, transposed=False),
    F.conv2d: _convolution(F.conv2d, 2, transposed=False),
    F.conv3d: _convolution(F.conv3d, 3, transposed=False),
    F.conv_transpose1d: _convolution(F.conv_transpose1d, 1, transposed=True),
    F.conv_transpose2d: _convolution(F.conv_transpose2d, 2, transposed=True),
    F.conv_transpose3d: _convolution(F.conv_transpose3d, 3, transposed=True),
    F.embedding: EMBEDDING,
    F.layer_norm: LAYER_NORM,
    F.rms_norm: RMS_NORM,
    F.group_norm: GROUP_NORM,
    F.instance_norm: INSTANCE_NORM,
    F.batch_norm: BATCH_NORM,
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__), ADD),
    **dict.fromkeys((torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__), MULTIPLY),
}
