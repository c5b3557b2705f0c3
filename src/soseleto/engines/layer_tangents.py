"""The tangent of a linear layer or convolution, y = f(a; W) + b:  dy = f(da; W) + f(a; dW) + db.

The two products can be computed in three ways, which are equal up to rounding:

    separate        two calls and a sum: the sum reads two activations and writes one
    concatenated    one call of twice as many input channels, f([da, a]; [W, dW]): the copy reads and writes two
                    activations, and one result is written instead of two
    accumulated     for matrix products (linear layers; 1x1 convolutions, stride 1, channels last): the second product
                    is added to the first inside its kernel
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.engines import rules

_DEVICES = {"cuda"}  # where the second and third way are used
_ACCUMULATES = True
_CONCATENATES = False  # convolutions that are no matrix products

Given = Mapping[int, Tensor]
_CONVOLUTIONS = (F.conv1d, F.conv2d, F.conv3d)


def layer(func: Any, args: Any, kwargs: Any, given: Given) -> tuple[Tensor, Tensor | None] | None:
    """The layer's output and its tangent; None where only the bias has a direction."""
    arguments = rules.RULES[func].bind(args, kwargs)
    da, d_weight, d_bias = (given.get(id(arguments.get(k))) for k in ("input", "weight", "bias"))
    if d_weight is None and d_bias is not None:
        return None
    out = func(*args, **kwargs)
    with torch.no_grad():
        if da is None or d_weight is None:
            return out, _one_product(func, arguments, da, d_weight, d_bias)
        both = _in_one_kernel(func, arguments, da, d_weight, out) if out.device.type in _DEVICES else None
        if both is None:
            along = func(**{**arguments, "weight": d_weight, "bias": d_bias})
            return out, func(**{**arguments, "input": da, "bias": None}).add_(along)
        return out, both if d_bias is None else both.add_(_per_channel(func, d_bias.to(both.dtype), both.ndim))


def _one_product(
    func: Any, arguments: dict[str, Any], da: Tensor | None, d_weight: Tensor | None, d_bias: Tensor | None
) -> Tensor | None:
    if d_weight is not None:
        return func(**{**arguments, "weight": d_weight, "bias": d_bias})
    return None if da is None else func(**{**arguments, "input": da, "bias": None})


def _in_one_kernel(func: Any, arguments: dict[str, Any], da: Tensor, d_weight: Tensor, out: Tensor) -> Tensor | None:
    """f(da; W) + f(a; dW) without a sum of its own, in the precision of ``out``; None where it is not possible."""
    way = _way(func, arguments)
    if way is None:
        return None
    tensors = arguments["input"], da, arguments["weight"], d_weight
    a, da, weight, d_weight = (t.detach().to(out.dtype) for t in tensors)
    with torch.autocast(out.device.type, enabled=False):
        if way == "concatenated":
            inputs, weights = torch.cat((da, a), 1), torch.cat((weight, d_weight), 1)
            return func(**{**arguments, "input": inputs, "weight": weights, "bias": None})
        if func is F.linear:
            return _accumulated(a, da, weight, d_weight).view(out.shape)
        a, da = a.permute(0, 2, 3, 1), da.permute(0, 2, 3, 1)
        return _accumulated(a, da, weight.flatten(1), d_weight.flatten(1)).view(*a.shape[:3], -1).permute(0, 3, 1, 2)


def _way(func: Any, arguments: dict[str, Any]) -> str | None:
    if _ACCUMULATES and (func is F.linear or _is_matrix_product(func, arguments)):
        return "accumulated"
    if _CONCATENATES and func in _CONVOLUTIONS and arguments.get("groups", 1) == 1:
        return "concatenated"
    return None


def _accumulated(a: Tensor, da: Tensor, weight: Tensor, d_weight: Tensor) -> Tensor:
    """da Wᵀ + a dWᵀ of rows, (rows, out)."""
    product = da.reshape(-1, da.shape[-1]) @ weight.T
    return product.addmm_(a.reshape(-1, a.shape[-1]), d_weight.T)


def _is_matrix_product(func: Any, arguments: dict[str, Any]) -> bool:
    """Whether it is a 1x1 convolution whose rows lie one after the other in memory."""
    ones, zeros = ((1, 1), 1, (1,)), ((0, 0), 0, (0,), "valid")
    return (
        func is F.conv2d
        and arguments["input"].ndim == 4
        and arguments["weight"].shape[2:] == (1, 1)
        and _plain(arguments.get("stride", 1)) in ones
        and _plain(arguments.get("padding", 0)) in zeros
        and arguments.get("groups", 1) == 1
        and arguments["input"].is_contiguous(memory_format=torch.channels_last)
    )


def _plain(setting: Any) -> Any:
    return tuple(setting) if isinstance(setting, (list, tuple)) else setting


def _per_channel(func: Any, bias: Tensor, dims: int) -> Tensor:
    return bias if func is F.linear else bias.view(-1, *[1] * (dims - 2))
