"""F.embedding_bag: each example is the sum or the mean of a bag of rows of the weight.

The bags of some examples cannot be cut out of the input where they are given by offsets. So a call keeps the number of
each bag as its data, and the rule computes with all bags: y = bag(input; P), linear in P.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.engines.rules import Arguments, Rule, scale

ARGUMENTS = (
    "input", "weight", "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse",
    "per_sample_weights", "include_last_offset", "padding_idx",
)  # fmt: skip
KEPT = ("offsets", "mode", "per_sample_weights", "include_last_offset", "padding_idx")


def bag_numbers(arguments: Arguments, out: Tensor) -> Tensor:
    """The data that a call keeps in place of its input, which goes to the arguments."""
    arguments["bags"] = arguments.pop("input")
    if (weights := arguments.get("per_sample_weights")) is not None:
        arguments["per_sample_weights"] = weights.detach()
    return torch.arange(len(out), device=out.device)


def _bag(arguments: Arguments, weight: Tensor) -> Tensor:
    settings = {k: arguments[k] for k in KEPT if k in arguments}
    if settings.get("per_sample_weights") is not None:
        settings["per_sample_weights"] = settings["per_sample_weights"].to(weight.dtype)
    return F.embedding_bag(arguments["bags"], weight, **settings)


def _tangent(arguments: Arguments, a: Tensor, direction: Tensor) -> Tensor:
    return _bag(arguments, direction)[a]


def _gradient(arguments: Arguments, a: Tensor, delta: Tensor, coefficients: Tensor | None) -> Tensor:
    with torch.enable_grad():
        weight = torch.zeros_like(arguments["weight"], dtype=delta.dtype).requires_grad_()
        out = _bag(arguments, weight)
        (found,) = torch.autograd.grad(out, weight, torch.zeros_like(out).index_copy_(0, a, scale(delta, coefficients)))
    return found


def _refuse(arguments: Arguments) -> str | None:
    if arguments.get("mode", "mean") == "max":
        return "mode='max' is not linear in the weight (mode='sum' and mode='mean' have a rule)"
    if arguments.get("max_norm") is not None:
        return "max_norm rewrites the weights during the forward"
    if arguments.get("scale_grad_by_freq"):
        return "scale_grad_by_freq mixes the examples of a batch"
    return "sparse gradients are not supported" if arguments.get("sparse") else None


EMBEDDING_BAG = Rule(ARGUMENTS, large="weight", refuse=_refuse, tangent=_tangent, gradient=_gradient)
