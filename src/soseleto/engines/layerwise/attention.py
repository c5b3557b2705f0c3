"""torch.nn.MultiheadAttention written with separate linear layers, which have rules.

PyTorch computes both projections inside one function, with the batch in the second dimension. This is the same
computation, batch first, for self-attention without returned attention weights, as transformer encoders use it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_SIGNATURE = inspect.signature(F.multi_head_attention_forward)


def refuse_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why ``self_attention`` cannot replace this call of multi_head_attention_forward, or None."""
    a = _SIGNATURE.bind(*args, **kwargs).arguments
    if not (a["query"] is a["key"] is a["value"]):
        return "only self-attention has a rule (query, key and value the same tensor)"
    if a.get("need_weights", True):
        return "returned attention weights have no rule (pass need_weights=False)"
    if a["query"].ndim != 3 or a.get("use_separate_proj_weight") or a["add_zero_attn"]:
        return "only batched self-attention with one packed projection has a rule"
    if any(a.get(k) is not None for k in ("bias_k", "bias_v", "static_k", "static_v")):
        return "attention with static or bias keys has no rule"
    return None


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
