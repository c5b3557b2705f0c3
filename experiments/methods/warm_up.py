"""Warm-up on noisy and clean examples together, during which the label noise is estimated.

The confusion matrices of one classifier on clean and on noisy labels determine the noise
(``noise_matrix.from_confusions``), long before the classifier is good, and before it has memorised examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.methods.class_scores import scores_of_both
from experiments.methods.noise_matrix import from_confusions, label_counts
from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.baselines import share_of_target
from soseleto.methods.state import PhasedState


@dataclass(kw_only=True)
class MixedFirstState(PhasedState):
    """clean, noisy: confusion matrices (prediction, label), summed over the first phase."""

    clean: Tensor = field(default_factory=lambda: torch.zeros(()))
    noisy: Tensor = field(default_factory=lambda: torch.zeros(()))

    def state(self) -> dict[str, Any]:
        return {**super().state(), "clean": self.clean, "noisy": self.noisy}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.clean, self.noisy = (state[name].to(self.task.device) for name in ("clean", "noisy"))

    def mixed_step(self, source: Batch, target: Batch, share: float | None, name: str) -> dict[str, Tensor]:
        """One step of ``mixed`` training, whose predictions are added to the confusion matrices."""
        of_source, of_target = scores_of_both(self.task, source, target, name)
        source_loss = F.cross_entropy(of_source, source.labels, reduction="none")
        target_loss = F.cross_entropy(of_target, target.labels, reduction="none")
        self._count(of_target.detach().softmax(1), target.labels, of_source.detach().softmax(1), source.labels)
        return self.both_step(source, target, source_loss, target_loss, share)

    def _count(self, on_clean: Tensor, right: Tensor, on_noisy: Tensor, noisy: Tensor) -> None:
        """Add predictions to the matrices, in place."""
        if self.clean.ndim == 0:
            self.clean, self.noisy = (on_clean.new_zeros(2 * on_clean.shape[1:]) for _ in range(2))
        self.clean.add_(label_counts(on_clean, right))
        self.noisy.add_(label_counts(on_noisy, noisy))

    def both_step(
        self, source: Batch, target: Batch, source_loss: Tensor, target_loss: Tensor, share: float | None
    ) -> dict[str, Tensor]:
        """A step on (1 − s)·mean source loss + s·mean target loss."""
        self.task.guard("source", source_loss.detach(), source.index)
        self.task.guard("target", target_loss.detach(), target.index)
        s = share_of_target(share, source, target)
        loss = (1.0 - s) * source_loss.mean() + s * target_loss.mean()
        self.take(gradient(loss, trainable(self.task.model)))
        return {"source_loss": source_loss.detach().mean(), "target_loss": target_loss.detach().mean()}

    def after_step(self) -> None:
        """After the first phase, begin the second; nothing is known about the noise if all its steps were undone."""
        if self.steps == self.first_phase and bool(self.clean.any()):
            self.begin(self.noise().to(self.task.device))

    def begin(self, noise: Tensor) -> None:
        """Begin the second phase with an estimate of Q."""
        raise NotImplementedError

    def noise(self) -> Tensor:
        """The estimate of Q from the first phase."""
        return from_confusions(self.clean, self.noisy)
