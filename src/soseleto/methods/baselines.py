"""What SOSELETO is compared with: training on the source, on the target, and on both at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.state import checked_losses, require_noisy, require_share, shared_gradient
from soseleto.task.task import State, Task


class _OneSide:
    """θ ← θ − λ_p · ∂/∂θ of one side's mean loss."""

    side: ClassVar[str]
    shares_work = True

    def init(self, task: Task) -> State:
        return State.start(task)

    def step(self, state: State, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        batch = source if self.side == "source" else target
        losses, gradients = shared_gradient(state.task, self.side, batch)
        state.take(gradients)
        return {f"{self.side}_loss": state.task.sharing.mean(losses, batch)}


@dataclass(frozen=True, kw_only=True)
class Ordinary(_OneSide):
    """Ordinary training on the source, as if every label were right; the target is not used."""

    name = "ordinary"
    side = "source"

    def init(self, task: Task) -> State:
        require_noisy(task, self.name)
        return super().init(task)


@dataclass(frozen=True, kw_only=True)
class TargetOnly(_OneSide):
    """Training on the small trusted target alone, for as many steps as every other method."""

    name = "target_only"
    side = "target"


@dataclass(frozen=True, kw_only=True)
class Mixed:
    """Each step trains on the source batch and the target batch together; in transfer mode it trains both heads.

    θ ← θ − λ_p ∂/∂θ [ (1 − s)·mean_j ℓ_j + s·L_t ]

    target_share: the target's share s of the loss; ``None`` is T/(B + T), the same weight for every example.
    """

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
            source_losses, target_losses = _losses(task, source, target)
            loss = (1.0 - share) * source_losses.mean() + share * target_losses.mean()
            state.take(gradient(loss, trainable(task.model)))
        else:
            source_losses, of_source = shared_gradient(task, "source", source, 1.0 - share)
            target_losses, of_target = shared_gradient(task, "target", target, share)
            both = of_source.keys() & of_target.keys()
            state.take(of_source | of_target | {name: of_source[name] + of_target[name] for name in both})
        return {
            "source_loss": task.sharing.mean(source_losses.detach(), source),
            "target_loss": task.sharing.mean(target_losses.detach(), target),
        }


def share_of_target(share: float | None, source: Batch, target: Batch) -> float:
    """``share``, or such that every example of both batches has the same weight."""
    return target.total / (source.total + target.total) if share is None else share


def _losses(task: Task, source: Batch, target: Batch) -> tuple[Tensor, Tensor]:
    """Source and target losses, from one forward pass if the batches can be joined."""
    if not task.losses.can_join(source, target):
        return checked_losses(task, "source", source), checked_losses(task, "target", target)
    joint = task.losses.joint(task.model, source, target)
    of_source, of_target = joint[: len(source)], joint[len(source) :]
    task.guard("source", of_source.detach(), source.index)
    task.guard("target", of_target.detach(), target.index)
    return of_source, of_target
