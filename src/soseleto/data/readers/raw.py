"""A data set as its reader found it: labels still names, images still files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from soseleto.data.readers.labels import Names
from soseleto.data.readers.problems import Problem


@dataclass(frozen=True)
class Reading:
    """How files are to be read; every field may be left to the reader."""

    image_size: int | tuple[int, int] | None = None  # one side, or (height, width)
    channels: int | None = None  # 1 or 3
    path_column: str | None = None
    label_column: str | None = None
    id_column: str | None = None
    truth_column: str | None = None
    root: str | Path | None = None  # the folder a table's paths start from; else the table's own
    allow_outside: bool = False  # whether paths and links may leave that folder
    cache: str | Path | None = None
    workers: int | None = None


@dataclass(frozen=True)
class Raw:
    """Exactly one of ``inputs``, ``files`` and ``images`` is there."""

    name: str  # "source", "target" or "test", for error sentences
    labels: Names | Tensor  # names; or class indices or regression targets already
    inputs: Tensor | None = None
    files: tuple[str, ...] | None = None
    images: Sequence[Any] | None = None  # opened Pillow images, each made when it is asked for
    ids: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None  # where the order of the classes is fixed already
    truth: Names | Tensor | None = None
    paths: tuple[str, ...] | None = None
    columns: tuple[str, ...] | None = None  # the names of a table's features
    problems: tuple[Problem, ...] = ()

    def __len__(self) -> int:
        return len(self.labels.names if isinstance(self.labels, Names) else self.labels)

    def id_of(self, row: int) -> str:
        return str(row) if self.ids is None else self.ids[row]
