"""Labels as files and arrays have them, as names or numbers.

Names are sorted and numbered from 0: as numbers (2 before 10) if all of them are integers, else as text. The numbers 3
and 3.0 have the name "3"; text is the name as it is, so that "03", "3 " and "3" are three names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data.cells import MISSING
from soseleto.errors import DataError

_INTEGER = re.compile(r"[+-]?[0-9]{1,200}\Z")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
_POINT_ZERO = re.compile(r"-?(0|[1-9][0-9]*)\.0")  # how pandas writes integers of a column with missing values
_LONGEST = 200  # characters of a label
_BREAKS = re.compile(r"[\r\n]")


@dataclass(frozen=True)
class Names:
    """The label of every example as a name; None if it has no label."""

    names: tuple[str | None, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        return class_order(name for name in self.names if name is not None)

    def index(self, classes: Sequence[str] | None = None) -> Tensor:
        """(N,) int64 class indices; -1 if there is no label or it is not among ``classes``."""
        order = self.classes if classes is None else classes
        index_of: dict[str | None, int] = {name: at for at, name in enumerate(order)}
        return torch.tensor([index_of.get(name, -1) for name in self.names], dtype=torch.int64)


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """The class names in the order of their indices.

    >>> class_order(["10", "9", "9"]), class_order(["10", "9", "cat"])
    (('9', '10'), ('10', '9', 'cat'))
    """
    different = set(names)
    if all(_INTEGER.match(name) for name in different):
        return tuple(sorted(different, key=lambda name: (int(name), name)))
    return tuple(sorted(different))


def labels_from(values: Any, *, name: str, encoding: str | None = None) -> Names | Tensor:
    """Labels of a file: numbers that are not all integers are regression targets, all else is a class name."""
    if isinstance(values, np.ndarray):  # more than one number per example
        if values.dtype.kind not in "buif":
            raise DataError(f"{name} labels have shape {values.shape} and type {values.dtype}: give one name each.")
        return torch.from_numpy(values.astype(np.float32))
    numeric = all(value is None or isinstance(value, float | int) for value in values)
    if numeric and any(isinstance(v, float) and math.isfinite(v) and v != int(v) for v in values):
        return torch.tensor([float("nan") if v is None else float(v) for v in values], dtype=torch.float32)
    return names_of(values, encoding=encoding)


def names_of(values: Iterable[Any], *, encoding: str | None = None) -> Names:
    """Labels of any type as names; None, NaN and blank text mean no label."""
    return Names(tuple(_name(value, row, encoding) for row, value in enumerate(values)))


def _name(value: Any, row: int, encoding: str | None) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and abs(value) < 2**53 and value == int(value):
        return str(int(value))
    name = text_of(value, where=f"the label of row {row}", encoding=encoding)
    if len(name) > _LONGEST or _BREAKS.search(name):  # of a paragraph, or of rows that a stray quote has merged
        fault = f"{len(name):,} characters" if len(name) > _LONGEST else "a line break"
        raise DataError(
            f"the label of row {row} has {fault} ({name[:40]!r} ...): close its quote, or name another label column."
        )
    return name if name.strip() else None


def text_of(value: Any, *, where: str, encoding: str | None = None) -> str:
    """A value as text; bytes that are not in the encoding raise."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is {value[:40]!r}, which is not {encoding or 'UTF-8'}: read it with encoding='latin-1', if "
            "that is its encoding."
        ) from error


def labels_of_words(words: Sequence[str]) -> list[Any]:
    """Labels of a CSV file, in which all are words: numbers if they are not all integers, else the exact words.

    If all numbers end in ".0", which is how pandas writes integers beside missing values, the ending is left out.
    """
    present = {word for word in words if word.strip().lower() not in MISSING}
    if not present or not all(_NUMBER.fullmatch(word.strip()) for word in present):
        return list(words)
    values: dict[str, Any] = {word: word for word in present}
    if all(_POINT_ZERO.fullmatch(word) for word in present):
        values = {word: word.removesuffix(".0") for word in present}
    elif any(math.isfinite(float(word)) and not float(word).is_integer() for word in present):
        values = {word: float(word) for word in present}
    return [values.get(word) for word in words]
