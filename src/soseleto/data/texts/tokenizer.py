"""A tokenizer of a pretrained model, as JSON: what a run folder keeps, and all that is needed to read texts.

Tokens are cached on disk by the content of the texts and the tokenizer, so that a command that is run again, or
resumed, does not tokenise again.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data.image_decoding.cache import cache_root
from soseleto.data.limits import check_size
from soseleto.errors import DataError, first_line, need

NO_TOKEN = -1  # in place of a token, behind the end of a text
LONGEST = 256  # tokens of a text, unless asked for otherwise
_TOGETHER = 1000  # texts tokenised at a time


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

    def encode(self, texts: Sequence[str | None], cache: str | Path | None = None) -> Tensor:
        """(N, longest) int32, ``NO_TOKEN`` behind the end of a text; a missing text is an empty one.

        cache: folder for tokens; by default the one of decoded images
        """
        check_size(4 * len(texts) * self.longest, what="the tokens of the texts")
        file = cache_root(cache) / f"tokens-{len(texts)}x{self.longest}-{self._key(texts)}.npy"
        found = self._cached(file, len(texts))
        if found is None:
            found = self._encoded(texts)
            _store(found, file)
        return torch.from_numpy(found)

    def _encoded(self, texts: Sequence[str | None]) -> np.ndarray:
        encoder = self._encoder()
        tokens = np.full((len(texts), self.longest), NO_TOKEN, dtype=np.int32)
        for first in range(0, len(texts), _TOGETHER):
            some = [text or "" for text in texts[first : first + _TOGETHER]]
            for row, encoding in enumerate(encoder.encode_batch(some), start=first):
                tokens[row, : len(encoding.ids)] = encoding.ids
        return tokens

    def _encoder(self) -> Any:
        try:
            encoder = need("tokenizers", to="reading texts for a pretrained model").Tokenizer.from_str(self.json)
        except DataError:
            raise
        except Exception as error:  # tokenizers raises Exception itself
            raise DataError(f"the tokenizer cannot be read ({first_line(error)}): restore it from a copy.") from error
        encoder.no_padding()
        encoder.enable_truncation(self.longest)
        return encoder

    def _key(self, texts: Sequence[str | None]) -> str:
        digest = hashlib.sha256(self.json.encode())
        for text in texts:
            content = (text or "").encode()
            digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()

    def _cached(self, file: Path, count: int) -> np.ndarray | None:
        """Of an earlier command; None where there is none, or it is damaged."""
        try:
            found: np.ndarray = np.load(file, allow_pickle=False)
        except (OSError, ValueError, EOFError):
            return None
        return found if found.shape == (count, self.longest) and found.dtype == np.int32 else None

    @property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.json.encode()).hexdigest()


def _store(tokens: np.ndarray, file: Path) -> None:
    """Written aside and renamed; without a place for it, texts are tokenised again the next time."""
    aside = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, aside = tempfile.mkstemp(prefix="unfinished-", suffix=".npy", dir=file.parent)
        with os.fdopen(handle, "wb") as out:
            np.save(out, tokens, allow_pickle=False)
        os.replace(aside, file)
    except OSError:
        if aside is not None:
            Path(aside).unlink(missing_ok=True)
