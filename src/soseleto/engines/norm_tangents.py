"""The tangent of BatchNorm in training mode, alone or together with the sum and the ReLU that follow it.

With μ and σ of the batch, x̂ = (x − μ)/σ and y = γx̂ + β, and means over the batch and positions of a channel,

    dy = γ/σ·(dx − mean(dx) − x̂·mean(x̂·dx)) + dγ·x̂ + dβ,

the backward of BatchNorm, a symmetric map, applied to dx, and a part for the affine parameters. One pass over x and dx
gives the two means, and one more the result. There are three ways, equal up to rounding:

    ``_FUSED``      the two CUDA kernels of SyncBatchNorm; dγ and dβ are added to the two means and cost no pass
    ``_COMPILED``   the second pass, with a following sum and ReLU, as one kernel of torch.compile
    otherwise       PyTorch's backward, then dγ·x̂ and dβ added

Passes over activations (reads and writes) for BatchNorm and ReLU: 8 with ``_FUSED``, 6 with ``_COMPILED``, else 13.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from soseleto.engines import rules

_DEVICES = {"cuda"}  # where the first and second way are used
_FUSED = True
_COMPILED = False  # takes precedence; needs the compiler that torch.compile calls
_SMALLEST = 1e-15  # added to γ, by which the fused kernel's arguments are divided: not visible in the result


class Term(NamedTuple):
    """What the tangent of one BatchNorm is computed from: activations, then vectors of one entry per channel."""

    dx: Tensor
    x: Tensor
    mean: Tensor
    invstd: Tensor
    total: Tensor  # Σ dx
    product: Tensor  # Σ dx·(x − mean)
    weight: Tensor | None
    d_weight: Tensor | None
    d_bias: Tensor | None


@dataclass(frozen=True)
class Combination:
    """A tangent that is not computed yet: that of a sum of BatchNorms and of others that are known."""

    terms: tuple[Term, ...]
    others: tuple[Tensor, ...] = ()

    def dense(self) -> Tensor:
        return self._compute(None)

    def masked(self, out: Tensor) -> Tensor:
        """The tangent of ReLU: 0 where its output is not positive."""
        return self._compute(out)

    def plus(self, other: Combination | Tensor) -> Combination:
        if isinstance(other, Tensor):
            return Combination(self.terms, (*self.others, other))
        return Combination(self.terms + other.terms, self.others + other.others)

    def _compute(self, mask: Tensor | None) -> Tensor:
        x = self.terms[0].x
        flat = _rows if _is_channels_last(x) else _columns
        shape = (-1,) if flat is _rows else (-1, 1)
        terms = [
            Term(flat(t.dx), flat(t.x), *(None if v is None else v.view(shape) for v in t[2:]))  # type: ignore[arg-type]
            for t in self.terms
        ]
        others, count = [flat(t) for t in self.others], x.numel() // x.shape[1]
        with torch.autocast(x.device.type, enabled=False):
            return _like(_kernel()(terms, others, None if mask is None else flat(mask), count), x)


def combine(terms: list[Term], others: list[Tensor], mask: Tensor | None, count: int) -> Tensor:
    """The sum of the terms' tangents and of the others, computed in the precision of the statistics."""
    total = terms[0].mean.new_zeros(())
    for t in terms:
        centred = t.x - t.mean
        dy = (t.dx - t.total / count - centred * (t.invstd * t.invstd * t.product / count)) * t.invstd
        dy = dy if t.weight is None else dy * t.weight
        dy = dy if t.d_weight is None else dy + centred * (t.d_weight * t.invstd)
        total = total + (dy if t.d_bias is None else dy + t.d_bias)
    for other in others:
        total = total + other
    if mask is not None:
        total = torch.where(mask > 0, total, 0.0)
    return total.to(terms[0].dx.dtype)


@cache
def _kernel() -> Callable[..., Tensor]:
    return torch.compile(combine, dynamic=True)


def batch_norm(
    func: Any, args: Any, kwargs: Any, given: Mapping[int, Tensor]
) -> tuple[Tensor, Tensor | Combination | None] | None:
    """The output and its tangent; None in evaluation mode."""
    arguments = rules.BATCH_NORM.bind(args, kwargs)
    if not arguments.get("training", False):
        return None
    call = _Call(arguments)
    dx, d_weight, d_bias = (given.get(id(arguments.get(k))) for k in ("input", "weight", "bias"))
    with torch.no_grad():
        if dx is None or call.x.device.type not in _DEVICES or not (_FUSED or _COMPILED):
            return call.out, call.plain(dx, d_weight, d_bias)
        term = call.term(dx, d_weight, d_bias)
        return call.out, Combination((term,)) if _COMPILED else fused(term)


class _Call:
    """One forward pass of BatchNorm, with what its tangent needs."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.x, self.weight = arguments["input"], arguments.get("weight")
        self.old = arguments.get("running_mean"), arguments.get("running_var")
        momentum, self.eps = arguments.get("momentum", 0.1), arguments.get("eps", 1e-5)
        self.out, self.mean, self.invstd, self.reserve, self.kind = torch._batch_norm_impl_index(
            self.x, self.weight, arguments.get("bias"), *self.old, True, momentum, self.eps,
            torch.backends.cudnn.enabled,
        )  # fmt: skip

    def plain(self, dx: Tensor | None, d_weight: Tensor | None, d_bias: Tensor | None) -> Tensor | None:
        x, dy = self.x, None
        if dx is not None:
            dy = torch.ops.aten._batch_norm_impl_index_backward(
                self.kind, x, dx.to(x.dtype), self.weight, *self.old, self.mean, self.invstd, True, self.eps,
                [True, False, False], self.reserve,
            )[0]  # fmt: skip
        shape = (1, -1, *[1] * (x.ndim - 2))
        if d_weight is not None:  # dγ·x̂ = x·scale − mean·scale
            scale = d_weight * self.invstd
            shift = torch.addcmul(torch.zeros_like(scale) if d_bias is None else d_bias, self.mean, scale, value=-1)
            scale = scale.to(x.dtype).view(shape)
            dy, d_bias = x * scale if dy is None else dy.addcmul_(x, scale), shift
        if d_bias is not None:
            d_bias = d_bias.to(x.dtype).view(shape)
            dy = d_bias.expand_as(x) if dy is None else dy.add_(d_bias)
        return dy

    def term(self, dx: Tensor, d_weight: Tensor | None, d_bias: Tensor | None) -> Term:
        x, dx = self._laid_out(self.x), self._laid_out(dx)
        weight = None if self.weight is None else self.weight.detach().to(self.mean.dtype)
        total, product, _, _ = torch.batch_norm_backward_reduce(
            dx, x, self.mean, self.invstd, weight, True, False, False
        )
        return Term(dx, x, self.mean, self.invstd, total, product, weight, d_weight, d_bias)

    def _laid_out(self, tensor: Tensor) -> Tensor:
        """In the precision and memory format of x, as the kernels require."""
        layout = torch.channels_last if _is_channels_last(self.x) else torch.contiguous_format
        return tensor.detach().to(self.x.dtype).contiguous(memory_format=layout)


def fused(term: Term) -> Tensor:
    """By a kernel that computes (dx − total/n − (x − μ)·invstd²·product/n)·γ·invstd.

    dγ·x̂ + dβ has the same form, so that it is a change of ``total`` and ``product``, divided by γ.
    """
    dx, x, mean, invstd, total, product, weight, d_weight, d_bias = term
    n = x.numel() // x.shape[1]
    weight = torch.ones_like(mean) if weight is None else weight + _SMALLEST
    slope = weight * invstd
    if d_bias is not None:
        total = torch.addcdiv(total, d_bias, slope, value=-n)
    if d_weight is not None:
        product = torch.addcdiv(product, d_weight, slope * invstd, value=-n)
    return torch.batch_norm_backward_elemt(dx, x, mean, invstd, weight, total, product, _count(n, x.device))


@cache
def _count(n: int, device: torch.device) -> Tensor:
    return torch.full((1,), n, dtype=torch.int32, device=device)


def _is_channels_last(x: Tensor) -> bool:
    return x.ndim == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last)


def _rows(tensor: Tensor) -> Tensor:
    """(N, C, H, W) in channels-last memory as (NHW, C)."""
    tensor = tensor.detach().contiguous(memory_format=torch.channels_last)
    return tensor.permute(0, 2, 3, 1).reshape(-1, tensor.shape[1])


def _columns(tensor: Tensor) -> Tensor:
    """(N, C, ...) as (N, C, positions)."""
    return tensor.detach().contiguous().flatten(2) if tensor.ndim > 2 else tensor.detach().unsqueeze(2)


def _like(flat: Tensor, x: Tensor) -> Tensor:
    if flat.ndim == 3:
        return flat.view(x.shape)
    n, c, h, w = x.shape
    return flat.view(n, h, w, c).permute(0, 3, 1, 2)
