"""Which kind a column is: number, category, date or text, or left out because it says nothing about an example.

The kind is decided on the source alone. A kind that the user gives is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from soseleto.data.table_columns import dates, values
from soseleto.errors import counted

NUMBERS = 0.9  # share of the present words that are numbers, in a column of numbers
UNIQUE = 0.5  # share of different words among the present ones, above which they are near-unique
LONG = 6.0  # words of a value on average, from which near-unique values are texts and not names
ENOUGH = 20  # rows from which a column can be recognised as an id, a copy of the label or near-unique
_ID_NAME = re.compile(r"(?:^|[\W_])(?:id|ids|uid|uuid|key|index|idx|row)$", re.IGNORECASE)
_ID_ENDING = re.compile(r"(?<=[a-z])I[dD]$")
LEFT_OUT = "left out"


@dataclass(frozen=True)
class Kind:
    """name: "number", "category", "date", "text" or "left out"; why: for a column that is left out."""

    name: str
    why: str = ""
    format: str | None = None  # of dates that are words


def kind_of(
    name: str, column: Any, labels: np.ndarray | None, given: Mapping[str, str], rows: np.ndarray | None = None
) -> Kind:
    """The kind of a column of the source.

    labels: (N,) class indices, to recognise a copy of them
    given: the kinds that the user has set, by column
    rows: (N,) the numbers of the rows, where they are a sample of a larger table
    """
    text = values.words(column)
    present = len(text) - text.null_count
    if name in given:
        wanted = given[name]
        if wanted == "number" and values.is_time(column):
            wanted = "date"
        return Kind(wanted, "as you asked" if wanted == LEFT_OUT else "")
    if not present:
        return Kind(LEFT_OUT, "it is empty")
    distinct = len(values.counts_of(text)) if not values.is_number(column) else _distinct(values.numbers(column).values)
    if distinct == 1 and 1 < present == len(text):
        return Kind(LEFT_OUT, "it is constant")
    if labels is not None and _is_copy(text, labels, distinct):
        return Kind(LEFT_OUT, "it is a copy of the label")
    if values.is_category(column):
        return _of_words(text, present, distinct)
    if values.is_time(column):
        return Kind("date")
    found = values.numbers(column)
    if not found.others.sum() > (1 - NUMBERS) * present:
        return Kind(LEFT_OUT, "it numbers the rows") if _numbers_rows(name, found.values, rows) else Kind("number")
    format, parsed = dates.time_format(text)
    if parsed >= dates.TIMES * present:
        return Kind("date", format=format)
    return _of_words(text, present, distinct)


def _distinct(numbers: np.ndarray) -> int:
    return len(np.unique(numbers[~np.isnan(numbers)]))


def _of_words(text: Any, present: int, distinct: int) -> Kind:
    if present < ENOUGH or distinct <= max(ENOUGH, UNIQUE * present):
        return Kind("category")
    sample = text.drop_null().slice(0, 1000).to_pylist()
    if sum(len(value.split()) for value in sample) >= LONG * len(sample):
        return Kind("text")
    return Kind(LEFT_OUT, f"it has {distinct:,} different words in {counted(present, 'row')}")


def _numbers_rows(name: str, numbers: np.ndarray, rows: np.ndarray | None) -> bool:
    """Different whole numbers that are in order, dense, or named like an id."""
    if len(numbers) < ENOUGH or not np.isfinite(numbers).all() or (numbers != np.floor(numbers)).any():
        return False
    if _distinct(numbers) < len(numbers):
        return False
    named = bool(_ID_NAME.search(name) or _ID_ENDING.search(name))
    return named or bool((np.diff(numbers) == (1 if rows is None else np.diff(rows))).all())


def _is_copy(text: Any, labels: np.ndarray, distinct: int) -> bool:
    """Whether every label has one word of its own, and the other way round."""
    classes = len(np.unique(labels))
    if len(labels) < ENOUGH or classes < 2 or distinct != classes or text.null_count:
        return False
    codes = text.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    return len(np.unique(np.stack([codes, labels]), axis=1).T) == classes
