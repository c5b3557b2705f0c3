"""For methods that begin on clean examples alone: those steps, and what they tell of the noise.

A classifier that has seen no noisy label answers on both sides. How its answers go with right labels on the one and
with noisy labels on the other tells the noise (``noise_matrix.from_confusions``), long before it is a good classifier.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.batch import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.noise_matrix import from_confusions, label_counts
from soseleto.methods.state import PhasedState, class_scores


@dataclass(kw_only=True)
class CleanFirstState(PhasedState):
    """clean, noisy: confusion matrices (answer, label), summed over the second half of the first phase."""

    clean: Tensor = field(default_factory=lambda: torch.zeros(()))
    noisy: Tensor = field(default_factory=lambda: torch.zeros(()))

    @property
    def capturable(self) -> bool:
        return not self.in_first_phase  # whose matrices grow from step to step

    def state(self) -> dict[str, Any]:
        return {**super().state(), "clean": self.clean, "noisy": self.noisy}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.clean, self.noisy = (state[name].to(self.task.device) for name in ("clean", "noisy"))

    def clean_step(self, source: Batch, target: Batch, name: str, *, compare: bool = True) -> dict[str, Tensor]:
        """One step on the target alone; with ``compare`` the source is looked at for the noise, not trained on."""
        scores = class_scores(self.task, self.task.model, target, name)
        losses = F.cross_entropy(scores, target.labels, reduction="none")
        self.task.guard("target", losses.detach(), target.index)
        if compare and self.steps >= self.first_phase // 2:
            with torch.no_grad():
                answers = class_scores(self.task, self.task.model, source, name).softmax(1)
            self.clean = self.clean + label_counts(scores.detach().softmax(1), target.labels)
            self.noisy = self.noisy + label_counts(answers, source.labels)
        self.take(gradient(losses.mean(), trainable(self.task.model)))
        return {"target_loss": losses.detach().mean()}

    def noise(self) -> Tensor:
        """Q, as far as the first phase tells it."""
        return from_confusions(self.clean, self.noisy)
