"""Texts as tokens of a pretrained model, in batches of similar length."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from soseleto.data import cells
from soseleto.data.batches import generator, source_batches, source_order
from soseleto.data.cells import Seen
from soseleto.data.examples import Examples
from soseleto.data.structure import Inputs, check_size
from soseleto.errors import DataError, first_line, need

NO_TOKEN = -1  # in place of a token, behind the end of a text
LONGEST = 256  # tokens of a text by default
_TOGETHER = 1000  # texts tokenised at a time
_SHORTEST = 16  # tokens to which a batch is padded
_WINDOW = 50  # batches within which texts are sorted, as in the length-grouped sampler of transformers


@dataclass(frozen=True)
class Tokenizer:
    """Texts to token ids.

    json: as ``tokenizers.Tokenizer.to_str`` writes it
    longest: tokens of a text; what follows is cut off
    pad: the id that the model gets behind the end of a text, where its attention mask is 0
    """

    json: str
    longest: int = LONGEST
    pad: int = 0

    def encode(self, texts: Sequence[str | None]) -> Tensor:
        """(N, longest) int32, ``NO_TOKEN`` behind the end of a text; a missing text is an empty one."""
        check_size(4 * len(texts) * self.longest, what="the tokens of the texts")
        encoder = self._encoder()
        tokens = np.full((len(texts), self.longest), NO_TOKEN, dtype=np.int32)
        for first in range(0, len(texts), _TOGETHER):
            some = [text or "" for text in texts[first : first + _TOGETHER]]
            for row, encoding in enumerate(encoder.encode_batch(some), start=first):
                tokens[row, : len(encoding.ids)] = encoding.ids
        return torch.from_numpy(tokens)

    def _encoder(self) -> Any:
        tokenizers = need("tokenizers", to="reading texts for a pretrained model")
        try:
            encoder = tokenizers.Tokenizer.from_str(self.json)
        except Exception as error:  # tokenizers raises Exception itself
            raise DataError(f"the tokenizer cannot be read ({first_line(error)}): restore it from a copy.") from error
        encoder.no_padding()
        encoder.enable_truncation(self.longest)
        return encoder


@dataclass(frozen=True)
class TextPreparation:
    """One column of texts as tokens, kept in the run and applied to every other table.

    seen: every column of the source, for the plan; others than the text are not used
    """

    column: str
    tokenizer: Tokenizer
    seen: tuple[Seen, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    used = texts = names  # a table must have the column, which is one of texts

    def read(self, table: Any) -> Tensor:
        """The tokens of a pyarrow table, (N, longest) int32."""
        return self.tokenizer.encode(cells.words(table[self.column]).to_pylist())

    def __call__(self, tokens: Tensor) -> dict[str, Tensor]:
        """Tokens as the model gets them: ``input_ids`` and ``attention_mask``, on the same device."""
        known = tokens != NO_TOKEN
        ids = torch.where(known, tokens, self.tokenizer.pad)
        return {"input_ids": ids.to(torch.int64), "attention_mask": known.to(torch.int64)}

    def cut(self, tokens: Tensor) -> Tensor:
        """(N,) whether a text may be longer than its tokens (N, longest)."""
        return tokens[:, -1] != NO_TOKEN

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values; the tokenizer itself is a file of the run folder."""
        tokenizer = {"longest": self.tokenizer.longest, "pad": self.tokenizer.pad}
        return {"text": self.column, "tokenizer": tokenizer, "seen": [vars(seen) for seen in self.seen]}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], json: str) -> TextPreparation:
        """What ``to_dict`` wrote, and the tokenizer's JSON."""
        settings = fields["tokenizer"]
        tokenizer = Tokenizer(json, int(settings["longest"]), int(settings["pad"]))
        return cls(str(fields["text"]), tokenizer, tuple(map(Seen.from_dict, fields["seen"])))


@dataclass(frozen=True, eq=False)
class TextExamples(Examples):
    """Examples whose inputs are tokens (N, longest), ``NO_TOKEN`` behind the end of a text.

    A batch is as wide as its longest text, rounded up to one of a few lengths, so that engines and CUDA graphs are
    reused. Lengths and the indices of batches are on the CPU, so the width is known without waiting for a GPU.
    """

    reads_ahead: ClassVar[bool] = True  # a batch has a width of its own, so that several are not gathered at once

    def take(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Tokens (B, width) and labels."""
        tokens, labels = super().take(index)
        longest = int(self._padded[index.cpu()].max()) if len(index) else 1
        return tokens[:, :longest], labels

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        """The index batches of an epoch, of texts of similar length, on the CPU."""
        return length_batches(self._padded, size, seed=seed, epoch=epoch)

    def pieces(self, size: int) -> Sequence[Tensor]:
        """Of texts of similar length, which takes half the time of pieces in the order of the table."""
        return self.batches(size, seed=0, epoch=0)

    @cached_property
    def _padded(self) -> Tensor:
        """(N,) the padded length of every text."""
        most = self.inputs.shape[1]
        counts = (self.inputs != NO_TOKEN).sum(1).cpu()
        table = torch.tensor([padded_length(count, most) for count in range(most + 1)])
        return table[counts]


def padded_length(tokens: int, most: int) -> int:
    """The smallest of 16, 24, 32, 48, 64, 96, ... that is at least ``tokens``; never above ``most``.

    >>> [padded_length(n, 100) for n in (3, 17, 33, 49, 70, 100)]
    [16, 24, 48, 64, 96, 100]
    """
    lengths = (base << doublings for doublings in count() for base in (_SHORTEST, 3 * _SHORTEST // 2))
    return min(most, next(length for length in lengths if length >= tokens))


def length_batches(padded: Tensor, size: int, *, seed: int, epoch: int) -> Sequence[Tensor]:
    """The index batches of an epoch; together they hold every example exactly once.

    Of a random order, windows of up to 50 batches are sorted by their padded length, and the batches shuffled again.
    A last, shorter batch is left as the random order has it.

    padded: (N,) the padded length of every text, on the CPU
    """
    n = len(padded)
    whole = n // size
    if whole < 2:
        return source_batches(n, size, seed=seed, epoch=epoch)
    order = source_order(n, seed=seed, epoch=epoch)
    window = size * max(1, min(_WINDOW, whole // 4))
    windows = [part[padded[part].argsort(stable=True)] for part in order[: whole * size].split(window)]
    batches = torch.cat(windows).split(size)
    again = torch.randperm(whole, generator=generator(seed, "source/lengths", epoch)).tolist()
    return [*(batches[at] for at in again), *([order[whole * size :]] if n % size else [])]
