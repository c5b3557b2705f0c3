"""What the baselines and the strong recipe share: checks, losses, and inputs in several views."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from soseleto.data import structure
from soseleto.data.batches import Batch
from soseleto.data.structure import Inputs, scores_of
from soseleto.errors import UsageError
from soseleto.task.losses import FULL, cross_entropy
from soseleto.task.task import Task


def require_noisy(task: Task, name: str) -> None:
    """Raise in transfer mode, for a method with one classifier for source and target."""
    if task.target_head:
        raise UsageError(f"the method {name!r} has no target head of its own: say mode='noisy', or use another method.")


def require_share(name: str, value: float) -> None:
    if not 0.0 <= value <= 1.0:
        raise UsageError(f"{name} must lie in [0, 1], got {value!r}.")


def checked_losses(task: Task, side: str, batch: Batch) -> Tensor:
    """The losses (B,) of "source" or "target" with their graph; raises if one is not finite."""
    losses: Tensor = getattr(task.losses, side)(task.model, batch)
    task.guard(side, losses.detach(), batch.index)
    return losses


def shared_gradient(task: Task, side: str, batch: Batch, share: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """This process's losses of one side, checked, and the gradient of ``share`` times the whole batch's mean loss."""
    c = torch.full((len(batch),), share / batch.total, device=task.device, dtype=torch.float64)
    losses, gradients = task.sharing.gradient(task.model, getattr(task.losses, side), batch, c)
    task.guard(side, losses, batch.index)
    return losses, gradients


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
