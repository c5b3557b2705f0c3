"""Class scores of rivals that take the outputs as the logits of a softmax."""

from __future__ import annotations

from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.data.structure import scores_of
from soseleto.errors import UsageError
from soseleto.task.losses import FULL, joined_inputs
from soseleto.task.task import Task


def class_scores(task: Task, model: nn.Module, batch: Batch, name: str) -> Tensor:
    """The model's outputs (B, classes), for a method that takes them as the logits of a softmax."""
    outputs = scores_of(getattr(task.losses, "precision", FULL)(model, batch.inputs))
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or batch.labels.is_floating_point():
        shape = getattr(outputs, "shape", type(outputs).__name__)
        raise UsageError(
            f"the method {name!r} needs class scores (B, classes) and class indices, got outputs of {shape} and "
            f"labels of {batch.labels.dtype}: use it for classification."
        )
    return outputs


def scores_of_both(task: Task, source: Batch, target: Batch, name: str) -> tuple[Tensor, Tensor]:
    """``class_scores`` of the two batches, from one forward pass."""
    whole = Batch(source.index, joined_inputs(source, target), source.labels)
    scores = class_scores(task, task.model, whole, name)
    return scores[: len(source)], scores[len(source) :]
