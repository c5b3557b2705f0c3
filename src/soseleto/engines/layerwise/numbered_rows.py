"""Functions of which no part can be computed for some rows of the input alone, without other arguments of the call.

For F.embedding_bag offsets say which words belong to an example, for F.grouped_mm which rows belong to an expert. A
call of these keeps the numbers of its rows as its data, and the whole input among its arguments. Both functions are
linear in the weight: y = f(rows; P).
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.engines.rules import Arguments, Rule, scale


def number_rows(arguments: Arguments, out: Tensor) -> Tensor:
    """The numbers of the rows of ``out``; the input goes to the arguments."""
    arguments["all"] = arguments.pop("input").detach()
    if (weights := arguments.get("per_sample_weights")) is not None:
        arguments["per_sample_weights"] = weights.detach()
    return torch.arange(len(out), device=out.device)


# --- bags of words: an example is the sum or the mean of rows of the weight ---


def _bag(arguments: Arguments, weight: Tensor) -> Tensor:
    names = "offsets", "mode", "per_sample_weights", "include_last_offset", "padding_idx"
    settings = {k: arguments[k] for k in names if k in arguments}
    if settings.get("per_sample_weights") is not None:
        settings["per_sample_weights"] = settings["per_sample_weights"].to(weight.dtype)
    return F.embedding_bag(arguments["all"], weight, **settings)


def _bag_gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
    with torch.enable_grad():
        weight = torch.zeros_like(arguments["weight"], dtype=delta.dtype).requires_grad_()
        out = _bag(arguments, weight)
        (found,) = torch.autograd.grad(out, weight, torch.zeros_like(out).index_copy_(0, a, scale(delta, coefficients)))
    return found


def _refuse_bag(arguments: Arguments) -> str | None:
    if arguments.get("mode", "mean") == "max":
        return "mode='max' is not linear in the weight (mode='sum' and mode='mean' have a rule)"
    if arguments.get("max_norm") is not None:
        return "max_norm rewrites the weights during the forward"
    if arguments.get("scale_grad_by_freq"):
        return "scale_grad_by_freq mixes the examples of a batch"
    return "sparse gradients are not supported" if arguments.get("sparse") else None


EMBEDDING_BAG = Rule(
    tuple(inspect.signature(F.embedding_bag).parameters),
    large="weight",
    refuse=_refuse_bag,
    tangent=lambda arguments, a, direction: _bag(arguments, direction)[a],
    gradient=_bag_gradient,
)


# --- experts: rows are sorted by expert, and the rows below offs[e] belong to the experts up to e ---


def _chosen(arguments: Arguments, a: Tensor) -> tuple[Tensor, Tensor]:
    """The chosen rows and their own offsets; ``a`` is ascending."""
    offsets = torch.searchsorted(a, arguments["offs"].to(a.dtype))
    return arguments["all"][a], offsets.to(arguments["offs"].dtype)


def _experts_tangent(arguments: Arguments, a: Tensor, direction: Tensor) -> Tensor:
    rows, offsets = _chosen(arguments, a)
    return F.grouped_mm(rows.to(direction.dtype), direction, offs=offsets)


def _experts_gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
    rows, offsets = _chosen(arguments, a)
    return F.grouped_mm(rows.to(delta.dtype).T, scale(delta, coefficients), offs=offsets)


def _refuse_experts(arguments: Arguments) -> str | None:
    if arguments["input"].ndim != 2 or arguments["weight"].ndim != 3 or arguments.get("offs") is None:
        return "grouped_mm has a rule for rows that are sorted by expert only (2-D input, 3-D weight)"
    return "grouped_mm with a bias has no rule" if arguments.get("bias") is not None else None


EXPERTS = Rule(
    ("input", "weight"),
    large="weight",
    refuse=_refuse_experts,
    tangent=_experts_tangent,
    gradient=_experts_gradient,
)

NUMBERED: dict[Any, Rule] = {F.embedding_bag: EMBEDDING_BAG}
for _function in (getattr(F, "grouped_mm", None), getattr(torch, "_grouped_mm", None)):
    if _function is not None:  # not in every version of torch
        NUMBERED[_function] = EXPERTS
