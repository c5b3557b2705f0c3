"""Fine-tuning: training on the source, and then on the target. Other methods with two phases share its state."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.state import checked_losses, require_share
from soseleto.task.task import State, Task


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
