"""What the methods share that train on several views of every image: their inputs, class scores and checks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from soseleto.data import structure
from soseleto.data.batches import Batch
from soseleto.data.structure import Inputs, scores_of
from soseleto.errors import UsageError
from soseleto.methods.state import require_noisy
from soseleto.task.losses import FULL, cross_entropy
from soseleto.task.task import Task


def require_classes(task: Task, name: str) -> int:
    """The number of classes; raises where source and target are not labelled with the same ones."""
    require_noisy(task, name)
    if task.classes is None or getattr(task.losses, "loss", None) is not cross_entropy:
        raise UsageError(f"the method {name!r} is for class labels and cross-entropy: leave it out.")
    return task.classes


def views_of(batch: Batch, name: str) -> tuple[Inputs, list[Inputs]]:
    """The weak view and the strong ones."""
    if not isinstance(batch.inputs, tuple | list):
        raise UsageError(f"the method {name!r} needs a weak and a strong view of every image: say augment=Views().")
    weak, *strong = batch.inputs
    return weak, strong


def two_views(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """The weak view and the only other one."""
    first, others = views_of(batch, name)
    if len(others) != 1:
        raise UsageError(
            f"the method {name!r} takes two views of every image, got {1 + len(others)}: say Views(count=1)."
        )
    return first, others[0]


def view_scores(task: Task, model: nn.Module, inputs: Inputs) -> Tensor:
    """(B, C), in float32 or better."""
    scores: Tensor = scores_of(getattr(task.losses, "precision", FULL)(model, inputs))
    if scores.shape[1] != task.classes:
        raise UsageError(
            f"the model has {scores.shape[1]} outputs, but the source has {task.classes} classes: "
            "give a model with one output per class."
        )
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def joint_scores(task: Task, model: nn.Module, parts: Sequence[Inputs]) -> Tensor:
    """(B, C) of all parts, in one pass, so that BatchNorm sees them together; texts of another width in their own."""
    if all(structure.of_one_form(parts[0], part) for part in parts):
        return view_scores(task, model, structure.concatenate(parts))
    return torch.cat([view_scores(task, model, part) for part in parts])
