"""The values of one column of a pyarrow table, read as words or numbers; missing ones are None or NaN."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from soseleto.errors import need

_need = partial(need, to="reading tables")

# Compared in lower case and without surrounding blanks.
MISSING = ("", "?", "-", "--", ".", "na", "n/a", "#n/a", "#na", "nan", "-nan", "null", "none", "nil", "<na>")
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?[iI][nN][fF]([iI][nN][iI][tT][yY])?$"
_WHOLE = re.compile(r"^([+-]?\d+)\.0*$")


class Numbers(NamedTuple):
    values: np.ndarray  # (N,) float64, NaN where missing
    others: np.ndarray  # (N,) bool: a word in place of a number


def is_words(column: Any) -> bool:
    types, kind = _need("pyarrow").types, column.type
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def is_number(column: Any) -> bool:
    types, kind = _need("pyarrow").types, column.type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def is_category(column: Any) -> bool:
    """Whether the column's own type says that it holds categories: pandas categories, booleans."""
    types = _need("pyarrow").types
    return bool(types.is_dictionary(column.type) or types.is_boolean(column.type))


def is_time(column: Any) -> bool:
    types = _need("pyarrow").types
    return bool(types.is_date(column.type) or types.is_timestamp(column.type))


def is_readable(column: Any) -> bool:
    """Whether the type is one of those above; lists, structures and bytes are not."""
    types = _need("pyarrow").types
    return any(test(column) for test in (is_words, is_number, is_category, is_time)) or types.is_null(column.type)


def words(column: Any) -> Any:
    """The column as trimmed text, with null for every spelling of a missing value."""
    pyarrow, compute = _need("pyarrow"), _need("pyarrow.compute")
    if pyarrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    trimmed = compute.utf8_trim_whitespace(column.cast(pyarrow.string()))
    missing = compute.is_in(compute.utf8_lower(trimmed), value_set=pyarrow.array(MISSING))
    found = compute.if_else(missing, pyarrow.scalar(None, pyarrow.string()), trimmed)
    return found.combine_chunks() if isinstance(found, pyarrow.ChunkedArray) else found


def numbers(column: Any) -> Numbers:
    """The column as numbers; a word that is no number is missing too."""
    pyarrow, compute = _need("pyarrow"), _need("pyarrow.compute")
    if is_number(column) and not pyarrow.types.is_decimal(column.type):
        values = column.cast(pyarrow.float64(), safe=False).to_numpy()
        return Numbers(np.array(values, dtype=np.float64), np.zeros(len(values), dtype=bool))
    text = words(column)
    if pyarrow.types.is_boolean(column.type):
        text = compute.replace_with_mask(text, compute.equal(text, "true").fill_null(False), pyarrow.scalar("1"))
        text = compute.replace_with_mask(text, compute.equal(text, "false").fill_null(False), pyarrow.scalar("0"))
    matching = compute.match_substring_regex(text, _NUMBER).fill_null(False)
    parsed = compute.if_else(matching, text, pyarrow.scalar(None, pyarrow.string())).cast(pyarrow.float64())
    values = np.array(parsed.to_numpy(zero_copy_only=False), dtype=np.float64)
    others = compute.and_(text.is_valid(), compute.invert(matching)).to_numpy(zero_copy_only=False)
    return Numbers(values, others)


def plain(word: str) -> str:
    """One spelling of booleans and whole numbers, which file formats write differently: true for True, 2 for 2.0."""
    lower = word.lower()
    return lower if lower in ("true", "false") else _WHOLE.sub(r"\1", word)


def counts_of(text: Any) -> list[tuple[str, int]]:
    """Every word and how often it occurs, most frequent first, then in alphabetical order."""
    compute = _need("pyarrow.compute")
    found = compute.value_counts(text.drop_null()).to_pylist()
    return sorted(((one["values"], one["counts"]) for one in found), key=lambda pair: (-pair[1], pair[0]))
