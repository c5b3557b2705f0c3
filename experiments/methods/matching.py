"""Matching Networks (Vinyals et al. 2016): classify by attention over labelled examples.

    a(x, x_i) = softmax_i(scale · cos(f(x), f(x_i))),      p(y | x) = Σ_i a(x, x_i) 1[y_i = y]

f is the trunk. Training is by episodes: in each source batch every example is the query once, with the others as its
support set. Prediction attends to the labelled target, whose features the target head ``Attention`` stores. With
``fine_tune`` the last share of the steps takes its episodes from the target batches instead.

Deviations: no full context embeddings; an episode is a whole batch with whatever classes it has; the similarities are
scaled, since a softmax of bare cosines is nearly flat. The method makes no use of unlabelled data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.errors import UsageError
from soseleto.methods.baselines import PhasedState
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.task.losses import FULL, joined_inputs
from soseleto.task.task import Task

_SMALLEST = 1e-6  # probability of a class without an example in the support set


def require_transfer(task: Task, name: str) -> None:
    """Raise in noisy mode, for a method that compares features and so needs to know the model's trunk."""
    if not isinstance(task.model, TrunkAndHeads):
        raise UsageError(f"the method {name!r} compares the features of a trunk: say mode='transfer'.")


class Attention(nn.Module):
    """A head without parameters: it stores the features of ``examples`` labelled examples and attends to them.

    Its outputs are log-probabilities. A stored feature is a running mean over visits, so that it follows the trunk and
    averages over augmentations.
    """

    keys: Tensor
    labels: Tensor

    def __init__(self, examples: int, width: int, classes: int, *, scale: float = 10.0, memory: float = 0.9) -> None:
        super().__init__()
        self.classes, self.scale, self.memory = classes, scale, memory
        self.register_buffer("keys", torch.zeros(examples, width))
        self.register_buffer("labels", torch.zeros(examples, dtype=torch.int64))

    def remember(self, index: Tensor, features: Tensor, labels: Tensor) -> None:
        new = F.normalize(features.detach(), dim=1).to(self.keys.dtype)
        self.keys[index] = torch.lerp(new, self.keys[index], self.memory)
        self.labels[index] = labels

    def forward(self, features: Tensor) -> Tensor:
        similar = self.scale * cosines(features, self.keys.to(features.dtype))
        votes = similar.softmax(1) @ F.one_hot(self.labels, self.classes).to(similar.dtype)
        return votes.clamp_min(_SMALLEST).log()


@dataclass(frozen=True, kw_only=True)
class MatchingNetworks:
    """fine_tune: the last share of all steps, whose episodes are of the target; scale: of the cosines."""

    fine_tune: float = 0.0
    scale: float = 10.0

    name = "matching_networks"

    def init(self, task: Task) -> PhasedState:
        require_transfer(task, self.name)
        if not isinstance(task.model.target_head, Attention):
            raise UsageError(
                f"the method {self.name!r} attends to the labelled target: "
                "write heads=Heads(target=Attention(examples, width, classes))."
            )
        return PhasedState.start(task, first_phase=round((1.0 - self.fine_tune) * task.steps))

    def step(self, state: PhasedState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        task = state.task
        model: Any = task.model
        features = getattr(task.losses, "precision", FULL)(model.trunk, joined_inputs(source, target))
        of_source, of_target = features[: len(source)], features[len(source) :]
        if state.in_first_phase:
            side, losses = "source", episode(of_source, source.labels, self.scale)
        else:
            side, losses = "target", episode(of_target, target.labels, self.scale)
        task.guard("target", of_target.detach().sum(1), target.index)
        task.guard(side, losses.detach(), (source if side == "source" else target).index)
        model.target_head.remember(target.index, of_target, target.labels)
        state.take(gradient(losses.mean(), trainable(task.model)))
        return {f"{side}_loss": losses.detach().mean()}


def episode(features: Tensor, labels: Tensor, scale: float) -> Tensor:
    """−log p(y | x) of every example (B,), with attention to the other examples of its batch."""
    similar = scale * cosines(features, features)
    similar = similar - torch.diag(torch.full_like(similar[0], torch.inf))
    same = (labels[:, None] == labels[None, :]).to(similar.dtype)
    return -(similar.softmax(1) * same).sum(1).clamp_min(_SMALLEST).log()


def cosines(one: Tensor, other: Tensor) -> Tensor:
    """Cosine similarities (N, M) of features (N, width) and (M, width)."""
    return F.normalize(one, dim=1) @ F.normalize(other, dim=1).T
