"""Engines that lean on autograd alone: exact for whatever autograd can differentiate, BatchNorm included.

Each is one function that returns the batch's losses, still attached to their graph, and the alignments.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from soseleto.engines.contract import (
    Coefficients,
    Direction,
    Losses,
    Passes,
    PerExampleLoss,
    SourcePass,
    ToDirection,
    as_loss_vector,
    inner,
    named_in,
    no_reentrant_checkpoint,
    reductions_dtype,
    refuse_compiled,
    refuse_sharded,
    trainable,
)
from soseleto.engines.shards import is_shard, sharded_modules
from soseleto.errors import EngineError

Linearize = Callable[[nn.Module, PerExampleLoss, Any, Direction], tuple[Tensor, Tensor]]


def loop(model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction) -> tuple[Tensor, Tensor]:
    """One backward per example. Obviously right, slow: the oracle of every test.

    q_j = ⟨∂ℓ_j/∂θ, direction⟩ is computed exactly as it is written.
    """
    parameters = named_in(direction, model)
    losses = as_loss_vector(per_example_loss(model, batch))
    alignment = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        alignment.append(inner(dict(zip(parameters, gradients, strict=True)), direction))
    return losses, torch.stack(alignment).detach()


def double_backward(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
) -> tuple[Tensor, Tensor]:
    """Differentiate the gradient of Σ_j v_j ℓ_j in v.

    With g(v) = Σ_j v_j ∂ℓ_j/∂θ, linear in v, q = ∂⟨g(v), direction⟩/∂v at any v. Works with every operator that
    has a double backward; attention runs on its plain (unfused) kernel, which has one.
    """
    parameters = named_in(direction, model)
    with sdpa_kernel(SDPBackend.MATH), torch.backends.cudnn.flags(enabled=cudnn_allowed(model)):
        losses = as_loss_vector(per_example_loss(model, batch))
        v = torch.ones_like(losses, requires_grad=True)
        gradients = torch.autograd.grad(
            losses, list(parameters.values()), grad_outputs=v, create_graph=True, allow_unused=True
        )
        total = inner(dict(zip(parameters, gradients, strict=True)), direction)
        if not total.requires_grad:  # no named parameter has anything to do with the losses
            return losses, torch.zeros_like(losses, dtype=reductions_dtype(losses.dtype)).detach()
        (alignment,) = torch.autograd.grad(total, v, retain_graph=True)
    return losses, alignment.to(reductions_dtype(alignment.dtype)).detach()


def cudnn_allowed(model: nn.Module) -> bool:
    """cuDNN's fused recurrent layers have neither a forward rule nor a double backward; PyTorch's own have."""
    return torch.backends.cudnn.enabled and not any(isinstance(m, nn.RNNBase) for m in model.modules())


@dataclass(frozen=True)
class AutogradEngine:
    """Turns one of the functions above into an engine."""

    name: str
    linearize: Linearize

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        losses, alignment = self._linearize(model, per_example_loss, batch, direction)
        return losses.detach(), alignment

    def passes(
        self,
        model: nn.Module,
        losses: Losses,
        source: Any,
        target: Any,
        *,
        to_direction: ToDirection,
        coefficients: Coefficients,
    ) -> Passes:
        target_losses = as_loss_vector(losses.target(model, target))
        target_gradient = gradient(target_losses.mean(), trainable(model))
        found = self.source_pass(model, losses.source, source, to_direction(target_gradient), coefficients)
        return Passes(
            source_losses=found.losses,
            target_losses=target_losses.detach(),
            alignment=found.alignment,
            source_gradient=found.gradient,
            target_gradient=target_gradient,
        )

    def source_pass(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        batch: Any,
        direction: Direction,
        coefficients: Coefficients,
    ) -> SourcePass:
        losses, alignment = self._linearize(model, per_example_loss, batch, direction)
        c = coefficients(alignment) if callable(coefficients) else coefficients
        return SourcePass(losses.detach(), alignment, gradient(losses, trainable(model), c.to(losses.dtype)))

    def _linearize(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        refuse_compiled(model)
        refuse_sharded(bool(sharded_modules(model)), f"the {self.name} engine")
        try:
            with torch.enable_grad():
                return self.linearize(model, per_example_loss, batch, direction)
        except RuntimeError as error:
            if reentrant := no_reentrant_checkpoint(error):
                raise reentrant from error
            if self.name != "loop" and _no_rule(error):
                raise EngineError(
                    f"the {self.name} engine has no rule for an operator of this model ({_first_line(error)}): "
                    f"use engine={'double_backward' if self.name == 'forward' else 'loop'!r}."
                ) from error
            raise


def gradient(
    losses: Tensor, parameters: dict[str, nn.Parameter], coefficients: Tensor | None = None
) -> dict[str, Tensor]:
    """Σ_j c_j ∂ℓ_j/∂p by name; a parameter the losses do not use is left out."""
    refuse_sharded(any(is_shard(p) for p in parameters.values()), "plain autograd")
    try:
        gradients = torch.autograd.grad(losses, list(parameters.values()), grad_outputs=coefficients, allow_unused=True)
    except RuntimeError as error:
        raise no_reentrant_checkpoint(error) or error from error
    return {name: g for name, g in zip(parameters, gradients, strict=True) if g is not None}


def _no_rule(error: RuntimeError) -> bool:
    words = str(error)
    return isinstance(error, NotImplementedError) or any(
        sign in words
        for sign in (
            "forward AD",
            "is not implemented",
            "not differentiable twice",
            "does not support",
            "once_diff",
        )
    )


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0][:160].rstrip(". ")
