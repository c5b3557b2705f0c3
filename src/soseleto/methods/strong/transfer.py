"""StrongTransfer: the strong recipe where the target has classes of its own (transfer mode).

    q = sharpened teacher(weak view), by the head of the image's side         a running mean of the network: teacher.py
    y = (1 − g)·label + g·q                                                   for source and target
    one step of Algorithm 1 on (strong view, y): weights, alignments and both heads as in transfer mode

H(y, p) = (1 − g)·H(label, p) + g·H(q, p) is the loss of the label and the consistency of weak and strong view. Since
labels of another task are not wrong, they are not doubted: what a source image is worth to the target is its weight,
which multiplies both terms. g rises from 0, since the first teachers know nothing. Nothing is mixed: two images have
two weights, and two sides two sets of classes. After the last step the model is the teacher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.algorithm import Soseleto
from soseleto.data.batches import Batch
from soseleto.errors import UsageError
from soseleto.methods.from_views import two_views
from soseleto.methods.state import require_share, require_transfer
from soseleto.methods.strong.judgement import one_hot, sharpened
from soseleto.methods.strong.teacher import Teacher, no_steps
from soseleto.methods.wrappers.inner import WrapperState
from soseleto.task.losses import FULL, cross_entropy
from soseleto.task.task import Task, state_of


@dataclass(frozen=True, kw_only=True)
class StrongTransfer:
    """The strong recipe in transfer mode: SOSELETO on strong views, whose labels a teacher's answers are mixed into.

    selection: what learns the weights
    teacher: decay d of the running mean of the network
    consistency: g, the share of the teacher's answers in what is learned
    temperature: of sharpening the answers
    ramp: the share of all steps over which g rises
    """

    selection: Soseleto = field(default_factory=Soseleto)
    teacher: float = 0.999
    consistency: float = 0.5
    temperature: float = 0.5
    ramp: float = 0.05

    name = "strong_transfer"
    takes_views = True

    def __post_init__(self) -> None:
        for share in ("teacher", "consistency", "ramp"):
            require_share(share, getattr(self, share))
        if not self.temperature > 0:
            raise UsageError(f"temperature must be above 0, got {self.temperature}: 0.5 sharpens, 1 does not.")

    def init(self, task: Task) -> StrongTransferState:
        require_transfer(task, self.name)
        losses = [getattr(task.losses, f"{side}_loss", None) for side in ("source", "target")]
        if any(loss is not cross_entropy for loss in losses):
            raise UsageError(f"the method {self.name!r} is for class labels and cross-entropy: leave it out.")
        selected = self.selection.init(replace(task, classes=None))  # its labels are shares of classes
        return StrongTransferState(task, selected, Teacher(task.model, self.teacher), no_steps(task.device))

    def step(
        self, state: StrongTransferState, source: Batch, target: Batch, *, monitor: bool = False
    ) -> dict[str, Tensor]:
        learned = [self._learned(state, side, batch) for side, batch in (("source", source), ("target", target))]
        numbers = self.selection.step(state.inner, *learned, monitor=monitor)
        state.follow()
        return numbers

    @torch.no_grad()
    def _learned(self, state: StrongTransferState, side: str, batch: Batch) -> Batch:
        """The strong view, and y (B, C) for its labels."""
        weak, strong = two_views(batch, self.name)
        scores = state.answers(side, weak)
        labels = one_hot(batch.labels, scores.shape[1]).to(scores.dtype)
        ramp = max(1.0, self.ramp * state.task.steps)
        risen = (state.taken / ramp).clamp(max=1.0) if self.ramp else torch.ones_like(state.taken)
        g = self.consistency * risen
        given = torch.lerp(labels, sharpened(scores.softmax(1), self.temperature), g.to(scores.dtype))
        return replace(batch, inputs=strong, labels=given)


@dataclass
class StrongTransferState(WrapperState):
    """The state of the selection, and the teacher; ``taken`` counts the steps on the device."""

    teacher: Teacher
    taken: Tensor

    @property
    def answering(self) -> nn.Module:
        """The network to evaluate: the teacher, whose values the model has after the last step."""
        return self.task.model if self._has_ended else self.teacher.model

    @property
    def _has_ended(self) -> bool:
        return bool(self.inner.taken == self.task.steps)

    def answers(self, side: str, weak: Tensor) -> Tensor:
        """The teacher's scores (B, C) by the head of a side, in float32 or better."""
        model: Any = self.teacher.model
        precision = getattr(self.task.losses, "precision", FULL)
        scores: Tensor = precision(getattr(model, f"{side}_head"), precision(model.trunk, weak))
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def follow(self) -> None:
        """After the network has moved: move the teacher."""
        self.teacher.follow(self.taken)
        self.taken += 1

    def after_step(self) -> None:
        """After the last step the network gets the teacher's values."""
        if self._has_ended:
            self.teacher.replace(self.task.model)

    def state(self) -> dict[str, Any]:
        return {"inner": state_of(self.inner), "teacher": self.teacher.state(), "steps": self.taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state(state["inner"])
        self.teacher.load_state(state["teacher"])
        self.taken.copy_(state["steps"])
