"""Two networks that learn from each other: the model of the task, and one like it with other initial values."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.data.structure import scores_of
from soseleto.errors import UsageError
from soseleto.methods.teacher import views_of


class Networks(nn.Module):
    """Both networks; the scores of the two together are the mean of theirs."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, anew(first)

    def forward(self, inputs: Tensor) -> Tensor:
        mean: Tensor = (scores_of(self.first(inputs)) + scores_of(self.second(inputs))) / 2
        return mean

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.first, self.second


def anew(model: nn.Module) -> nn.Module:
    """A copy in training mode whose layers have drawn their initial values again."""
    made = copy.deepcopy(model).train()
    for module in made.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return made


def two_views(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """The weak view and the only other one."""
    first, others = views_of(batch, name)
    if len(others) != 1:
        raise UsageError(
            f"the method {name!r} takes two views of every image, got {1 + len(others)}: say Views(count=1)."
        )
    return first, others[0]
