"""Noisy and clean mixed: each step trains on the source batch and the target batch together.

    θ ← θ − λ_p ∂/∂θ [ (1 − s)·mean_j ℓ_j + s·L_t ],      s = T/(B + T) by default

With s = T/(B + T) every example of the joint batch has the same weight. In transfer mode both heads are trained.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.state import State, require_share, shared_gradient
from soseleto.task.task import Task


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """target_share: the target's share s of the loss; ``None`` gives every example of both batches the same weight."""

    target_share: float | None = None

    name = "mixed"
    shares_work = True

    def __post_init__(self) -> None:
        if self.target_share is not None:
            require_share("target_share", self.target_share)

    def init(self, task: Task) -> State:
        return State.start(task)

    def step(self, state: State, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        task, share = state.task, share_of_target(self.target_share, source, target)
        if task.sharing.nothing:
            of_source, of_target = _losses(task, source, target)
            loss = (1.0 - share) * of_source.mean() + share * of_target.mean()
            state.take(gradient(loss, trainable(task.model)))
        else:
            of_source, found = shared_gradient(task, "source", source, 1.0 - share)
            of_target, more = shared_gradient(task, "target", target, share)
            both = found.keys() & more.keys()
            state.take(found | more | {name: found[name] + more[name] for name in both})
        means = task.sharing.mean(of_source.detach(), source), task.sharing.mean(of_target.detach(), target)
        return dict(zip(("source_loss", "target_loss"), means, strict=True))


def share_of_target(given: float | None, source: Batch, target: Batch) -> float:
    """s as given, or such that every example of both batches has the same weight."""
    return target.total / (source.total + target.total) if given is None else given


def _losses(task: Task, source: Batch, target: Batch) -> tuple[Tensor, Tensor]:
    """Source and target losses, from one forward pass if the batches can be joined."""
    if task.losses.can_join(source, target):
        joint = task.losses.joint(task.model, source, target)
        of_source, of_target = joint[: len(source)], joint[len(source) :]
    else:
        of_source, of_target = task.losses.source(task.model, source), task.losses.target(task.model, target)
    task.guard("source", of_source.detach(), source.index)
    task.guard("target", of_target.detach(), target.index)
    return of_source, of_target
