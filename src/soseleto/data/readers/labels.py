"""How label names become class indices.

Names are sorted and numbered from 0: as numbers (2 before 10) if all of them are integers, else as text. The numbers 3
and 3.0 have the name "3"; text is the name as it is, so that "03", "3 " and "3" are three names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soseleto.errors import DataError

_INTEGER = re.compile(r"[+-]?[0-9]{1,200}\Z")
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
        index_of: dict[str | None, int] = {
            name: at for at, name in enumerate(self.classes if classes is None else classes)
        }
        return torch.tensor([index_of.get(name, -1) for name in self.names], dtype=torch.int64)


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """The class names in the order of their indices.

    >>> class_order(["10", "9", "9"]), class_order(["10", "9", "cat"])
    (('9', '10'), ('10', '9', 'cat'))
    """
    found = set(names)
    if all(_INTEGER.match(name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def names_of(values: Iterable[Any], *, encoding: str | None = None) -> Names:
    """Labels of any type as names; None, NaN and blank text mean no label."""
    return Names(tuple(_name(value, row, encoding) for row, value in enumerate(values)))


def text_of(value: Any, *, where: str, encoding: str | None = None) -> str:
    """A value as text; bytes that are not in the encoding raise."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is {value[:40]!r}, which is not {encoding or 'UTF-8'}: type reading=Reading(encoding='latin-1'), "
            "or --encoding latin-1, if that is its encoding."
        ) from error


def is_regression(values: Sequence[Any]) -> bool:
    """Whether the labels are regression targets: numbers that are not all integers."""
    numbers = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    numeric = all(value is None or isinstance(value, float | int) for value in values)
    return numeric and any(value != int(value) for value in numbers)


def _name(value: Any, row: int, encoding: str | None) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and abs(value) < 2**53 and value == int(value):
        return str(int(value))
    name = text_of(value, where=f"the label of row {row}", encoding=encoding)
    if len(name) > _LONGEST or _BREAKS.search(name):
        fault = f"{len(name):,} characters" if len(name) > _LONGEST else "a line break"
        fix = "close its quote, or name another label column"
        raise DataError(f"the label of row {row} has {fault} ({name[:40]!r} ...): {fix}.")
    return name if name.strip() else None
