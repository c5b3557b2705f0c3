"""Labels as files and arrays have them, as names or numbers.

Names are sorted and numbered from 0: as numbers (2 before 10) if all of them are integers, else as text. The numbers 3
and 3.0 have the name "3"; text is the name as it is, so that "03", "3 " and "3" are three names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data.cells import MISSING
from soseleto.data.reading import Names, Problem, Raw, class_order, index_of, some
from soseleto.errors import DataError, counted, did_you_mean

_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?inf(inity)?", re.IGNORECASE)
_POINT_ZERO = re.compile(r"-?(0|[1-9][0-9]*)\.0")  # how pandas writes integers of a column with missing values
_LONGEST = 200  # characters of a label
_BREAKS = re.compile(r"[\r\n]")


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
