"""Views of every example: a weak one to judge it by and strong ones to learn from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from soseleto.data.augment import Augment, StrongAugment
from soseleto.data.batches import ExampleRandom
from soseleto.data.structure import Inputs
from soseleto.data.text import NO_TOKEN
from soseleto.errors import UsageError

IDS, MASK = "input_ids", "attention_mask"


class AnyViews(ABC):
    """Makes of a batch the tuple (weak view, strong view, ...), for methods that take such batches.

    made_of: what ``kind_of_inputs`` calls the inputs that the views are made of; wanted: the same in words
    """

    made_of: ClassVar[str]
    wanted: ClassVar[str]

    @abstractmethod
    def __call__(self, inputs: Inputs, random: ExampleRandom) -> tuple[Inputs, ...]: ...


@dataclass(frozen=True)
class Views(AnyViews):
    """Views of uint8 images: each is shifted and mirrored at random, and the strong ones are changed further.

    crop: of every view, the most that it is shifted, as a share of the shorter side
    flip: of every view, mirror left to right with probability 1/2
    strong: what strong views get besides
    count: strong views of every image, each with its own draws
    """

    crop: float = 0.125
    flip: bool = True
    strong: StrongAugment = field(default_factory=StrongAugment)
    count: int = 2
    made_of, wanted = "images", "views of images are made of uint8 tensors (C, H, W)"

    def __post_init__(self) -> None:
        _check(self, 0.0 <= self.crop <= 1.0, "crop must be a share of the side in [0, 1], such as 0.125")

    def __call__(self, inputs: Tensor, random: ExampleRandom) -> tuple[Tensor, ...]:
        weak = Augment(crop=round(self.crop * min(inputs.shape[2:])), flip=self.flip)
        return weak(inputs, random), *(self.strong(weak(inputs, random), random) for _ in range(self.count))


@dataclass(frozen=True)
class TokenViews(AnyViews):
    """Views of texts.

    The weak view is the text itself. In a strong view the attention mask is 0 at dropped tokens, so that the model does
    not see them; the others keep their positions, and the first and the last token are never dropped. A network with
    dropout makes further differences: the teacher judges without it.

    Batches are dicts with ``input_ids`` and ``attention_mask`` (N, L), or the tokens that a text column is stored as.

    drop: the probability that a token is dropped
    count: strong views of every text, each with its own draws
    """

    drop: float = 0.1
    count: int = 2
    made_of, wanted = "tokens", "views of texts are made of dicts with input_ids and attention_mask"

    def __post_init__(self) -> None:
        _check(self, 0.0 <= self.drop < 1.0, "drop must be a probability below 1, such as 0.1")

    def __call__(self, inputs: Inputs, random: ExampleRandom) -> tuple[Inputs, ...]:
        known = inputs[MASK] != 0 if isinstance(inputs, Mapping) else inputs != NO_TOKEN
        dropped = self._dropped(known, random)
        if not isinstance(inputs, Mapping):
            return inputs, *(torch.where(mask, NO_TOKEN, inputs) for mask in dropped)
        return inputs, *({**inputs, MASK: inputs[MASK].masked_fill(mask, 0)} for mask in dropped)

    def _dropped(self, known: Tensor, random: ExampleRandom) -> Tensor:
        """(count, N, L) bool, of the known tokens (N, L); padding to another width changes nothing."""
        n, width = known.shape
        numbers = random.uniform(width * self.count).view(width, self.count, n).permute(1, 2, 0)
        position = known.cumsum(1)
        inside = known & (position > 1) & (position < position[:, -1:])
        return inside & (numbers < self.drop)


def _check(views: Any, valid: bool, wanted: str) -> None:
    if not valid or views.count < 1:
        raise UsageError(f"{wanted}, and count at least 1, got {views}.")


@dataclass(frozen=True, eq=False)
class UnlabelledViews:
    """Views of inputs (N, ...), in their order, over and over.

    views: of a batch, as the labelled examples have; prepare: such as a Preprocess, applied to every view
    """

    inputs: Tensor
    views: Callable[[Tensor, ExampleRandom], tuple[Tensor, ...]]
    prepare: Callable[[Inputs], Inputs]

    def shuffled(self, device: torch.device) -> UnlabelledViews:
        """On the device, in a random order that is always the same."""
        order = ExampleRandom.of(0, torch.arange(len(self.inputs))).uniform(1)[0].argsort(stable=True)
        return replace(self, inputs=self.inputs.cpu()[order].to(device))

    def take(self, step: Tensor, size: int, key: int) -> tuple[Any, ...]:
        """The views of ``size`` inputs; which ones, and their random numbers, follow from step and key alone."""
        device = self.inputs.device
        places = (step * size + torch.arange(size, device=device)) % len(self.inputs)
        # One counter more than the random numbers of mixing have, which share the key.
        random = ExampleRandom.of(key, places, step.expand(size), torch.ones_like(places))
        return tuple(map(self.prepare, self.views(self.inputs[places], random)))


def has_mask(inputs: Inputs) -> bool:
    """Whether tokens of the inputs can be masked."""
    if not isinstance(inputs, Mapping) or not all(isinstance(inputs.get(name), Tensor) for name in (IDS, MASK)):
        return False
    return bool(inputs[MASK].ndim == 2 and inputs[MASK].shape == inputs[IDS].shape)
