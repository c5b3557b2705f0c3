"""A control for any experiment: weights that act on other examples than those they were learned for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soseleto.algorithm import Soseleto
from soseleto.data import generator
from soseleto.task.task import Task
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class ShuffledWeights(Soseleto):
    """A control: SOSELETO learns its weights as usual, but each is applied to another, random example."""

    name = "shuffled_weights"

    def init(self, task: Task) -> Any:
        state = super().init(task)
        state.weights = _Shuffled(len(state.weights), initial=self.initial_weight, device=task.device)
        return state


class _Shuffled(Weights):
    """Weights that are read through a fixed permutation, but updated under their own index."""

    def __init__(self, n: int, *, initial: float = 1.0, device: torch.device | str = "cpu") -> None:
        super().__init__(n, initial=initial, device=device)
        self._other = torch.randperm(n, generator=generator(0, "svhn-mnist/shuffled weights")).to(device)

    def rows(self, index: Tensor) -> Tensor:
        return super().rows(self._other[index])

    def step(self, index: Tensor, change: Tensor, alignment: Tensor, rows: Tensor | None = None) -> Tensor:
        return super().step(index, change, alignment, super().rows(index))
