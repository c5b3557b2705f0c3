"""Two kinds of view of every image: a weak one to judge it by and strong ones to learn from."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from soseleto.data.augment import Augment
from soseleto.data.draws import Draws
from soseleto.data.feature_views import FeatureViews
from soseleto.data.strong_augment import StrongAugment
from soseleto.data.token_views import TokenViews
from soseleto.errors import UsageError


@dataclass(frozen=True)
class Views:
    """Makes of a batch of uint8 images the tuple (weak view, strong view, ...), for methods that take such batches.

    crop: of every view, the most that it is shifted, as a share of the shorter side
    flip: of every view, mirror left to right with probability 1/2
    strong: what strong views get besides
    count: strong views of every image, each with its own draws
    """

    crop: float = 0.125
    flip: bool = True
    strong: StrongAugment = field(default_factory=StrongAugment)
    count: int = 2

    def __post_init__(self) -> None:
        if not 0.0 <= self.crop <= 1.0:
            raise UsageError(f"crop of Views must be a share of the side in [0, 1], got {self.crop}: say 0.125.")
        if self.count < 1:
            raise UsageError(f"count of Views must be at least 1, got {self.count}.")

    @property
    def nothing(self) -> bool:
        """Whether batches are returned unchanged; views are always made."""
        return False

    def __call__(self, inputs: Tensor, draws: Draws) -> tuple[Tensor, ...]:
        weak = Augment(crop=round(self.crop * min(inputs.shape[2:])), flip=self.flip)
        return weak(inputs, draws), *(self.strong(weak(inputs, draws), draws) for _ in range(self.count))


AnyViews = Views | TokenViews | FeatureViews
