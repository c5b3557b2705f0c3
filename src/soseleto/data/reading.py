"""What all readers share: options, what was read, the problems found, and how labels are numbered."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data.cells import LEFT_OUT, MISSING
from soseleto.data.structure import Inputs
from soseleto.data.text import Tokenizer
from soseleto.errors import DataError, UsageError, counted, did_you_mean

_KINDS = {
    "numeric_columns": "number",
    "categorical_columns": "category",
    "text_columns": "text",
    "drop_columns": LEFT_OUT,
}
_SHOWN = 5
_INTEGER = re.compile(r"[+-]?[0-9]{1,200}\Z")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
_POINT_ZERO = re.compile(r"-?(0|[1-9][0-9]*)\.0")  # how pandas writes integers of a column with missing values
_LONGEST = 200  # characters of a label
_BREAKS = re.compile(r"[\r\n]")


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


# Labels as files and arrays have them, as names or numbers. Names are sorted and numbered from 0: as numbers (2 before
# 10) if all of them are integers, else as text. The numbers 3 and 3.0 have the name "3"; text is the name as it is, so
# that "03", "3 " and "3" are three names.


def labels_from(values: Any, *, name: str, numeric: bool = False) -> Names | Tensor:
    """Labels of a file: numbers that are not all integers are regression targets, all else is a class name.

    numeric: whether integers, and words of numbers, are regression targets too
    """
    if isinstance(values, np.ndarray):  # more than one number per example
        if values.dtype.kind not in "buif":
            raise DataError(f"{name} labels have shape {values.shape} and type {values.dtype}: give one name each.")
        return torch.from_numpy(values.astype(np.float32))
    if numeric:
        values = [_number(value, row) for row, value in enumerate(values)]
    numbers = all(value is None or isinstance(value, float | int) for value in values)
    if numeric or (numbers and any(isinstance(v, float) and math.isfinite(v) and v != int(v) for v in values)):
        return torch.tensor([float("nan") if v is None else float(v) for v in values], dtype=torch.float32)
    return names_of(values)


def _number(value: Any, row: int) -> float | None:
    if value is None or (isinstance(value, str) and value.strip().lower() in MISSING):
        return None
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"the label of row {row} is {value!r} and not a number: correct it, or leave numeric_labels out."
        ) from error


def names_of(values: Iterable[Any]) -> Names:
    """Labels of any type as names; None, NaN and blank text mean no label."""
    return tuple(_name(value, row) for row, value in enumerate(values))


def _name(value: Any, row: int) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float) and abs(value) < 2**53 and value == int(value):
        return str(int(value))
    name = text_of(value, where=f"the label of row {row}")
    if len(name) > _LONGEST or _BREAKS.search(name):  # of a paragraph, or of rows that a stray quote has merged
        fault = f"{len(name):,} characters" if len(name) > _LONGEST else "a line break"
        raise DataError(
            f"the label of row {row} has {fault} ({name[:40]!r} ...): close its quote, or name another label column."
        )
    return name if name.strip() else None


def text_of(value: Any, *, where: str) -> str:
    """A value as text; bytes that are not UTF-8 raise."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is {value[:40]!r}, which is not UTF-8: save it as text.") from error


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


# Class indices across data sets: shared by source and target in noisy mode, separate in transfer mode.


def number_labels(raws: Sequence[Raw], *, shared: bool) -> list[Raw]:
    """The same data sets with class indices as labels; rows without a usable label become problems.

    ``raws`` are source, target and test, or the first of these. The test uses the classes of the target.
    """
    raws = list(map(_named, raws))
    groups = [raws] if shared else [raws[:1], raws[1:]]
    numbered = []
    for group in filter(None, groups):
        classes = _classes(group[:2] if shared else group[:1])
        numbered += [_numbered(raw, classes) for raw in group]
    return numbered


def _named(raw: Raw) -> Raw:
    """Class indices by their names, if known, so that they can be matched with other sets."""
    classes = raw.classes

    def named(values: Any) -> Any:
        if classes is None or not isinstance(values, Tensor) or values.is_floating_point():
            return values
        return tuple(None if c < 0 else classes[c] for c in values.tolist())

    return replace(raw, labels=named(raw.labels), truth=named(raw.truth), before=named(raw.before))


def _classes(raws: Sequence[Raw]) -> tuple[str, ...] | None:
    """The joint class list of these sets; None if their labels are class indices or regression targets."""
    kinds = {_kind(raw) for raw in raws}
    if len(kinds) > 1:
        differences = " but ".join(f"the {raw.name} has {_kind(raw)}" for raw in raws)
        raise DataError(f"{differences} as labels: give both the same kind.")
    if kinds != {"class names"}:
        return None
    fixed = raws[0].classes or ()
    return fixed + class_order({name for raw in raws for name in _names(raw)}.difference(fixed))


def _kind(raw: Raw) -> str:
    if isinstance(raw.labels, tuple):
        return "class names"
    return "regression targets" if raw.labels.dtype.is_floating_point else "class indices"


def _names(raw: Raw) -> set[str]:
    columns = [names for names in (raw.labels, raw.truth) if isinstance(names, tuple)]
    return {name for names in columns for name in names if name is not None}


def _numbered(raw: Raw, classes: tuple[str, ...] | None) -> Raw:
    if isinstance(raw.labels, tuple) != (classes is not None):
        needed = "numbers" if classes is None else "class names"
        raise DataError(f"the {raw.name} has {_kind(raw)} as labels where {needed} are needed: give {needed}.")
    truth, before = raw.truth, raw.before
    if isinstance(before, tuple):
        before = _before(raw, before, classes)
    if isinstance(truth, tuple):
        truth = index_of(truth, classes or class_order(name for name in truth if name is not None))
    if not isinstance(raw.labels, tuple):
        return replace(raw, truth=truth, before=before)
    assert classes is not None
    labels = index_of(raw.labels, classes)
    names, problems = raw.labels, list(raw.problems)
    if ids := tuple(raw.id_of(row) for row, name in enumerate(names) if name is None):
        text = f"{counted(len(ids), 'example has', 'examples have')} no label ({some(ids)})."
        problems.append(Problem(raw.name, "no label", text, ids))
    unknown = {row: name for row in (labels < 0).nonzero().flatten().tolist() if (name := names[row]) is not None}
    if unknown:
        which = f"labels {some(sorted(set(unknown.values())))} are not classes of the target"
        ids = tuple(map(raw.id_of, unknown))
        text = f"the {which}: leave those examples out, or add target examples."
        problems.append(Problem(raw.name, "unknown class", text, ids))
    return replace(raw, labels=labels, classes=classes, truth=truth, before=before, problems=tuple(problems))


def _before(raw: Raw, names: Names, classes: tuple[str, ...] | None) -> Tensor:
    if wrong := sorted({name for name in names if name is not None}.difference(classes or ())):
        hint = did_you_mean(wrong[0], classes or ())
        raise DataError(
            f"the {raw.name} has {some(wrong)} among its labels from before the check, which are not classes of the "
            f"data{hint}: correct them."
        )
    return index_of(names, classes or ())
