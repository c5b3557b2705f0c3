"""What all readers share: options, what was read, and the problems found."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from soseleto.data.cells import LEFT_OUT
from soseleto.data.structure import Inputs
from soseleto.data.text import Tokenizer
from soseleto.errors import DataError, UsageError, counted

_KINDS = {
    "numeric_columns": "number",
    "categorical_columns": "category",
    "text_columns": "text",
    "drop_columns": LEFT_OUT,
}
_SHOWN = 5
_INTEGER = re.compile(r"[+-]?[0-9]{1,200}\Z")


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are read; an option that is None is chosen from the data.

    image_size: side of every image in pixels, or (height, width); default: the size of the source images, at most 224
    channels: 1 for grey, 3 for RGB; default: grey if all source images are grey
    label_column, path_column, id_column: columns of a table; default: found by their usual names
    truth_column: column of a table with the correct labels, where they are known
    group_column: column of a table with, say, the patient: rows of one are never on both sides of a split, nor features
    before_column: column of the target's table with the labels from before a check; it is not a feature
    numeric_labels: the labels of a table are numbers to predict, also where all are integers, such as years
    numeric_columns, categorical_columns, text_columns, drop_columns: columns of a table whose kind is not inferred
    tokenizer: of a pretrained text model, for which one column of text is read
    encoding: of text files (.csv, .tsv, .jsonl), such as "latin-1"; default: UTF-8
    root: folder that relative paths in a table start from; default: the table's own folder
    allow_outside: follow paths and links that lead out of that folder
    """

    image_size: int | tuple[int, int] | None = None
    channels: int | None = None
    path_column: str | None = None
    label_column: str | None = None
    id_column: str | None = None
    truth_column: str | None = None
    group_column: str | None = None
    before_column: str | None = None
    numeric_labels: bool = False
    numeric_columns: Sequence[str] = ()
    categorical_columns: Sequence[str] = ()
    text_columns: Sequence[str] = ()
    drop_columns: Sequence[str] = ()
    tokenizer: Tokenizer | None = None
    encoding: str | None = None
    root: str | Path | None = None
    allow_outside: bool = False

    def __post_init__(self) -> None:
        sides = self.sides
        if sides is not None and not (len(sides) == 2 and all(isinstance(s, int) and 4 <= s <= 4096 for s in sides)):
            raise UsageError(
                f"image_size must be one side or (height, width), each from 4 to 4096, got {self.image_size!r}."
            )
        if self.channels not in (None, 1, 3):
            raise UsageError(f"channels must be 1 (grey) or 3 (RGB), got {self.channels!r}.")
        named = [name for option in _KINDS for name in _columns(self, option)]
        if twice := sorted({name for name in named if named.count(name) > 1}):
            raise UsageError(f"column {twice[0]!r} is given two kinds: name it once among {', '.join(_KINDS)}.")

    @property
    def sides(self) -> tuple[int, int] | None:
        """(height, width) of every image, if given."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def kinds(self) -> dict[str, str]:
        """The kinds that the user has set, by column."""
        return {name: kind for option, kind in _KINDS.items() for name in _columns(self, option)}


def _columns(reading: Reading, option: str) -> Sequence[str]:
    names: Sequence[str] = getattr(reading, option)
    if isinstance(names, str):
        raise UsageError(f"{option} must be a list of column names, got {names!r}: write {option}=[{names!r}].")
    return names


@dataclass(frozen=True)
class Problem:
    """One problem of one data set, found before training.

    where: "source", "target" or "test"
    kind: a short keyword, such as "unreadable" or "duplicate"
    text: one sentence for the user
    ids: the examples to leave out, as skip_bad does
    stops: whether it prevents training
    """

    where: str
    kind: str
    text: str
    ids: tuple[str, ...] = ()
    stops: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-compatible values, for the run folder."""
        return {**asdict(self), "ids": list(self.ids)}


class ProblemsError(DataError):
    """The data have problems that prevent training; ``problems`` lists all of them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        stopping = [problem for problem in problems if problem.stops]
        count = counted(len(stopping), "problem")
        lines = "".join(f"\n  - {problem}" for problem in stopping)
        super().__init__(
            f"the data have {count}: fix them, or leave these examples out with skip_bad=True (--skip-bad).{lines}"
        )


Names = tuple[str | None, ...]  # the label of every example as a name; None if it has no label


def index_of(names: Names, classes: Sequence[str]) -> Tensor:
    """(N,) int64 class indices; -1 if there is no label or it is not among ``classes``."""
    places: dict[str | None, int] = {name: at for at, name in enumerate(classes)}
    return torch.tensor([places.get(name, -1) for name in names], dtype=torch.int64)


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """The class names in the order of their indices.

    >>> class_order(["10", "9", "9"]), class_order(["10", "9", "cat"])
    (('9', '10'), ('10', '9', 'cat'))
    """
    different = set(names)
    if all(_INTEGER.match(name) for name in different):
        return tuple(sorted(different, key=lambda name: (int(name), name)))
    return tuple(sorted(different))


@dataclass(frozen=True)
class Raw:
    """One data set before its labels are numbered; exactly one of ``inputs``, ``table`` and ``images`` is set."""

    name: str  # "source", "target", "test" or another, for error messages
    labels: Names | Tensor  # class names, class indices or regression targets
    inputs: Inputs | None = None
    table: Any = None  # a pyarrow table of features, not yet prepared
    images: Sequence[Any] | None = None  # Pillow images, opened on access, or files, of which paths is then set
    ids: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None  # if the order of the classes is fixed
    truth: Names | Tensor | None = None
    before: Names | Tensor | None = None  # of a target: the labels from before a check
    paths: tuple[str, ...] | None = None
    groups: Tensor | None = None  # as of Examples
    texts: bool = False  # the inputs are tokens
    problems: tuple[Problem, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)

    def id_of(self, row: int) -> str:
        return str(row) if self.ids is None else self.ids[row]


def some(items: Sequence[str]) -> str:
    """The first few items, and the number of the others."""
    shown = ", ".join(items[:_SHOWN])
    more = len(items) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
