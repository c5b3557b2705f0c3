"""Text as a hashed bag of words and pairs of neighbouring words: no vocabulary, no download.

    x_b = s_b / ‖s‖,   s_b = Σ over words and pairs w with hash b of ±1 · idf_b

A text of any length becomes one vector of unit length; an empty one is all zeros.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np

BUCKETS = 2048
LENGTH = 6.0  # of a text as the model gets it: at the default learning rate of 0.03 a linear model then learns in time
_PIECE = 4096  # texts whose counts are in memory together
_WORD = re.compile(r"[^\W_]+(?:'[^\W_]+)?", re.UNICODE)


def tokens(text: str) -> list[str]:
    """Words in lower case, and pairs of neighbouring words.

    >>> tokens("Not bad, at all!")
    ['not', 'bad', 'at', 'all', 'not bad', 'bad at', 'at all']
    """
    found = _WORD.findall(text.lower())
    return found + [f"{first} {second}" for first, second in pairwise(found)]


def counts(texts: Iterable[str | None], buckets: int) -> np.ndarray:
    """(N, buckets) float32: signed counts of the tokens by their hash."""
    rows = [tokens(text or "") for text in texts]
    found = np.zeros((len(rows), buckets), dtype=np.float32)
    for row, words in enumerate(rows):
        for word in words:
            code = zlib.crc32(word.encode())
            found[row, code % buckets] += 1.0 if code & 0x8000_0000 else -1.0
    return found


def inverse_frequencies(texts: Sequence[str | None], buckets: int) -> tuple[float, ...]:
    """idf_b = log((1 + N) / (1 + n_b)) + 1, where n_b texts have a token in bucket b."""
    present = np.zeros(buckets)
    for first in range(0, len(texts), _PIECE):
        present += (counts(texts[first : first + _PIECE], buckets) != 0).sum(axis=0)
    return tuple(round(float(value), 6) for value in np.log((1 + len(texts)) / (1 + present)) + 1)


def vectors(texts: Iterable[str | None], idf: Sequence[float]) -> np.ndarray:
    """(N, buckets) float32 of unit length."""
    found = counts(texts, len(idf)) * np.asarray(idf, dtype=np.float32)
    length = np.linalg.norm(found, axis=1, keepdims=True)
    return np.asarray(found / np.maximum(length, 1e-12), dtype=np.float32)
