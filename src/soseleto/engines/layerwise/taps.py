"""Identities in the model's graph whose backward records the gradients that the tape is for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soseleto.engines.layerwise.call import Call

Finish = Callable[[list[Call]], None]


@dataclass
class Listener:
    """Counts the calls that the backward has reached; ``finish`` is set for the time of our own backward."""

    finish: Finish | None = None

    def reached(self, call: Call) -> None:
        assert self.finish is not None
        assert call.group is not None
        call.group.waiting -= 1
        if call.group.waiting == 0:
            self.finish(call.group.calls)


class Tap(torch.autograd.Function):
    """The identity; its backward records δ. ``anchor`` is the input that our backward differentiates to."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, anchor: Tensor, call: Call, listener: Listener) -> Tensor:
        ctx.call, ctx.listener = call, listener
        return y.detach()  # shares memory and version with y; in-place operations may follow

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor, None, None, None]:
        call, listener = ctx.call, ctx.listener
        if listener.finish is None:  # a backward that the tape did not start
            return delta, None, None, None
        call.delta = delta
        listener.reached(call)
        return delta, None, None, None


class Spread(torch.autograd.Function):
    """A copy of each parameter for every example, so that the layer's own backward gives per-example gradients."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, listener: Listener, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.listener = call, listener
        return tuple(p.detach().repeat(call.rows) for p in parameters)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        call, listener = ctx.call, ctx.listener
        if listener.finish is None:  # a backward that the tape did not start
            return (None, None, None, *(g.view(call.rows, -1).sum(0) for g in gradients))
        call.set_small(gradients)
        listener.reached(call)
        return (None,) * (3 + len(gradients))
