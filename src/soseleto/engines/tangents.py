"""Our own forward mode: every activation carries its tangent, which is computed without a graph and soon freed.

PyTorch's forward mode keeps tangents with what is saved for the backward. Only the tangents of the losses are needed
here, so a tangent is freed after the last use of its activation. The most expensive layers have short rules; a function
without a rule is evaluated a second time, alone, under PyTorch's forward mode.
``layer_tangents`` has the rules of linear layers and convolutions, ``norm_tangents`` that of BatchNorm.
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
from soseleto.engines.layer_tangents import layer
from soseleto.engines.norm_tangents import Combination, batch_norm


class CannotFollow(RuntimeError):
    """The model does something that these tangents do not support."""


class Dual(Tensor):
    """An activation with its tangent, used in place of the activation. Direct access raises."""

    primal: Tensor
    tangent: Tensor | Combination
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, primal: Tensor, tangent: Tensor | Combination) -> Dual:
        made: Dual = torch.Tensor._make_wrapper_subclass(cls, primal.shape, dtype=primal.dtype, device=primal.device)
        made.primal, made.tangent = primal, tangent
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise CannotFollow(f"{func} was called without a torch function")


def without_tangent(value: Tensor) -> Tensor:
    """The activation that an engine's pass has put a ``Dual`` in place of."""
    return value.primal if isinstance(value, Dual) else value


class Tangents(TorchFunctionMode):
    """While it is open, the tangents of parameters are their directions, and results become ``Dual`` tensors."""

    def __init__(self, directions: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._directions = directions  # by the parameter's id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given: dict[int, Tensor | Combination] = {}  # by the primal's id
        duals: dict[int, Dual] = {}

        def primal(value: Any) -> Any:
            if isinstance(value, Dual):
                if func not in _COMBINES:
                    value.tangent = dense(value.tangent)
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

    def _both(self, func: Any, args: Any, kwargs: Any, given: dict[int, Any]) -> tuple[Any, Any]:
        if func in RULES:
            found = RULES[func](func, args, kwargs, given)
            if found is not None:
                return found
        out = func(*args, **kwargs)
        if not is_differentiable(out):
            return out, None
        if any(out is value for value in (*args, *kwargs.values())):
            raise CannotFollow(f"{func} works in place")
        return out, _by_autograd(func, args, kwargs, {key: dense(tangent) for key, tangent in given.items()})


def dense(tangent: Tensor | Combination) -> Tensor:
    return tangent.dense() if isinstance(tangent, Combination) else tangent


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


def _embedding(func: Any, args: Any, kwargs: Any, given: Given) -> Both:
    arguments = rules.EMBEDDING.bind(args, kwargs)
    index, direction = arguments.pop("input"), given[id(arguments["weight"])]
    out = func(*args, **kwargs)
    with torch.no_grad():
        return out, rules.EMBEDDING.tangent(arguments, index, direction)  # type: ignore[misc]


def _relu(func: Any, args: Any, kwargs: Any, given: Mapping[int, Tensor | Combination]) -> Both:
    before = given[id(args[0])]
    out = func(*args, **kwargs)
    with torch.no_grad():
        if isinstance(before, Combination):
            return out, before.masked(out.detach())
        return out, torch.ops.aten.threshold_backward(before, out.detach(), 0)


def _sum(func: Any, args: Any, kwargs: Any, given: Mapping[int, Any]) -> tuple[Tensor, Any] | None:
    if kwargs or len(args) != 2:
        return None
    out = func(*args)
    one, other = (given.get(id(value)) for value in args)
    with torch.no_grad():
        if isinstance(other, Combination):
            one, other = other, one
        if isinstance(one, Combination) and isinstance(other, Tensor | Combination) and _have_shape(out.shape, *args):
            return out, one.plus(other)
        one, other = (None if tangent is None else dense(tangent) for tangent in (one, other))
        if one is None or other is None:
            tangent = one if one is not None else other
            assert tangent is not None
            return out, tangent.expand(out.shape)
        return out, one + other


def _have_shape(shape: torch.Size, *values: Any) -> bool:
    return all(isinstance(value, Tensor) and value.shape == shape for value in values)


def _max_pool(func: Any, args: Any, kwargs: Any, given: Given) -> Both | None:
    names = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
    if kwargs.get("return_indices") or len(args) > len(names):
        return None
    settings = {"stride": [], "padding": 0, "dilation": 1, "ceil_mode": False}
    arguments = settings | {
        k: v for k, v in {**dict(zip(names, args, strict=False)), **kwargs}.items() if v is not None
    }
    x = arguments["input"]
    out, index = torch._C._nn.max_pool2d_with_indices(*(arguments[k] for k in names))
    tangent = given[id(x)]
    if out.ndim == 4 and not out.is_contiguous() and out.is_contiguous(memory_format=torch.channels_last):
        chosen, places = (t.permute(0, 2, 3, 1).flatten(1, 2) for t in (tangent, index))  # (N, positions, C)
        n, c, h, w = out.shape
        return out, chosen.gather(1, places).view(n, h, w, c).permute(0, 3, 1, 2)
    return out, tangent.flatten(-2).gather(-1, index.flatten(-2)).view_as(out)


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


_RELU = (F.relu, F.relu_, torch.relu, torch.relu_, Tensor.relu, Tensor.relu_)
_ADD = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.__iadd__, Tensor.add_)
_COMBINES = {*_RELU, *_ADD}  # functions whose rules take tangents that are not computed yet
RULES: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    **{func: layer for func in rules.RULES if rules.RULES[func].lowered},
    F.embedding: _embedding,
    F.batch_norm: batch_norm,
    **dict.fromkeys(_RELU, _relu),
    **dict.fromkeys(_ADD, _sum),
    F.dropout: _dropout,
    **dict.fromkeys((torch.max_pool2d, F.max_pool2d), _max_pool),
    **dict.fromkeys(
        (
            torch.flatten, Tensor.flatten, Tensor.view, torch.reshape, Tensor.reshape, torch.permute, Tensor.permute,
            torch.transpose, Tensor.transpose, Tensor.contiguous, torch.mean, Tensor.mean, Tensor.float,
            F.avg_pool2d, F.adaptive_avg_pool2d, Tensor.clone,
        ),
        _linear_map,
    ),
}  # fmt: skip
