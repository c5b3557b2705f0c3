"""The one rule by which label names become class indices.

Names are sorted and numbered from 0. When all of them are whole numbers they are sorted as numbers (2 before
10), else as text. Whole numbers in any guise are the same name: 3, 3.0 and "3".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_WHOLE = re.compile(r"[+-]?[0-9]{1,18}\Z")


@dataclass(frozen=True)
class Names:
    """The label of every example, as a name; None where there is none."""

    names: tuple[str | None, ...]

    @property
    def classes(self) -> tuple[str, ...]:
        return class_order(name for name in self.names if name is not None)

    def index(self, classes: Sequence[str] | None = None) -> Tensor:
        """(N,) int64 class indices; -1 where there is no name, or one that is not among ``classes``."""
        place: dict[str | None, int] = {
            name: at for at, name in enumerate(self.classes if classes is None else classes)
        }
        return torch.tensor([place.get(name, -1) for name in self.names], dtype=torch.int64)


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """The class names, by class index.

    >>> class_order(["10", "9", "9"]), class_order(["10", "9", "cat"])
    (('9', '10'), ('10', '9', 'cat'))
    """
    found = set(names)
    if all(_WHOLE.match(name) for name in found):
        return tuple(sorted(found, key=lambda name: (int(name), name)))
    return tuple(sorted(found))


def names_of(values: Iterable[Any]) -> Names:
    """Labels of any kind as names; NaN and empty text are no label."""
    return Names(tuple(_name(value) for value in values))


def is_regression(values: Sequence[Any]) -> bool:
    """Whether the labels are numbers that are not all whole: then they are targets, not classes."""
    numbers = [value for value in values if isinstance(value, float) and math.isfinite(value)]
    known = all(value is None or isinstance(value, float | int) for value in values)
    return known and any(value != int(value) for value in numbers)


def _name(value: Any) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and abs(value) < 2**53 and value == int(value):
        return str(int(value))
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    return str(value).strip() or None
