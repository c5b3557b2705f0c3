"""Our own forward mode: every activation carries its tangent, which is computed without a graph and soon freed.

PyTorch's forward mode keeps tangents with what is saved for the backward. Only the tangents of the losses are needed
here, so a tangent is freed after the last use of its activation. The most expensive layers have short rules; a function
without a rule is evaluated a second time, alone, under PyTorch's forward mode.

The tangent of BatchNorm in training mode, y = γx̂ + β, is its backward, a symmetric map, applied to dx:

    dy = γ/σ·(dx − mean(dx) − x̂·mean(x̂·dx)) + dγ·x̂ + dβ
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from soseleto.engines import rules
from soseleto.engines.contract import is_differentiable


class CannotFollow(RuntimeError):
    """The model does something that these tangents do not support."""


class Dual(Tensor):
    """An activation with its tangent, used in place of the activation. Direct access raises."""

    primal: Tensor
    tangent: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, primal: Tensor, tangent: Tensor) -> Dual:
        made: Dual = torch.Tensor._make_wrapper_subclass(cls, primal.shape, dtype=primal.dtype, device=primal.device)
        made.primal, made.tangent = primal, tangent
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise CannotFollow(f"{func} was called without a torch function")


class Tangents(TorchFunctionMode):
    """While it is open, the tangents of parameters are their directions, and results become ``Dual`` tensors."""

    def __init__(self, directions: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._directions = directions  # by the parameter's id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given: dict[int, Tensor] = {}  # by the primal's id
        duals: dict[int, Dual] = {}

        def primal(value: Any) -> Any:
            if isinstance(value, Dual):
                given[id(value.primal)], duals[id(value.primal)] = value.tangent, value
                return value.primal
            if isinstance(value, Tensor) and id(value) in self._directions:
                given[id(value)] = self._directions[id(value)]
            return value

        args, kwargs = _map(primal, args), _map(primal, kwargs)
        if not given:
            return func(*args, **kwargs)
        if not torch.is_grad_enabled():  # a constant for the backward, hence one for the tangents
            return func(*args, **kwargs)
        return _paired(*self._both(func, args, kwargs, given), duals)

    def _both(self, func: Any, args: Any, kwargs: Any, given: dict[int, Tensor]) -> tuple[Any, Any]:
        if func in RULES:
            found = RULES[func](func, args, kwargs, given)
            if found is not None:
                return found
        out = func(*args, **kwargs)
        if not is_differentiable(out):
            return out, None
        if any(out is value for value in (*args, *kwargs.values())):
            raise CannotFollow(f"{func} works in place")
        return out, _by_autograd(func, args, kwargs, given)


def _paired(out: Any, tangent: Any, duals: dict[int, Dual]) -> Any:
    if tangent is None or (isinstance(out, Tensor) and not out.requires_grad):
        return out
    if isinstance(out, Tensor):
        if id(out) in duals:  # changed in place: keep the same object
            duals[id(out)].tangent = tangent
            return duals[id(out)]
        return Dual(out, tangent)
    return type(out)(_paired(o, t, duals) for o, t in zip(out, tangent, strict=True))


def _by_autograd(func: Any, args: Any, kwargs: Any, given: dict[int, Tensor]) -> Any:
    """The tangents of one function's results by PyTorch's forward mode, without a graph."""

    def dual(value: Any) -> Any:
        if isinstance(value, Tensor):
            tangent = given.get(id(value))
            value = value.detach()
            return value if tangent is None else forward_ad.make_dual(value, tangent.to(value.dtype))
        return value

    def tangent(value: Any) -> Any:
        return forward_ad.unpack_dual(value).tangent if isinstance(value, Tensor) else None

    with torch.no_grad(), forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        return _map(tangent, func(*_map(dual, args), **_map(dual, kwargs)))


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_map(change, v) for v in value) if type(value) in (list, tuple) else change(value)
    if isinstance(value, dict):
        return {k: _map(change, v) for k, v in value.items()}
    return change(value)


# --- rules: (function, arguments) -> (result, tangent), or None to leave it to PyTorch ---------------------------

Given = Mapping[int, Tensor]
Both = tuple[Tensor, Tensor | None]


def _layer(func: Any, args: Any, kwargs: Any, given: Given) -> Both | None:
    """y = f(a; W) + b: dy = f(da; W) + f(a; dW) + db."""
    arguments = rules.RULES[func].bind(args, kwargs)
    da, d_weight, d_bias = (given.get(id(arguments.get(k))) for k in ("input", "weight", "bias"))
    if d_weight is None and d_bias is not None:
        return None
    out = func(*args, **kwargs)
    with torch.no_grad():
        along = None if d_weight is None else func(**{**arguments, "weight": d_weight, "bias": d_bias})
        if da is None:
            return out, along
        before = func(**{**arguments, "input": da, "bias": None})
        return out, before if along is None else before.add_(along)


def _embedding(func: Any, args: Any, kwargs: Any, given: Given) -> Both:
    arguments = rules.EMBEDDING.bind(args, kwargs)
    index, direction = arguments.pop("input"), given[id(arguments["weight"])]
    out = func(*args, **kwargs)
    with torch.no_grad():
        return out, rules.EMBEDDING.tangent(arguments, index, direction)  # type: ignore[misc]


def _batch_norm(func: Any, args: Any, kwargs: Any, given: Given) -> Both | None:
    arguments = rules.BATCH_NORM.bind(args, kwargs)
    if not arguments.get("training", False):
        return None
    x, weight = arguments["input"], arguments.get("weight")
    old = arguments.get("running_mean"), arguments.get("running_var")
    momentum, eps = arguments.get("momentum", 0.1), arguments.get("eps", 1e-5)
    out, mean, invstd, reserve, kind = torch._batch_norm_impl_index(
        x, weight, arguments.get("bias"), *old, True, momentum, eps, torch.backends.cudnn.enabled
    )
    dx, d_weight, d_bias = (given.get(id(value)) for value in (x, weight, arguments.get("bias")))
    with torch.no_grad():
        dy = None
        if dx is not None:
            dy = torch.ops.aten._batch_norm_impl_index_backward(
                kind, x, dx.to(x.dtype), weight, *old, mean, invstd, True, eps, [True, False, False], reserve
            )[0]
        shape = (1, -1, *[1] * (x.ndim - 2))
        if d_weight is not None:  # dγ·x̂ = x·scale − mean·scale
            scale = d_weight * invstd
            shift = torch.addcmul(torch.zeros_like(scale) if d_bias is None else d_bias, mean, scale, value=-1)
            scale = scale.to(x.dtype).view(shape)
            dy, d_bias = x * scale if dy is None else dy.addcmul_(x, scale), shift
        if d_bias is not None:
            d_bias = d_bias.to(x.dtype).view(shape)
            dy = d_bias.expand_as(x) if dy is None else dy.add_(d_bias)
    return out, dy


def _relu(func: Any, args: Any, kwargs: Any, given: Given) -> Both:
    before = given[id(args[0])]
    out = func(*args, **kwargs)
    with torch.no_grad():
        return out, torch.ops.aten.threshold_backward(before, out.detach(), 0)


def _sum(func: Any, args: Any, kwargs: Any, given: Given) -> Both | None:
    if kwargs or len(args) != 2:
        return None
    out = func(*args)
    one, other = (given.get(id(value)) for value in args)
    with torch.no_grad():
        if one is None or other is None:
            tangent = one if one is not None else other
            assert tangent is not None
            return out, tangent.expand(out.shape)
        return out, one + other


def _max_pool(func: Any, args: Any, kwargs: Any, given: Given) -> Both:
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    settings = {"stride": [], "padding": 0, "dilation": 1, "ceil_mode": False}
    arguments = settings | {
        k: v for k, v in {**dict(zip(names, args, strict=False)), **kwargs}.items() if v is not None
    }
    x = arguments["input"]
    out, index = torch._C._nn.max_pool2d_with_indices(*(arguments[k] for k in names))
    return out, given[id(x)].flatten(-2).gather(-1, index.flatten(-2)).view_as(out)


def _dropout(func: Any, args: Any, kwargs: Any, given: Given) -> Both | None:
    names = ("input", "p", "training", "inplace")
    arguments = {"p": 0.5, "training": True, **dict(zip(names, args, strict=False)), **kwargs}
    x, p = arguments["input"], arguments["p"]
    if not arguments["training"] or p == 0.0:
        return func(*args, **kwargs), given[id(x)]
    if arguments.get("inplace"):
        return None
    mask = F.dropout(torch.ones_like(x), p)
    return x * mask, given[id(x)] * mask


def _linear_map(func: Any, args: Any, kwargs: Any, given: Given) -> Both | None:
    """Functions that are linear in their first argument and have no other tensor to differentiate."""
    if not args or id(args[0]) not in given:
        return None
    out = func(*args, **kwargs)
    with torch.no_grad():
        tangent = given[id(args[0])]
        if func is Tensor.view:
            return out, tangent.reshape(out.shape)
        return out, func(tangent, *args[1:], **kwargs)


RULES: dict[Any, Callable[[Any, Any, Any, Given], Both | None]] = {
    **{func: _layer for func in rules.RULES if rules.RULES[func].lowered},
    F.embedding: _embedding,
    F.batch_norm: _batch_norm,
    **dict.fromkeys((F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_), _relu),
    **dict.fromkeys((torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_), _sum),
    F.dropout: _dropout,
    torch.max_pool2d: _max_pool,
    **dict.fromkeys(
        (
            torch.flatten, Tensor.flatten, Tensor.view, torch.reshape, Tensor.reshape, torch.permute, Tensor.permute,
            torch.transpose, Tensor.transpose, Tensor.contiguous, torch.mean, Tensor.mean, Tensor.float,
            F.avg_pool2d, F.adaptive_avg_pool2d, Tensor.clone,
        ),
        _linear_map,
    ),
}  # fmt: skip
