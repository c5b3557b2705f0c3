"""How weights and losses of a source batch make one loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.task.piece import Losses, Passes
from soseleto.task.task import Task
from soseleto.weights import Weights


@dataclass(frozen=True)
class mean:
    """mean(αℓ): the paper's."""

    slot: ClassVar[str] = "source_loss"
    needs_losses: ClassVar[bool] = False

    def losses(self, plain: Losses, task: Task, weights: Weights) -> Losses:
        return plain

    def coefficients(self, alpha: Tensor, source: Batch, task: Task) -> Tensor:
        return alpha / source.total

    def finish(self, passes: Passes, losses: Losses, source: Batch, task: Task) -> Passes:
        return passes


@dataclass(frozen=True)
class normalized(mean):
    """Σαℓ/Σα: small weights do not lower the learning rate."""

    def coefficients(self, alpha: Tensor, source: Batch, task: Task) -> Tensor:
        return alpha / task.sharing.sum(alpha.sum()).clamp_min(torch.finfo(alpha.dtype).tiny)
