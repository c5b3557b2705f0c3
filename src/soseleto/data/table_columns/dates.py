"""The dates and times of one column: as such, as words in a known format, or as numbers that count from 1970.

An offset such as ``+02:00`` is converted to UTC, and fractions of a second are left out.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from soseleto.data import on_disk
from soseleto.data.table_columns.values import is_time, numbers, words
from soseleto.errors import need

_need = partial(need, to="reading tables")

FORMATS = (
    "%Y-%m-%d",
    "%Y-%m-%d %H:%M:%S",
    "%Y-%m-%dT%H:%M:%S",
    "%Y-%m-%d %H:%M",
    "%Y/%m/%d",
    "%d.%m.%Y",
    "%m/%d/%Y",
    "%d/%m/%Y",
)
TIMES = 0.95  # share of the present words that are times, in a column of times
_FRACTION = r"(?:\.\d+)? ?"
_OFFSET = r"[+-]\d\d(?::?\d\d)?"
_UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}  # in a second
_YEAR, _YEARS = 31_556_952.0, 230  # in seconds; the largest number is 1 to 230 years from 1970, so its unit is certain


def times(column: Any, format: str | None) -> np.ndarray:
    """The column as (N,) datetime64[s], NaT where missing or not in ``format``.

    format: of words, or the unit of numbers; None: only a column of times is read
    """
    pyarrow = _need("pyarrow")
    if is_time(column):
        zone = getattr(column.type, "tz", None)
        return np.asarray(column.cast(pyarrow.timestamp("s", zone), safe=False).to_numpy(), dtype="datetime64[s]")
    if format is None:
        return np.full(len(column), "NaT", dtype="datetime64[s]")
    if format in _UNITS:
        seconds = np.floor(numbers(column).values / _UNITS[format])
        known = np.abs(seconds) < 2**53  # not NaN
        return np.where(
            known, np.where(known, seconds, 0).astype(np.int64).astype("datetime64[s]"), np.datetime64("NaT")
        )
    text = words(column)
    parsed = np.asarray(_parsed(_local(text), format).to_numpy(zero_copy_only=False), dtype="datetime64[s]")
    return parsed - _offsets(text)


def time_format(text: Any) -> tuple[str, int]:
    """The format in which most of these words are times, and their number."""
    local = _local(text)
    counts = [_count(local, format) for format in FORMATS]
    best = int(np.argmax(counts))
    return FORMATS[best], counts[best]


def spelling(column: Any, own: str | None) -> str | None:
    """The format or unit in which to read another table's column; None where none is certain, and for times.

    own: the training's, which is taken unless another one reads more; that must be the only one to read all values, or
    the only one to read most of them: whether 01/02 is in January is not guessed
    """
    if is_time(column):
        return None
    present, counted, largest = 0, 0, 0.0
    counts = np.zeros(len(FORMATS), dtype=np.int64)
    for first in range(0, len(column), on_disk.PIECE):
        piece = column.slice(first, on_disk.PIECE)
        text, found = words(piece), numbers(piece)
        present += len(text) - text.null_count
        counted += int((~np.isnan(found.values)).sum())
        largest = max(largest, float(np.nan_to_num(np.abs(found.values), posinf=np.inf).max(initial=0)))
        local = _local(text)
        whole = _with_whole_years(local)
        counts += [_count(local if format == own else whole, format) for format in FORMATS]
    if counted == present > 0:
        return next((unit for unit, per in _UNITS.items() if 1 <= largest / per / _YEAR <= _YEARS), None)
    if own in FORMATS and counts[FORMATS.index(own)] == counts.max():
        return own
    likely = counts == present if counts.max() == present else counts > present / 2
    return FORMATS[int(likely.argmax())] if likely.sum() == 1 else None


def _count(local: Any, format: str) -> int:
    return len(local) - int(_parsed(local, format).null_count)


def _parsed(local: Any, format: str) -> Any:
    return _need("pyarrow.compute").strptime(local, format=format, unit="s", error_is_null=True)


def _local(text: Any) -> Any:
    """The words up to their seconds, without fraction and offset."""
    pattern = rf"(:\d\d){_FRACTION}(?:Z|UTC|{_OFFSET})?$"
    return _need("pyarrow.compute").replace_substring_regex(text, pattern=pattern, replacement=r"\1")


def _with_whole_years(local: Any) -> Any:
    """The words with null for 31.01.20, whose year would be 20."""
    pyarrow, compute = _need("pyarrow"), _need("pyarrow.compute")
    whole = compute.match_substring_regex(local, r"\d{4}")
    return compute.if_else(whole, local, pyarrow.scalar(None, pyarrow.string()))


def _offsets(text: Any) -> np.ndarray:
    """(N,) timedelta64[s]: how far the words are ahead of UTC."""
    compute = _need("pyarrow.compute")
    found = compute.extract_regex(text, pattern=rf":\d\d{_FRACTION}(?P<offset>{_OFFSET})$")
    encoded = compute.struct_field(found, "offset").dictionary_encode()
    seconds = np.array([_seconds(offset) for offset in encoded.dictionary.to_pylist()] + [0], dtype="timedelta64[s]")
    return seconds[encoded.indices.fill_null(len(seconds) - 1).to_numpy(zero_copy_only=False)]


def _seconds(offset: str) -> int:
    digits = offset[1:].replace(":", "").ljust(4, "0")
    return (-60 if offset[0] == "-" else 60) * (60 * int(digits[:2]) + int(digits[2:]))
