"""The teacher: a running mean of the network over the steps, which judges better than the network itself.

    θ' ← θ' + (1 − d_t)(θ − θ'),      d_t = min(d, (1 + t)/(10 + t))

The buffers of BatchNorm are averaged like the parameters; integer buffers are copied. d_t lets the first teachers
follow the network closely, since there is nothing to average yet.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.methods.state import State


class Teacher:
    """A copy of the network in evaluation mode that follows it."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._decay = decay
        self._averaged, self._copied = _pairs(self.model, model)

    @torch.no_grad()
    def follow(self, taken: Tensor) -> None:
        """After a step; ``taken`` is the number of steps before it, on the device."""
        t = taken.double()
        rate = 1.0 - torch.clamp((1.0 + t) / (10.0 + t), max=self._decay)
        means, values = self._averaged
        apart = torch._foreach_sub(values, means)
        torch._foreach_mul_(apart, rate.to(means[0].dtype))
        torch._foreach_add_(means, apart)
        for mine, its in self._copied:
            mine.copy_(its)

    @torch.no_grad()
    def replace(self, model: nn.Module) -> None:
        """Give the network the teacher's values."""
        for mine, its in zip(_tensors(self.model), _tensors(model), strict=True):
            its.copy_(mine)

    def state(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state)


@dataclass(kw_only=True)
class TaughtState(State):
    """The state of a method with a teacher; ``taken`` counts the steps on the device.

    judged: scores of the last source batch, before the step
    """

    teacher: Teacher
    taken: Tensor
    judged: Tensor | None = None

    @property
    def answering(self) -> nn.Module:
        """The network to evaluate: the teacher, whose values the model has after the last step."""
        return self.task.model if self.steps == self.task.steps else self.teacher.model

    def follow(self) -> None:
        """After the network has moved: move the teacher."""
        self.teacher.follow(self.taken)
        self.taken += 1

    def after_step(self) -> None:
        """After the last step the network gets the teacher's values."""
        if self.steps == self.task.steps:
            self.teacher.replace(self.task.model)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "teacher": self.teacher.state(), "taken": self.taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.teacher.load_state(state["teacher"])
        self.taken.copy_(state["taken"])


def no_steps(device: torch.device) -> Tensor:
    """``taken`` before the first step."""
    return torch.zeros((), dtype=torch.int64, device=device)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _pairs(teacher: nn.Module, model: nn.Module) -> tuple[tuple[list[Tensor], list[Tensor]], list[tuple[Tensor, ...]]]:
    """(means, values) of all floating point tensors, and pairs of the others."""
    both = list(zip(_tensors(teacher), _tensors(model), strict=True))
    floating = [pair for pair in both if pair[0].is_floating_point()]
    means, values = [mine.detach() for mine, _ in floating], [its.detach() for _, its in floating]
    return (means, values), [pair for pair in both if not pair[0].is_floating_point()]
