"""Errors that a user can cause. Each message is one sentence: what is wrong, with which value, what to type."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from typing import Any

INTERRUPTED = 130  # the exit code after Ctrl-C
STOPPED = "soseleto: stopped; what was written so far is kept."


class SoseletoError(Exception):
    """Base of every error this package raises on purpose."""


class UsageError(SoseletoError, ValueError):
    """An argument, or an option of the command line, is wrong (exit code 2)."""


class DataError(SoseletoError, ValueError):
    """The data cannot be used as it is."""


class EngineError(SoseletoError, RuntimeError):
    """An engine cannot give the exact alignment for this model."""


class TrainingError(SoseletoError, RuntimeError):
    """Training had to stop; what was written before is intact."""


class OutOfMemory(TrainingError):
    """A step needs more memory than there is; the message says what would fit."""


class RankLost(TrainingError):
    """Another rank of this training has died or does not respond."""


class RankStopped(TrainingError):
    """Rank 0 failed; the message is that of its error."""


class DiskError(SoseletoError, OSError):
    """A file could not be written: the disk is full, read-only or broken."""


class CannotSave(SoseletoError, TypeError):
    """A part of the training state has a type that a checkpoint cannot hold."""


class Interrupted(SoseletoError):
    """A signal ended the training between two steps; the message says how to resume."""

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = int(signal)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'forward'?)"``, or nothing when no known word is close."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun.

    >>> counted(1, "row"), counted(1200, "row"), counted(2, "class", "classes")
    ('1 row', '1,200 rows', '2 classes')
    """
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


_INSTALL = {
    **dict.fromkeys(("pyarrow", "PIL", "safetensors", "sklearn", "skops"), "soseleto"),
    **dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "soseleto[onnx]"),
    "datasets": "soseleto[huggingface]",
    "tokenizers": "soseleto[transformers]",
    **{name: f"soseleto[{name}]" for name in ("transformers", "timm", "peft", "tensorboard")},
}


def need(module: str, *, to: str) -> Any:
    """Import an optional module; without it, the error says what needs it and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else module
        top = missing.partition(".")[0]  # of the module itself, or of one that it imports
        package = {"PIL": "pillow", "sklearn": "scikit-learn"}.get(top, top)
        install = _INSTALL.get(top, package)
        raise DataError(f"{to} needs {package}, which is not installed: type pip install '{install}'.") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 160 characters, to be quoted inside another message."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:160].rstrip(". ")
