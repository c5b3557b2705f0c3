"""What θ learns from: weights and losses of a source batch as one loss, and the target's share in the gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.engines.autograd import times
from soseleto.engines.interface import Losses, Passes
from soseleto.errors import UsageError
from soseleto.pieces.piece import Piece, SourceLoss, State, Step
from soseleto.task.loop import LoopLosses
from soseleto.task.losses import NoisyLosses, TransferLosses, cross_entropy
from soseleto.task.task import Task
from soseleto.weights import Weights

_SMALLEST_PRIOR = 0.01  # so that every example can come back
_SMALLEST_POSTERIOR = 1e-4


@dataclass(frozen=True)
class mean(SourceLoss):
    """mean(αℓ): the paper's."""

    def coefficients(self, alpha: Tensor, source: Batch, task: Task) -> Tensor:
        return alpha / source.total


@dataclass(frozen=True)
class normalized(SourceLoss):
    """Σαℓ/Σα: small weights do not lower the learning rate."""

    def coefficients(self, alpha: Tensor, source: Batch, task: Task) -> Tensor:
        return alpha / task.sharing.sum(alpha.sum()).clamp_min(torch.finfo(alpha.dtype).tiny)


@dataclass(frozen=True)
class label_doubt(SourceLoss):
    """A weight as the prior probability that a label is right, updated by the network's own prediction.

        d = −log(α·p + (1 − α)/K)          p = exp(−ℓ), the network's probability of the label; else all K equal
        ∂d = w ∂ℓ,  w = α·p/(α·p + (1 − α)/K)

    normalize: Σw∂ℓ/Σw instead of the gradient of mean(d).

    w is the posterior probability of the label given the network's prediction. Where the network disagrees, a little
    doubt is enough to take an example out of the training; at α = 1 there is no doubt, and w = 1. An example with a
    small posterior cannot hurt, so its weight and score say less about it.
    """

    normalize: bool = True

    def losses(self, plain: Losses, task: Task, weights: Weights) -> Losses:
        own = task.losses
        if isinstance(own, NoisyLosses | TransferLosses):
            loss = own.source_loss if isinstance(own, TransferLosses) else own.loss
            known = loss is cross_entropy
        else:
            known = isinstance(own, LoopLosses)  # a loop that names its classes says that its loss is this one
        if task.classes is None or not known:
            raise UsageError(
                "label_doubt needs class indices as source labels and cross-entropy as their loss: leave it out."
            )
        return DoubtedLosses(plain, weights, task.classes)

    def coefficients(self, alpha: Tensor, source: Batch, task: Task) -> Tensor:
        return alpha.new_full((), 1.0 / source.total).expand_as(alpha)  # one for all: α is in the losses themselves

    def finish(self, passes: Passes, losses: Losses, source: Batch, task: Task) -> Passes:
        """From the gradient of mean(d) to Σw∂ℓ/Σw, and from alignments of d to those of ℓ."""
        assert isinstance(losses, DoubtedLosses)
        w = losses.posterior(passes.source_losses, source)
        gradient = passes.source_gradient
        if self.normalize:
            gradient = times(gradient, 1.0 / task.sharing.mean(w, source))
        aligned = passes.alignment / w if len(passes.alignment) else passes.alignment
        return replace(passes, source_gradient=gradient, alignment=aligned)


@dataclass(frozen=True)
class DoubtedLosses:
    """The losses of a task, with the labels of the source doubted as far as its weights say."""

    plain: Losses
    weights: Weights
    classes: int

    def source(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._doubted(self.plain.source(model, batch), batch)

    def target(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.plain.target(model, batch)

    def can_join(self, source: Batch, target: Batch) -> bool:
        return self.plain.can_join(source, target)

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        losses = self.plain.joint(model, source, target)
        return torch.cat([self._doubted(losses[: len(source)], source), losses[len(source) :]])

    def posterior(self, doubted: Tensor, batch: Batch) -> Tensor:
        """w of every example, from what ``source`` returned."""
        prior = self._prior(batch, doubted.dtype)
        return -torch.expm1(self._log_other(prior) + doubted).clamp_max(-_SMALLEST_POSTERIOR)

    @property
    def factor(self) -> Tensor | None:
        """What a GradScaler has multiplied the losses by."""
        return getattr(self.plain, "factor", None)

    def _doubted(self, losses: Tensor, batch: Batch) -> Tensor:
        prior = self._prior(batch, losses.dtype)
        if self.factor is not None:
            losses = losses / self.factor
        doubted = -torch.logaddexp(prior.log() - losses, self._log_other(prior))
        return doubted if self.factor is None else doubted * self.factor

    def _prior(self, batch: Batch, dtype: torch.dtype) -> Tensor:
        return self.weights.values[batch.index].to(dtype).clamp_min(_SMALLEST_PRIOR)

    def _log_other(self, prior: Tensor) -> Tensor:
        """log((1 − α)/K)."""
        return (1.0 - prior).clamp_min(torch.finfo(prior.dtype).tiny).log() - math.log(self.classes)


@dataclass(frozen=True)
class target_share(Piece):
    """Mix the target gradient into the gradient of θ: (1 − share)·Qα_b + share·∂L_t/∂θ.

    The paper's target reaches θ through the weights alone; a share makes use of clean labels that are too many to be
    memorised.
    """

    share: float

    slot: ClassVar[str] = "gradients"

    def __post_init__(self) -> None:
        if not 0.0 < self.share < 1.0:
            raise UsageError(f"share of target_share must lie in (0, 1), got {self.share}: leave the piece out for 0.")

    def update(self, value: dict[str, Tensor], state: State, step: Step) -> dict[str, Tensor]:
        assert step.passes is not None
        of_target = step.passes.target_gradient
        both = [name for name in value if name in of_target and name in step.task.shared]
        mixed = torch._foreach_lerp([value[n] for n in both], [of_target[n] for n in both], self.share) if both else ()
        return value | dict(zip(both, mixed, strict=True))
