"""BatchNorm in training mode whose backward holds the batch's statistics fixed: the rule of ``held_statistics``.

With y = γ(x − μ)/σ + β and μ, σ of the batch as constants, δx = δ·γ/σ, and per example δγ = Σ δx̂ and δβ = Σ δ.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from soseleto.engines.contract import reductions_dtype
from soseleto.engines.rules import BATCH_NORM, Arguments, Rule
from soseleto.errors import EngineError


@dataclass
class Switch:
    """Whether the backward of a pass holds the statistics, and whether it is one of the tape's."""

    is_held: bool = True
    of_tape: Callable[[], bool] = lambda: False  # then gradients of γ and β come from δ, one per example


class Holding(TorchFunctionMode):
    """Inside, BatchNorm in training mode is replaced by ``held_batch_norm``."""

    def __init__(self, switch: Switch) -> None:
        super().__init__()
        self._switch = switch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.batch_norm or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        arguments = BATCH_NORM.bind(args, kwargs)
        x = arguments["input"]
        if not arguments.get("training", False) or x.numel() <= x.shape[1]:  # torch's own error for a single value
            return func(*args, **kwargs)
        if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
            raise EngineError(
                "the held_statistics engine cannot treat BatchNorm inside torch.utils.checkpoint, whose second forward "
                "would not hold the statistics: use engine='auto'."
            )
        weight, bias = arguments.get("weight"), arguments.get("bias")
        return held_batch_norm(x, weight, bias, _Normalised(arguments, self._switch))


class _Normalised:
    """The result of an ordinary BatchNorm in training mode, which updates the running statistics."""

    def __init__(self, arguments: Arguments, switch: Switch) -> None:
        self.switch, self.eps = switch, arguments.get("eps", 1e-5)
        self.running = arguments.get("running_mean"), arguments.get("running_var")
        x, weight, bias = arguments["input"], arguments.get("weight"), arguments.get("bias")
        momentum, cudnn = arguments.get("momentum", 0.1), torch.backends.cudnn.enabled
        self.out: Tensor | None
        with torch.no_grad():
            self.out, self.mean, self.invstd, self.reserve, self.kind = torch._batch_norm_impl_index(
                x, weight, bias, *self.running, True, momentum, self.eps, cudnn
            )

    def taken(self) -> Tensor:
        """The output, which is then held by the graph alone."""
        out, self.out = self.out, None
        assert out is not None
        return out

    def backward(self, delta: Tensor, x: Tensor, weight: Tensor | None, wanted: list[bool]) -> Any:
        """The gradients at x, γ and β."""
        if not self.switch.is_held:
            return torch.ops.aten._batch_norm_impl_index_backward(
                self.kind, x, delta, weight, *self.running, self.mean, self.invstd, True, self.eps, wanted, self.reserve
            )
        # As in evaluation mode, with the batch's statistics. Torch's kernel for that mode loses channels-last layouts.
        at_x = _scaled(delta, self.invstd if weight is None else self.invstd * weight) if wanted[0] else None
        if not any(wanted[1:]):
            return at_x, None, None
        each = _per_example({"normalised": self}, x, delta)
        return at_x, each["weight"].sum(0), each["bias"].sum(0)


def _scaled(delta: Tensor, factors: Tensor) -> Tensor:
    """δ times a factor for each channel, in δ's precision and layout; multiplied in that of the factors."""
    return torch.mul(delta, factors.view(1, -1, *[1] * (delta.ndim - 2)), out=torch.empty_like(delta))


def held_batch_norm(input: Tensor, weight: Tensor | None, bias: Tensor | None, normalised: _Normalised) -> Tensor:
    """BatchNorm that was computed before; its backward holds the statistics while the switch is on."""
    tensors = tuple(t for t in (input, weight, bias) if t is not None)
    if has_torch_function(tensors):  # the tape records it
        return handle_torch_function(held_batch_norm, tensors, input, weight, bias, normalised)
    return _Held.apply(input, weight, bias, normalised)  # type: ignore[no-untyped-call]


class _Held(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, normalised: _Normalised) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.normalised = normalised
        return normalised.taken()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        parameters = not ctx.normalised.switch.of_tape()
        wanted = [needs and (i == 0 or parameters) for i, needs in enumerate(ctx.needs_input_grad[:3])]
        found = ctx.normalised.backward(delta, x, weight, wanted)
        return *(g if is_wanted else None for g, is_wanted in zip(found, wanted, strict=True)), None


def _per_example(arguments: Arguments, a: Tensor, delta: Tensor) -> dict[str, Tensor]:
    """Σ δx̂ = (Σ δx − μ Σ δ)/σ and Σ δ over the positions of each example."""
    normalised, dtype = arguments["normalised"], reductions_dtype(delta.dtype)

    def summed(each: Tensor) -> Tensor:
        return each.sum(list(range(2, each.ndim)), dtype=dtype) if each.ndim > 2 else each.to(dtype)

    total, product = summed(delta), summed(delta * a)
    return {"weight": (product - total * normalised.mean) * normalised.invstd, "bias": total}


HELD = {
    held_batch_norm: Rule(("input", "weight", "bias", "normalised"), small=("weight", "bias"), per_example=_per_example)
}
