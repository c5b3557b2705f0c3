"""The losses of the two modes, on a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.data.batch import Batch
from soseleto.engines.contract import as_loss_vector

# loss(outputs, labels) -> (B,)
Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """One cross-entropy per example."""
    return F.cross_entropy(outputs, labels, reduction="none")


def squared_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """One mean squared error per example."""
    labels = labels.reshape(outputs.shape) if labels.numel() == outputs.numel() else labels
    return (outputs - labels).square().flatten(1).mean(1) if outputs.ndim > 1 else (outputs - labels).square()


@dataclass(frozen=True)
class Precision:
    """The precision in which the model runs: its own, or autocast's. Losses are computed in float32 or better."""

    autocast: torch.dtype | None = None

    def __call__(self, module: Any, inputs: Tensor) -> Tensor:
        if self.autocast is None:
            return module(inputs)
        if inputs.is_floating_point():
            inputs = inputs.to(self.autocast)  # cast once instead of at every use
        with torch.autocast(inputs.device.type, self.autocast):
            outputs = module(inputs)
        return outputs.float() if isinstance(outputs, Tensor) and outputs.dtype == self.autocast else outputs


FULL = Precision()


@dataclass(frozen=True)
class NoisyLosses:
    """Noisy-label mode: source and target go through the same model and head."""

    loss: Loss = cross_entropy
    precision: Precision = FULL

    def source(self, model: nn.Module, batch: Batch) -> Tensor:
        return _vector(self.loss(self.precision(model, batch.inputs), batch.labels))

    def target(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.source(model, batch)

    def can_join(self, source: Batch, target: Batch) -> bool:
        return _can_concatenate(source.inputs, target.inputs) and _can_concatenate(source.labels, target.labels)

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        labels = torch.cat([source.labels, target.labels])
        return _vector(self.loss(self.precision(model, torch.cat([source.inputs, target.inputs])), labels))


@dataclass(frozen=True)
class TransferLosses:
    """Transfer mode: one trunk, a head for each side."""

    source_loss: Loss = cross_entropy
    target_loss: Loss = cross_entropy
    precision: Precision = FULL

    def source(self, model: Any, batch: Batch) -> Tensor:
        return _vector(self.source_loss(self.precision(_with_head(model, "source_head"), batch.inputs), batch.labels))

    def target(self, model: Any, batch: Batch) -> Tensor:
        return _vector(self.target_loss(self.precision(_with_head(model, "target_head"), batch.inputs), batch.labels))

    def can_join(self, source: Batch, target: Batch) -> bool:
        return _can_concatenate(source.inputs, target.inputs)

    def joint(self, model: Any, source: Batch, target: Batch) -> Tensor:
        # Both heads run on every row, so that every layer has the rows of the whole batch; a head is cheap.
        features = self.precision(model.trunk, torch.cat([source.inputs, target.inputs]))
        n = len(source)
        of_source = _vector(self.source_loss(self.precision(model.source_head, features)[:n], source.labels))
        of_target = _vector(self.target_loss(self.precision(model.target_head, features)[n:], target.labels))
        return torch.cat([of_source, of_target])


def _with_head(model: Any, head: str) -> Callable[[Tensor], Tensor]:
    return lambda inputs: getattr(model, head)(model.trunk(inputs))


def _can_concatenate(one: Tensor, other: Tensor) -> bool:
    return one.shape[1:] == other.shape[1:] and one.dtype == other.dtype


_vector = partial(as_loss_vector, differentiable=False)  # evaluations have no gradient
