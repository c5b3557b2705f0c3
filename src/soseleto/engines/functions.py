"""Functions of data and a parameter that have no rule of their own.

    alignment   q_j = ⟨δ_j, (∂f/∂D) dD⟩            the function's directional derivative
    gradient    Σ_j c_j ∂ℓ_j/∂D = (∂f/∂D)ᵀ (c δ)    its backward pass

for a function f of which row j of the result depends on row j of the data, and which does not draw at random. Both
run the function again, so that this is slower than a rule, but holds for whatever PyTorch can differentiate: einsum,
indexing, prelu, where, cat, a learned mask of attention. A product of data with a weight is rewritten as F.linear, and
attention by linear layers, which have rules.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import resolve_name
from torch.utils._pytree import tree_leaves, tree_map_only

from soseleto.engines.computed_parameters import Derived
from soseleto.engines.rules import ADD, RULES, Arguments, Rule, scale
from soseleto.errors import EngineError, first_line

PRODUCTS = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.mm, Tensor.mm, torch.bmm, Tensor.bmm}
LINEAR = {
    *PRODUCTS, torch.einsum, Tensor.__getitem__, torch.index_select, Tensor.index_select,
    torch.gather, Tensor.gather, torch.tensordot, torch.inner, torch.take, Tensor.take, F.embedding_bag,
}  # fmt: skip


def rule_for(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], parameter: Tensor, ndim: int) -> Rule:
    """The rule of a call with a result of ``ndim`` dimensions, for one argument; ``a`` holds the numbers of rows."""
    if RULES.get(func) is ADD and len(args) == 2 and not kwargs:
        return _rule_for_sum(parameter, ndim)
    place = parameter.detach()
    kept = tree_map_only(Tensor, lambda t: place if t is parameter else t.detach(), (args, dict(kwargs)))
    is_linear = func in LINEAR and sum(t is parameter for t in tensors((args, dict(kwargs)))) == 1
    versions = [(t, t._version) for t in tensors(kept)]
    device = parameter.device.type
    lowered = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    def run(value: Tensor) -> Tensor:
        if any(t._version != version for t, version in versions):
            raise RuntimeError("an argument was changed in place after its use")
        given, named = tree_map_only(Tensor, lambda t: value if t is place else t, kept)
        # The fused kernels of attention have no forward mode.
        unfused = sdpa_kernel(SDPBackend.MATH) if func is F.scaled_dot_product_attention else nullcontext()
        with torch.autocast(device, lowered, enabled=lowered is not None), unfused:
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


def _rule_for_sum(parameter: Tensor, ndim: int) -> Rule:
    """The rule of data + parameter, a tensor of ``ndim`` dimensions that the parameter broadcasts to."""
    shape = parameter.shape
    has_rows = len(shape) == ndim and shape[0] > 1  # one for each row of the data, as types of tokens have

    def tangent(arguments: Arguments, a: Tensor, direction: Tensor) -> Tensor:
        return direction[a] if has_rows else direction.clone()

    def gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
        rows = scale(delta, coefficients)
        if has_rows:
            rows = rows.new_zeros(shape[0], *rows.shape[1:]).index_copy_(0, a, rows)
        return rows.sum_to_size(shape)

    return Rule(("other",), large="other", tangent=tangent, gradient=gradient)


def as_linear(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], derived: Derived
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """The arguments of F.linear for a product of data with a weight, or None."""
    bias = None
    if func in (torch.addmm, Tensor.addmm) and len(args) == 3 and not kwargs and args[0].ndim == 1:
        bias, *args = args  # type: ignore[assignment]
    elif func not in PRODUCTS:
        return None
    if len(args) != 2 or derived.is_trainable(args[0]) or not derived.is_trainable(args[1]) or args[0].ndim < 2:
        return None
    weight = args[1]
    return (args[0], derived.derive(weight.mT, weight), bias) if weight.ndim == 2 else None


# torch.nn.MultiheadAttention written with separate linear layers, which have rules.
#
# PyTorch computes both projections inside one function, with the batch in the second dimension. This is the same
# computation, batch first, for self-attention without returned attention weights, as transformer encoders use it.


_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def refuse_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why ``self_attention`` cannot replace this call of multi_head_attention_forward, or None."""
    a = _SIGNATURE.bind(*args, **kwargs).arguments
    is_plain = (
        a["query"] is a["key"] is a["value"]
        and a["query"].ndim == 3
        and not a.get("need_weights", True)
        and not a.get("use_separate_proj_weight")
        and not a["add_zero_attn"]
        and all(a.get(k) is None for k in ("bias_k", "bias_v", "static_k", "static_v"))
    )
    return None if is_plain else "only batched self-attention with a packed projection, need_weights=False, has a rule"


def self_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    """multi_head_attention_forward for calls that ``refuse_attention`` accepts; same arguments, same result."""
    a = _SIGNATURE.bind(*args, **kwargs)
    a.apply_defaults()
    given = a.arguments
    x = given["query"].transpose(0, 1)  # (L, N, E) -> (N, L, E)
    n, length, width = x.shape
    packed = F.linear(x, given["in_proj_weight"], given["in_proj_bias"])
    q, k, v = packed.view(n, length, 3, given["num_heads"], -1).permute(2, 0, 3, 1, 4)
    mask, causal = _mask(given, n, x.dtype)
    dropout = given["dropout_p"] if given["training"] else 0.0
    out = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
    out = F.linear(out.transpose(1, 2).reshape(n, length, width), given["out_proj_weight"], given["out_proj_bias"])
    return out.transpose(0, 1).contiguous(), None  # PyTorch's own layout: dropout draws in memory order


def _mask(given: Mapping[str, Any], n: int, dtype: torch.dtype) -> tuple[Tensor | None, bool]:
    """One additive mask from PyTorch's two masks, and whether to use the kernel's own causal mask instead."""
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if given["is_causal"] and padding is None:
        return None, True
    mask = None if mask is None else _additive(mask, dtype)
    if mask is not None and mask.ndim == 3:
        mask = mask.view(n, -1, *mask.shape[1:])
    if padding is not None:
        padding = _additive(padding, dtype).view(n, 1, 1, -1)
        mask = padding if mask is None else mask + padding
    return mask, False


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask, float("-inf"))


@cache
def out_of_place(func: Any) -> Any:
    """``add`` for ``add_`` and ``__iadd__``, or None."""
    name = func.__name__
    plain = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    found = getattr(Tensor, plain, None) or getattr(torch, plain, None)
    return found if callable(found) and found is not func else None


def tensors(values: Any) -> list[Tensor]:
    """The tensors among the arguments of a function, also inside lists and tuples."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]
