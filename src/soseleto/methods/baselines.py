"""What SOSELETO is compared with: training on the source, the target, both at once, and one after the other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.errors import UsageError
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


@dataclass(kw_only=True)
class PhasedState(State):
    """For methods with two phases: the first ``first_phase`` steps, and the steps after them."""

    first_phase: int

    @property
    def in_first_phase(self) -> bool:
        return self.steps < self.first_phase

    @property
    def kind(self) -> bool:
        """Steps of one kind do the same work, so that one captured CUDA graph serves them all."""
        return self.in_first_phase


@dataclass(frozen=True, kw_only=True)
class FineTuning:
    """Train on the source, then continue on the target; in transfer mode with the target's own head.

    first  θ, φˢ ← θ, φˢ − λ_p · mean_j ∂ℓ_j/∂(θ, φˢ)
    then   θ, φᵗ ← θ, φᵗ − λ_p · ∂L_t/∂(θ, φᵗ)

    pretrain: the share of all steps that train on the source.
    """

    pretrain: float = 0.5

    name = "fine_tuning"

    def __post_init__(self) -> None:
        require_share("pretrain", self.pretrain)

    def init(self, task: Task) -> PhasedState:
        return PhasedState.start(task, first_phase=round(self.pretrain * task.steps))

    def step(self, state: PhasedState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        side, batch = ("source", source) if state.in_first_phase else ("target", target)
        loss = checked_losses(state.task, side, batch).mean()
        state.take(gradient(loss, trainable(state.task.model)))
        return {f"{side}_loss": loss.detach()}


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
