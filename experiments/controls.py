"""Controls: what a weight of its own for every example is worth.

Each control learns its weights as usual and applies other ones: those of other examples, or their mean. Those of the
strong recipe put the mean weight of the batch, or that of another example, for v in

    s = v·label + (1 − v)·q

The teacher's answer q may be the label, so that a right label that is doubted is not lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soseleto.algorithm import Soseleto
from soseleto.data import generator
from soseleto.methods.strong import Strong
from soseleto.methods.teacher import SMALLEST
from soseleto.task.task import Task
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class ShuffledWeights(Soseleto):
    """SOSELETO whose weights act on other, random examples than those they were learned for."""

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


@dataclass(frozen=True, kw_only=True)
class FrozenStrong(Strong):
    """Every label of a batch has the batch's mean weight.

    others: the rest goes to the teacher's other classes, as in the recipe, which turns right labels into wrong ones
    """

    others: bool = False

    name = "strong_frozen"

    def doubted(self, r: Tensor, q: Tensor, labels: Tensor) -> Tensor:
        v = self.weights((r * labels).sum(1, keepdim=True))
        answer = (r + SMALLEST) * (1.0 - labels) if self.others else q
        return v * labels + (1.0 - v) * answer / answer.sum(1, keepdim=True)

    def weights(self, own: Tensor) -> Tensor:
        """v (B, 1)."""
        return own.mean(0, keepdim=True).expand_as(own)


@dataclass(frozen=True, kw_only=True)
class ShuffledStrong(FrozenStrong):
    """Every label has the weight of another example of its batch, whose order is random."""

    name = "strong_shuffled"

    def weights(self, own: Tensor) -> Tensor:
        return own.roll(1, 0)
