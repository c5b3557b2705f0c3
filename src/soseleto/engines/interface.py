"""The engines' interface: arguments, results, and the checks that all engines share.

An engine computes, for a batch of source examples,

    q_j = Σ_p ⟨∂ℓ_j/∂p, direction[p]⟩          (the paper's Qᵀ ∂L_t/∂θ, without its factor 1/nˢ)

where ℓ_j is entry j of the batch's loss vector and p runs over the parameters named in ``direction``.
An engine leaves nothing on the model: no wrapper, no hook, no attribute, no changed gradient, and no buffer
changed beyond what one ordinary forward pass changes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from soseleto.engines.model_state import parameters_of
from soseleto.errors import EngineError, UsageError, did_you_mean

logger = logging.getLogger("soseleto")

PerExampleLoss = Callable[[nn.Module, Any], Tensor]
Direction = Mapping[str, Tensor]


class Losses(Protocol):
    """The per-example losses of both sides of a problem."""

    def source(self, model: nn.Module, batch: Any) -> Tensor: ...

    def target(self, model: nn.Module, batch: Any) -> Tensor: ...

    def can_join(self, source: Any, target: Any) -> bool:
        """Whether the two batches can share one forward pass."""
        ...

    def joint(self, model: nn.Module, source: Any, target: Any) -> Tensor:
        """Source losses followed by target losses, from one forward pass."""
        ...


@dataclass(frozen=True)
class Passes:
    """What Algorithm 1 needs from one source and one target batch, all evaluated at the same θ."""

    source_losses: Tensor  # (B,)
    target_losses: Tensor  # (T,)
    alignment: Tensor  # (B,), at least float32
    source_gradient: dict[str, Tensor]  # Σ_j c_j ∂ℓ_j/∂p
    target_gradient: dict[str, Tensor]  # ∂L_t/∂p of the parameters asked for, the mean over the target batch


@dataclass(frozen=True)
class SourcePass:
    """The source part of a step, for a given direction."""

    losses: Tensor  # (B,)
    alignment: Tensor  # (B,), at least float32
    gradient: dict[str, Tensor]  # Σ_j c_j ∂ℓ_j/∂p


# Maps the gradient of the target loss to the direction that source examples are compared with (it may average over
# steps). An engine may call it for some of the parameters at a time, for each parameter exactly once a step. It must
# not change its arguments: if it returns one of them, the engine takes that direction to be the target gradient itself.
ToDirection = Callable[[dict[str, Tensor]], dict[str, Tensor]]


@dataclass(frozen=True)
class SourceStep:
    """The arguments of ``Engine.source_pass``."""

    model: nn.Module
    loss: PerExampleLoss
    batch: Any
    direction: Direction
    coefficients: Tensor | None = None  # c (B,); None: no gradient


@dataclass(frozen=True)
class Step:
    """The arguments of ``Engine.passes``."""

    model: nn.Module
    losses: Losses
    source: Any
    target: Any
    to_direction: ToDirection
    coefficients: Tensor  # c (B,)
    wanted: Collection[str] | None = None  # parameters whose target gradient is returned; None: all
    restore: Callable[[], None] | None = None  # undoes what passes since the step's start have changed on the model

    def to_return(self, target_gradient: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of a target gradient that is returned; the rest is freed as soon as its direction is known."""
        if self.wanted is None:
            return target_gradient
        return {name: g for name, g in target_gradient.items() if name in self.wanted}

    def source_step(self, direction: Direction) -> SourceStep:
        """The source part of this step, once the direction is known."""
        return SourceStep(self.model, self.losses.source, self.source, direction, self.coefficients)


class Engine(Protocol):
    """A way to compute alignments."""

    @property
    def name(self) -> str: ...

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        """Losses and alignments of the batch, both (B,) and detached."""
        ...

    def passes(self, step: Step) -> Passes:
        """The passes of one training step: target gradient, alignments, and the weighted source gradient."""
        ...

    def source_pass(self, step: SourceStep) -> SourcePass:
        """The source part of ``passes``, for a direction that was computed before."""
        ...


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trainable parameters by name; a tied parameter appears once, under its first name."""
    return {name: p for name, p in parameters_of(model).items() if p.requires_grad}


def refuse_sharded(is_sharded: bool, what: str) -> None:
    """Raise for a sharded model: the parameters that it names are not the tensors that autograd differentiates."""
    if is_sharded:
        raise EngineError(
            f"the model is sharded (fully_shard), where {what} cannot work: train it by fit(..., "
            "method=Soseleto(engine='layerwise'), compute=Compute(reducer=...)), or give every rank the plain model."
        )


def named_in(direction: Direction, model: nn.Module) -> dict[str, nn.Parameter]:
    """The model's parameters that ``direction`` names; raises unless all exist, are trainable and of that shape."""
    if not direction:
        raise UsageError("direction is empty: pass a dict of parameter name -> tensor, such as a target gradient.")
    known = dict(model.named_parameters())
    for name, tensor in direction.items():
        if name not in known:
            raise UsageError(
                f"direction names {name!r}, which is not a parameter of this model{did_you_mean(name, known)}: "
                "use the names of model.named_parameters()."
            )
        if not known[name].requires_grad:
            raise UsageError(f"direction names {name!r}, which is frozen: leave it out, or set requires_grad=True.")
        if tensor.shape != known[name].shape:
            raise UsageError(
                f"direction[{name!r}] has shape {tuple(tensor.shape)}, the parameter {tuple(known[name].shape)}: "
                "pass a gradient of that parameter."
            )
    return {name: known[name] for name in direction}


def as_loss_vector(losses: object, *, differentiable: bool = True) -> Tensor:
    """``losses`` if it is a vector with one entry per example, else an error with the line to type.

    differentiable: whether the losses must have a gradient; not needed for an evaluation.
    """
    if not isinstance(losses, Tensor):
        raise UsageError(
            f"the loss returned {type(losses).__name__}: return a tensor of shape (B,), one loss per example."
        )
    if losses.ndim == 0:
        raise UsageError(
            "the loss returned a scalar, but one number per example is needed: "
            "write reduction='none', as in F.cross_entropy(outputs, labels, reduction='none')."
        )
    if losses.ndim > 1:
        raise UsageError(
            f"the loss returned shape {tuple(losses.shape)}, but one number per example is needed: "
            "write losses.flatten(1).mean(1)."
        )
    if len(losses) > 1 and losses.stride(0) == 0:
        raise UsageError(
            "the loss returned one number expanded to all examples, but one number per example is needed: "
            "write reduction='none', as in F.cross_entropy(outputs, labels, reduction='none')."
        )
    if differentiable and not losses.requires_grad:
        raise UsageError(
            "the loss returned losses without a gradient: compute them with the model, outside torch.no_grad()."
        )
    return losses


def leaves(losses: Tensor, *beyond: Any) -> Iterator[Tensor]:
    """The leaves of a graph that need a gradient, without those that are reached through the nodes ``beyond``."""
    waiting, seen = [losses.grad_fn], {None, *beyond}
    while waiting:
        node: Any = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [following for following, _ in node.next_functions]


def refuse_foreign(losses: Tensor, model: nn.Module) -> None:
    """Raise if the losses depend on a trainable parameter that the model does not own: its gradient would be lost."""
    own = {id(p) for p in model.parameters()}
    for leaf in leaves(losses):
        if isinstance(leaf, nn.Parameter) and id(leaf) not in own:
            raise UsageError(
                f"the loss has a trainable parameter of shape {tuple(leaf.shape)} that is not one of the model's, so "
                "that it would never be trained: make its module a part of the model, or set requires_grad=False."
            )


def is_differentiable(out: object) -> bool:
    """Whether a function's result, a tensor or a list or tuple, has a part that requires a gradient."""
    values = out if isinstance(out, (list, tuple)) else (out,)
    return any(isinstance(v, Tensor) and v.requires_grad for v in values)


def reductions_dtype(dtype: torch.dtype) -> torch.dtype:
    """Alignments are summed in float32, or in float64 for a float64 or complex128 model."""
    return torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32


def as_dtype(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """``tensor.to(dtype)``, which takes time even where the tensor has that type."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def inner(gradients: Mapping[str, Tensor | None], direction: Direction) -> Tensor:
    """Σ_p Re⟨gradients[p], direction[p]⟩; a parameter without a gradient counts as zero.

    For a complex parameter p = a + ib PyTorch's gradient is ∂ℓ/∂a + i∂ℓ/∂b, so that Re⟨g, d⟩, the sum of
    Re(g)Re(d) + Im(g)Im(d), is the derivative of ℓ along d.
    """
    total: Tensor | None = None
    for name, gradient in gradients.items():
        if gradient is not None:
            dtype = reductions_dtype(gradient.dtype)
            part = (_real(gradient).to(dtype) * _real(direction[name]).to(dtype)).sum()
            total = part if total is None else total + part
    if total is None:
        first = next(iter(direction.values()))
        return torch.zeros((), dtype=reductions_dtype(first.dtype), device=first.device)
    return total


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def refuse_sparse(name: str, gradient: Tensor) -> None:
    """Raise for a sparse gradient, which no average over steps can be taken of."""
    if gradient.layout != torch.strided:
        raise UsageError(
            f"the gradient of parameter {name!r} is sparse, which alignments do not support: "
            "make the embedding with sparse=False."
        )
