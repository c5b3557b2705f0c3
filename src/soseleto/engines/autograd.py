"""Alignments by autograd's backward alone, and the gradients of a step.

``loop`` and ``double_backward`` return the batch's losses, still attached to their graph, and the alignments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from soseleto.engines.interface import (
    Direction,
    Passes,
    PerExampleLoss,
    SourcePass,
    SourceStep,
    Step,
    as_loss_vector,
    inner,
    named_in,
    reductions_dtype,
    refuse_sharded,
    refuse_sparse,
    trainable,
)
from soseleto.engines.model_state import is_shard
from soseleto.errors import EngineError

Linearize = Callable[[nn.Module, PerExampleLoss, Any, Direction], tuple[Tensor, Tensor]]


def loop(model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction) -> tuple[Tensor, Tensor]:
    """One backward per example: q_j = ⟨∂ℓ_j/∂θ, direction⟩, computed as written.

    Obviously correct, but slow: the reference of every test.
    """
    parameters = named_in(direction, model)
    losses = as_loss_vector(per_example_loss(model, batch))
    alignment = []
    for loss in losses:
        alignment.append(inner(gradient(loss, parameters, retain_graph=True), direction))
    return losses, torch.stack(alignment).detach()


def double_backward(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Differentiate the gradient of Σ_j v_j ℓ_j in v.

    With g(v) = Σ_j v_j ∂ℓ_j/∂θ, linear in v, q = ∂⟨g(v), direction⟩/∂v at any v. Works with every operator that
    has a double backward; attention uses its unfused kernel, which has one.
    """
    parameters = named_in(direction, model)
    with sdpa_kernel(SDPBackend.MATH), differentiable_recurrence(model):
        losses = as_loss_vector(per_example_loss(model, batch))
        v = torch.ones_like(losses, requires_grad=True)
        gradients = torch.autograd.grad(
            losses, list(parameters.values()), grad_outputs=v, create_graph=True, allow_unused=True
        )
        total = inner(dict(zip(parameters, gradients, strict=True)), direction)
        if not total.requires_grad:  # the losses depend on none of the named parameters
            return losses, torch.zeros_like(losses, dtype=reductions_dtype(losses.dtype)).detach()
        (alignment,) = torch.autograd.grad(total, v, retain_graph=True)
    return losses, alignment.to(reductions_dtype(alignment.dtype)).detach()


@contextmanager
def differentiable_recurrence(model: nn.Module) -> Iterator[None]:
    """Inside, recurrent layers run without cuDNN, whose fused ones have no forward-mode rule and no double backward.

    The user's other settings of cuDNN stay; ``torch.backends.cudnn.flags`` would set every one.
    """
    before = torch.backends.cudnn.enabled
    if any(isinstance(module, nn.RNNBase) for module in model.modules()):
        torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


class BaseEngine:
    """What follows from an engine's ``source_pass``."""

    def source_pass(self, step: SourceStep) -> SourcePass:
        raise NotImplementedError

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        named_in(direction, model)
        found = self.source_pass(SourceStep(model, per_example_loss, batch, direction))
        return found.losses, found.alignment

    def passes(self, step: Step) -> Passes:
        """In two parts: the gradient of the mean target loss, then the source."""
        target_losses = as_loss_vector(step.losses.target(step.model, step.target))
        target_gradient = gradient(target_losses.mean(), trainable(step.model))
        direction = step.to_direction(target_gradient)
        target_losses, target_gradient = target_losses.detach(), step.to_return(target_gradient)
        found = self.source_pass(step.source_step(direction))
        return Passes(found.losses, target_losses, found.alignment, found.gradient, target_gradient)


def gradient(
    losses: Tensor,
    parameters: dict[str, nn.Parameter],
    coefficients: Tensor | None = None,
    *,
    retain_graph: bool = False,
) -> dict[str, Tensor]:
    """Σ_j c_j ∂ℓ_j/∂p by name; parameters that the losses do not use are left out."""
    refuse_sharded(any(is_shard(p) for p in parameters.values()), "plain autograd")
    try:
        gradients = torch.autograd.grad(
            losses, list(parameters.values()), grad_outputs=coefficients, retain_graph=retain_graph, allow_unused=True
        )
    except RuntimeError as error:
        if "use_reentrant" in str(error) or "Checkpointing is not compatible with .grad()" in str(error):
            raise EngineError(
                "the model uses torch.utils.checkpoint with use_reentrant=True, which allows no per-example gradients: "
                "call checkpoint(..., use_reentrant=False)."
            ) from error
        raise
    found = {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}
    for name, g in found.items():
        refuse_sparse(name, g)
    return found


def times(gradients: dict[str, Tensor], factor: Tensor) -> dict[str, Tensor]:
    """Every gradient times a factor (), each in its own precision and all in few kernels."""
    if not gradients:
        return gradients
    kinds = {g.dtype: factor.to(g.dtype) for g in gradients.values()}
    if len(kinds) > 1:
        return {name: g * kinds[g.dtype] for name, g in gradients.items()}
    scaled = torch._foreach_mul(list(gradients.values()), next(iter(kinds.values())))
    return dict(zip(gradients, scaled, strict=True))


def add_gradients(total: dict[str, Tensor], more: Mapping[str, Tensor]) -> None:
    """Add ``more`` to ``total``, parameter by parameter; not in place, since the gradient of a sum is expanded."""
    for name, g in more.items():
        total[name] = total[name] + g if name in total else g
