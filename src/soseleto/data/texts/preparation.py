"""The preparation of a text column for a pretrained model: kept in the run, and applied to every other table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soseleto.data.table_columns import values
from soseleto.data.table_columns.preparation import Seen, described
from soseleto.data.texts.tokenizer import NO_TOKEN, Tokenizer
from soseleto.errors import DataError


@dataclass(frozen=True)
class TextPreparation:
    """One column of texts as tokens; other columns of the table are not used.

    seen: every column of the source, for the plan
    """

    column: str
    tokenizer: Tokenizer
    seen: tuple[Seen, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        return (self.column,)

    @property
    def used(self) -> tuple[str, ...]:
        """The columns that a table must have."""
        return (self.column,)

    @property
    def shown(self) -> tuple[str, ...]:
        """The columns whose values a ranking has: none, since it has no texts."""
        return ()

    @property
    def texts(self) -> tuple[str, ...]:
        """The columns of text."""
        return (self.column,)

    def read(self, table: Any, cache: str | Path | None = None) -> Tensor:
        """The tokens of a pyarrow table, (N, longest) int32."""
        return self.tokens(values.words(table[self.column]).to_pylist(), cache)

    def tokens(self, texts: Sequence[str | None], cache: str | Path | None = None) -> Tensor:
        return self.tokenizer.encode(texts, cache)

    def __call__(self, tokens: Tensor) -> dict[str, Tensor]:
        """Tokens as the model gets them: ``input_ids`` and ``attention_mask``, on the same device."""
        known = tokens != NO_TOKEN
        ids = torch.where(known, tokens, self.tokenizer.pad)
        return {"input_ids": ids.to(torch.int64), "attention_mask": known.to(torch.int64)}

    def cut(self, tokens: Tensor) -> Tensor:
        """(N,) whether a text may be longer than its tokens (N, longest)."""
        return tokens[:, -1] != NO_TOKEN

    def describe(self) -> list[str]:
        """The plan as lines to print: column, kind, missing values, a few values."""
        return described(self.seen)

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values; the tokenizer itself is a file of the run folder."""
        seen = [{**vars(one), "examples": list(one.examples)} for one in self.seen]
        kept = {"longest": self.tokenizer.longest, "pad": self.tokenizer.pad, "sha256": self.tokenizer.fingerprint}
        return {"text": self.column, "tokenizer": kept, "seen": seen}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any], json: str) -> TextPreparation:
        """What ``to_dict`` wrote, and the tokenizer's JSON."""
        try:
            kept = fields["tokenizer"]
            tokenizer = Tokenizer(json, int(kept["longest"]), int(kept["pad"]))
            seen = tuple(Seen(**{**one, "examples": tuple(one["examples"])}) for one in fields["seen"])
            made = cls(str(fields["text"]), tokenizer, seen)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(
                f"the preparation of the texts cannot be read ({error}): restore it from a copy."
            ) from error
        if tokenizer.fingerprint != kept["sha256"]:
            raise DataError("the tokenizer of the run is not the one of its training: restore it from a copy.")
        return made
