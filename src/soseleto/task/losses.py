"""The losses of the two modes, on a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.data import structure
from soseleto.data.batches import Batch
from soseleto.data.structure import Inputs
from soseleto.engines.interface import as_loss_vector
from soseleto.errors import UsageError

# loss(outputs, labels) -> (B,); outputs are what the model returns
Loss = Callable[[Any, Tensor], Tensor]


def cross_entropy(outputs: Any, labels: Tensor) -> Tensor:
    """One cross-entropy per example; of ``outputs.logits`` where the model returns an object."""
    return F.cross_entropy(structure.scores_of(outputs), labels, reduction="none")


def squared_error(outputs: Any, labels: Tensor) -> Tensor:
    """One mean squared error per example; of ``outputs.logits`` where the model returns an object."""
    outputs = structure.scores_of(outputs)
    if labels.numel() != outputs.numel() or labels.shape[:1] != outputs.shape[:1]:
        raise UsageError(
            f"squared_error has outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)}: "
            "give the model as many outputs as an example has labels."
        )
    labels = labels.reshape(outputs.shape)
    return (outputs - labels).square().flatten(1).mean(1) if outputs.ndim > 1 else (outputs - labels).square()


def in_units(variance: float) -> Loss:
    """``squared_error`` divided by the variance of the labels, so that rates do not depend on their unit."""

    @wraps(squared_error)  # a run's evaluation is in the labels' own unit
    def scaled(outputs: Any, labels: Tensor) -> Tensor:
        return squared_error(outputs, labels) / variance

    return scaled


@dataclass(frozen=True)
class Precision:
    """The precision in which the model runs: its own, or autocast's. Losses are computed in float32 or better."""

    autocast: torch.dtype | None = None

    def __call__(self, module: Any, inputs: Inputs) -> Any:
        if self.autocast is None:
            return structure.call(module, inputs)
        # Cast once instead of at every use.
        inputs = structure.change(lambda t: t.to(self.autocast) if t.is_floating_point() else t, inputs)
        with torch.autocast(structure.tensors(inputs)[0].device.type, self.autocast):
            outputs = structure.call(module, inputs)
        return structure.change(lambda t: t.float() if t.dtype == self.autocast else t, outputs)


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
        return structure.of_one_form((source.inputs, source.labels), (target.inputs, target.labels))

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        labels = torch.cat([source.labels, target.labels])
        return _vector(self.loss(self.precision(model, joined_inputs(source, target)), labels))


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
        return structure.of_one_form(source.inputs, target.inputs)

    def joint(self, model: Any, source: Batch, target: Batch) -> Tensor:
        # Both heads run on every row, so that every layer has the rows of the whole batch; a head is cheap.
        features = self.precision(model.trunk, joined_inputs(source, target))
        n = len(source)
        of_source = _vector(self.source_loss(self.precision(model.source_head, features)[:n], source.labels))
        of_target = _vector(self.target_loss(self.precision(model.target_head, features)[n:], target.labels))
        return torch.cat([of_source, of_target])


def joined_inputs(source: Batch, target: Batch) -> Inputs:
    """The inputs of both batches, source first."""
    return structure.concatenate([source.inputs, target.inputs])


def _with_head(model: Any, head: str) -> Callable[..., Tensor]:
    return lambda *inputs, **named: getattr(model, head)(model.trunk(*inputs, **named))


_vector = partial(as_loss_vector, differentiable=False)  # evaluations have no gradient
