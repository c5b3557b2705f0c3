"""Views of examples without labels, for a method that takes a few of them in every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from soseleto.data.draws import Draws
from soseleto.data.structure import Inputs


@dataclass(frozen=True, eq=False)
class UnlabelledViews:
    """Views of inputs (N, ...), in their order, over and over.

    views: of a batch, as the labelled examples have; prepare: such as a Preprocess, applied to every view
    """

    inputs: Tensor
    views: Callable[[Tensor, Draws], tuple[Tensor, ...]]
    prepare: Callable[[Inputs], Inputs]

    def shuffled(self, device: torch.device) -> UnlabelledViews:
        """On the device, in a random order that is always the same."""
        order = Draws.of(0, torch.arange(len(self.inputs))).uniform(1)[0].argsort(stable=True)
        return replace(self, inputs=self.inputs.cpu()[order].to(device))

    def take(self, step: Tensor, size: int, key: int) -> tuple[Any, ...]:
        """The views of ``size`` inputs; which ones, and their random numbers, follow from step and key alone."""
        device = self.inputs.device
        places = (step * size + torch.arange(size, device=device)) % len(self.inputs)
        # A counter more than the draws of mixing have, which share the key.
        draws = Draws.of(key, places, step.expand(size), torch.ones_like(places))
        made = self.views(self.inputs[places], draws)
        return tuple(map(self.prepare, made))
