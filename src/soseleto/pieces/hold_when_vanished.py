"""Hold the weights once the target loss has vanished: its gradient, and so every alignment, carries no signal then."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from soseleto.errors import UsageError
from soseleto.task.piece import Alignment, Piece, State, Step
from soseleto.task.task import Task

_NEW = 0.1  # weight of a batch in the running mean of the target loss


@dataclass(frozen=True)
class hold_when_vanished(Piece):
    """Move no weight while the running target loss is below ``share`` of its first value; scores are still updated."""

    share: float = 1e-3

    slot: ClassVar[str] = "alignment"

    def __post_init__(self) -> None:
        if not self.share > 0:
            raise UsageError(f"share of hold_when_vanished must be above 0, got {self.share}: leave the piece out.")

    def init(self, task: Task) -> State:
        numbers = {"target_loss": 0.0, "first_target_loss": 0.0, "alive": 1.0}
        return {name: torch.full((), value, device=task.device) for name, value in numbers.items()}

    def observe(self, state: Any, step: Step) -> None:
        assert step.target_loss is not None
        target_loss = step.target_loss.to(torch.float32)
        target_loss = torch.where(target_loss.isfinite(), target_loss, state["target_loss"])
        first = state["first_target_loss"] == 0  # none observed yet
        for loss in (state["target_loss"], state["first_target_loss"]):
            torch.where(first, target_loss, loss, out=loss)
        state["target_loss"].lerp_(target_loss, _NEW)
        torch.gt(state["target_loss"], self.share * state["first_target_loss"], out=state["alive"])

    def update(self, value: Alignment, state: Any, step: Step) -> Alignment:
        return replace(value, gate=value.gate * state["alive"])
