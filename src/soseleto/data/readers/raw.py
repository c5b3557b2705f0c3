"""A data set as read from its files: labels may still be names, images are not yet decoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from soseleto.data.labels import Names
from soseleto.data.reading import Problem
from soseleto.data.structure import Inputs


@dataclass(frozen=True)
class Raw:
    """One data set before its labels are numbered; exactly one of ``inputs``, ``table``, ``files`` and ``images`` is
    set.
    """

    name: str  # "source", "target", "test" or "unlabelled set", for error messages
    labels: Names | Tensor  # class names, class indices or regression targets
    inputs: Inputs | None = None
    table: Any = None  # a pyarrow table of features, not yet prepared
    files: tuple[str, ...] | None = None
    images: Sequence[Any] | None = None  # Pillow images, opened on access
    ids: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None  # if the order of the classes is fixed
    truth: Names | Tensor | None = None
    paths: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None  # names of the inputs that a table was prepared to
    texts: bool = False  # the inputs are tokens
    problems: tuple[Problem, ...] = ()

    def __len__(self) -> int:
        return len(self.labels.names if isinstance(self.labels, Names) else self.labels)

    def id_of(self, row: int) -> str:
        return str(row) if self.ids is None else self.ids[row]
