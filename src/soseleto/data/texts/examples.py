"""Texts in memory as tokens; a batch is as wide as its longest text, rounded up to one of a few lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from soseleto.data.examples import Examples
from soseleto.data.structure import Inputs
from soseleto.data.texts.lengths import length_batches, padded_length
from soseleto.data.texts.tokenizer import NO_TOKEN


@dataclass(frozen=True, eq=False)
class TextExamples(Examples):
    """Examples whose inputs are tokens (N, longest), ``NO_TOKEN`` behind the end of a text.

    Lengths are known on the CPU, and so are the indices of batches: the width of a batch on a GPU is known without
    waiting for the GPU.
    """

    @property
    def reads_ahead(self) -> bool:
        return True  # a batch has a width of its own, so that several are not gathered at once

    def take(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Tokens (B, width) and labels."""
        tokens, labels = self._gathered(index)
        longest = int(self._padded[index.cpu()].max()) if len(index) else 1
        return tokens[:, :longest], labels

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        """The index batches of an epoch, of texts of similar length, on the CPU."""
        return length_batches(self._padded, size, seed=seed, epoch=epoch)

    @cached_property
    def _padded(self) -> Tensor:
        """(N,) the padded length of every text."""
        most = self.inputs.shape[1]
        counts = (self.inputs != NO_TOKEN).sum(1).cpu()
        table = torch.tensor([padded_length(count, most) for count in range(most + 1)])
        return table[counts]


def trimmed(tokens: Tensor) -> Tensor:
    """Tokens (B, longest) without the columns that no text reaches, but for padding to one of a few lengths."""
    if not len(tokens):
        return tokens
    longest = int((tokens != NO_TOKEN).sum(1).max())
    return tokens[:, : padded_length(longest, tokens.shape[1])]
