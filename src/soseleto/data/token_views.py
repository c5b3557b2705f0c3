"""Views of texts: as they are to judge them by, and without some of their tokens to learn from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from soseleto.data.draws import Draws
from soseleto.data.structure import Inputs
from soseleto.data.text import NO_TOKEN
from soseleto.errors import UsageError

IDS, MASK = "input_ids", "attention_mask"


@dataclass(frozen=True)
class TokenViews:
    """Makes of a batch of texts the tuple (weak view, strong view, ...), for methods that take such batches.

    The weak view is the text itself. In a strong view the attention mask is 0 at dropped tokens, so that the model does
    not see them; the others keep their positions, and the first and the last token are never dropped. A network with
    dropout makes further differences: the teacher judges without it.

    Batches are dicts with ``input_ids`` and ``attention_mask`` (N, L), or the tokens that a text column is stored as.

    drop: the probability that a token is dropped
    count: strong views of every text, each with its own draws
    """

    drop: float = 0.1
    count: int = 2

    def __post_init__(self) -> None:
        if not 0.0 <= self.drop < 1.0:
            raise UsageError(f"drop of TokenViews must be a probability below 1, got {self.drop}: say 0.1.")
        if self.count < 1:
            raise UsageError(f"count of TokenViews must be at least 1, got {self.count}.")

    @property
    def nothing(self) -> bool:
        """Whether batches are returned unchanged; views are always made."""
        return False

    def __call__(self, inputs: Inputs, draws: Draws) -> tuple[Inputs, ...]:
        known = inputs[MASK] != 0 if isinstance(inputs, Mapping) else inputs != NO_TOKEN
        dropped = self._dropped(known, draws)
        if not isinstance(inputs, Mapping):
            return inputs, *(torch.where(one, NO_TOKEN, inputs) for one in dropped)
        return inputs, *({**inputs, MASK: inputs[MASK].masked_fill(one, 0)} for one in dropped)

    def _dropped(self, known: Tensor, draws: Draws) -> Tensor:
        """(count, N, L) bool, of the known tokens (N, L); padding to another width changes nothing."""
        n, width = known.shape
        numbers = draws.uniform(width * self.count).view(width, self.count, n).permute(1, 2, 0)
        place = known.cumsum(1)
        inside = known & (place > 1) & (place < place[:, -1:])
        return inside & (numbers < self.drop)


def has_mask(inputs: Inputs) -> bool:
    """Whether tokens of the inputs can be masked."""
    if not isinstance(inputs, Mapping) or not all(isinstance(inputs.get(name), Tensor) for name in (IDS, MASK)):
        return False
    return bool(inputs[MASK].ndim == 2 and inputs[MASK].shape == inputs[IDS].shape)
