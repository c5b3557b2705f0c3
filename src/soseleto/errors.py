"""Errors a user can cause: one sentence that says what is wrong, with which value, and what to type."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SoseletoError(Exception):
    """Base of every error this package raises on purpose."""


class UsageError(SoseletoError, ValueError):
    """An argument or a word on the command line is off (exit code 2)."""


class DataError(SoseletoError, ValueError):
    """The data cannot be used as it is."""


class EngineError(SoseletoError, RuntimeError):
    """An engine cannot give the exact alignment for this model."""


class TrainingError(SoseletoError, RuntimeError):
    """Training cannot go on; what was written so far is intact."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'forward'?)"``, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
