"""Rules for functions of data and a parameter that have none of their own.

    alignment   q_j = ⟨δ_j, (∂f/∂D) dD⟩            the function's directional derivative
    gradient    Σ_j c_j ∂ℓ_j/∂D = (∂f/∂D)ᵀ (c δ)    its backward pass

for a function f of which row j of the result depends on row j of the data, and which does not draw at random. Both run
the function again, so that this is slower than a rule, but holds for einsum, indexing, prelu, bilinear and others.
A product of data with a weight is rewritten as F.linear, which has a rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import resolve_name

from soseleto.engines.layerwise.copies import replaced, tensors
from soseleto.engines.layerwise.derived import Derived
from soseleto.engines.rules import Arguments, Rule, scale
from soseleto.errors import EngineError, first_line

PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm}
LINEAR = {
    *PRODUCTS, Tensor.__rmatmul__, torch.einsum, Tensor.__getitem__, torch.index_select, Tensor.index_select,
    torch.gather, Tensor.gather, torch.tensordot, torch.inner, torch.take, Tensor.take, F.embedding_bag,
}  # fmt: skip


def rule_for(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameter: Tensor) -> Rule:
    """The rule of one call of ``func``, for one of its arguments; ``a`` holds the numbers of the rows."""
    place = parameter.detach()
    kept = replaced((args, dict(kwargs)), lambda t: place if t is parameter else t.detach())
    is_linear = func in LINEAR and sum(t is parameter for t in tensors((*args, *kwargs.values()))) == 1
    versions = [(t, t._version) for t in tensors((*kept[0], *kept[1].values()))]
    device = parameter.device.type
    lowered = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def run(value: Tensor) -> Tensor:
        if any(t._version != version for t, version in versions):
            raise RuntimeError("an argument was changed in place after its use")
        given, named = replaced(kept, lambda t: value if t is place else t)
        with torch.autocast(device, lowered, enabled=lowered is not None):
            out: Tensor = func(*given, **named)
        return out

    def tangent(arguments: Arguments, a: Tensor, direction: Tensor) -> Tensor:
        along = direction.to(place.dtype)
        try:
            found = run(along) if is_linear else torch.func.jvp(run, (place,), (along,))[1]
        except RuntimeError as error:
            raise EngineError(
                f"the layerwise engine has no rule for {resolve_name(func)} ({first_line(error)})."
            ) from error
        return found[a]

    def gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
        with torch.enable_grad():
            free = place.clone().requires_grad_()
            out = run(free)
        whole = torch.zeros_like(out).index_copy_(0, a, scale(delta, coefficients).to(out.dtype))
        return torch.autograd.grad(out, free, whole)[0]

    return Rule(("other",), large="other", tangent=tangent, gradient=gradient)


def as_linear(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], derived: Derived
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The arguments of F.linear for a product of data with a weight, or None."""
    bias = None
    if func in (torch.addmm, Tensor.addmm) and len(args) == 3 and not kwargs and args[0].ndim == 1:
        bias, *args = args  # type: ignore[assignment]
    elif func is Tensor.__rmatmul__:
        args = args[::-1]
    elif func not in PRODUCTS:
        return None
    if len(args) != 2 or derived.is_trainable(args[0]) or not derived.is_trainable(args[1]) or args[0].ndim < 2:
        return None
    weight = args[1]
    if weight.ndim == 3:  # the same weight for every example
        one = weight if len(weight) == 1 else derived.one_row(weight)
        weight = None if one is None else derived.derive(one[0], one)
    return None if weight is None or weight.ndim != 2 else (args[0], derived.derive(weight.mT, weight), bias)
