"""The cells of one column of a pyarrow table, read as words, numbers or times; missing ones are null, NaN or NaT."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np

from soseleto.errors import UsageError, counted, need

# Compared in lower case and without surrounding blanks.
MISSING = ("", "?", "-", "--", ".", "na", "n/a", "#n/a", "#na", "nan", "-nan", "null", "none", "nil", "<na>")
_NUMBER = r"^[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?$|^[+-]?[iI][nN][fF]([iI][nN][iI][tT][yY])?$"

DIGITS = "%Y%m%d"
ISO = ("%Y-%m-%d", "%Y-%m-%d %H:%M:%S", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%d %H:%M")
FORMATS = (  # of two digits, the years 69 to 99 are 1969 to 1999, and 00 to 68 are 2000 to 2068
    *ISO,
    "%Y/%m/%d",
    "%d.%m.%Y",
    "%m/%d/%Y",
    "%d/%m/%Y",
    "%d.%m.%y",
    "%m/%d/%y",
    "%d/%m/%y",
    "%b %d %Y",  # short and long names of months, also with hyphens, commas and dots between
    "%d %b %Y",
    "%d %b %y",
    DIGITS,
)
_DIGITS = r"^(?:19|20)\d{6}$"
_FRACTION = r"(?:\.\d+)? ?"
_OFFSET = r"[+-]\d\d(?::?\d\d)?"

_FORMS = {
    "text": ("string", "large_string", "string_view"),
    "number": ("integer", "floating", "decimal"),
    "category": ("dictionary", "boolean"),  # dictionaries are categories of pandas
    "time": ("date", "timestamp"),
    "empty": ("null",),
}

LEFT_OUT = "left out"
_NUMBERS = 0.9  # share of the present words that are numbers, in a column of numbers
_TIMES = 0.95  # share of the present words that are times, in a column of times
_UNIQUE = 0.5  # share of different words among the present ones, above which they are near-unique
_LONG = 6.0  # words of a value on average, from which near-unique values are texts and not names
_ENOUGH = 20  # rows from which a column can be recognised as an id, a copy of the label or near-unique
_ID_NAME = re.compile(r"(?:^|[\W_])(?:id|ids|uid|uuid|key|index|idx|row)$", re.IGNORECASE)
# The names that pandas gives an index without one: in a CSV file, after reading it back, and in Parquet.
INDEX = re.compile(r"(Unnamed: 0(\.[0-9]+)?|__index_level_[0-9]+__)?")
_ID_ENDING = re.compile(r"(?<=[a-z])I[dD]$")
_SHOWN = 3  # values of a column in the plan
_LONGEST = 24  # characters of a value in the plan


def pyarrow() -> Any:
    return need("pyarrow", to="reading tables")


def compute() -> Any:
    return need("pyarrow.compute", to="reading tables")


def form_of(column: Any) -> str | None:
    """The form of the cells by the column's own type, one of ``_FORMS``; None of lists, structures and bytes."""
    tests = vars(pyarrow().types)
    return next((form for form, names in _FORMS.items() if any(tests[f"is_{n}"](column.type) for n in names)), None)


def words(column: Any) -> Any:
    """The column as trimmed text, with null for every spelling of a missing value."""
    pa, pc = pyarrow(), compute()
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    trimmed = pc.utf8_trim_whitespace(column.cast(pa.string()))
    missing = pc.is_in(pc.utf8_lower(trimmed), value_set=pa.array(MISSING))
    present = pc.if_else(missing, pa.scalar(None, pa.string()), trimmed)
    return present.combine_chunks() if isinstance(present, pa.ChunkedArray) else present


class Numbers(NamedTuple):
    values: np.ndarray  # (N,) float64, NaN where missing
    is_word: np.ndarray  # (N,) bool: a word in place of a number


def numbers(column: Any) -> Numbers:
    """The column as numbers; a word that is no number is missing too."""
    pa, pc = pyarrow(), compute()
    if form_of(column) == "number" and not pa.types.is_decimal(column.type):
        values = column.cast(pa.float64(), safe=False).to_numpy()
        return Numbers(np.array(values, dtype=np.float64), np.zeros(len(values), dtype=bool))
    text = words(column)
    if pa.types.is_boolean(column.type):
        text = pc.if_else(pc.equal(text, "true"), "1", "0")
    matching = pc.match_substring_regex(text, _NUMBER).fill_null(False)
    parsed = pc.if_else(matching, text, pa.scalar(None, pa.string())).cast(pa.float64())
    is_word = pc.and_(text.is_valid(), pc.invert(matching)).to_numpy(zero_copy_only=False)
    return Numbers(np.array(parsed.to_numpy(zero_copy_only=False), dtype=np.float64), is_word)


def categories(column: Any) -> Any:
    """The words in one spelling of booleans and whole numbers, which file formats write differently: true for True, 2
    for 2.0."""
    pa, pc = pyarrow(), compute()
    text = words(column)
    lower = pc.utf8_lower(text)
    text = pc.if_else(pc.is_in(lower, value_set=pa.array(["true", "false"])), lower, text)
    return pc.replace_substring_regex(text, pattern=r"^([+-]?\d+)\.0*$", replacement=r"\1")


def counts_of(text: Any) -> list[tuple[str, int]]:
    """Every word and how often it occurs, most frequent first, then in alphabetical order."""
    counts = compute().value_counts(text.drop_null()).to_pylist()
    return sorted(((entry["values"], entry["counts"]) for entry in counts), key=lambda pair: (-pair[1], pair[0]))


def times(column: Any, format: str | None) -> np.ndarray:
    """The column as (N,) datetime64[s] in UTC without fractions, NaT where missing or not a time.

    format: of the source's words; every table may also have times as such, or in ISO form
    """
    if form_of(column) == "time":
        zone = getattr(column.type, "tz", None)
        return np.asarray(column.cast(pyarrow().timestamp("s", zone), safe=False).to_numpy(), dtype="datetime64[s]")
    text = words(column)
    read = [_parsed(text, each) for each in dict.fromkeys((format or ISO[0], *ISO))]
    parsed = np.asarray(compute().coalesce(*read).to_numpy(zero_copy_only=False), dtype="datetime64[s]")
    return parsed - _offsets(text)


def _parsed(text: Any, format: str) -> Any:
    """Times without fraction and offset; null where %Y would read the two digits of 31.01.20."""
    pc, pa = compute(), pyarrow()
    local = pc.replace_substring_regex(text, pattern=rf"(:\d\d){_FRACTION}(?:Z|UTC|{_OFFSET})?$", replacement=r"\1")
    if "%b" in format:
        local = pc.replace_substring_regex(local, pattern=r"[-,. ]+", replacement=" ")
    if "%Y" in format:
        is_whole = pc.match_substring_regex(local, _DIGITS if format == DIGITS else r"\d{4}")
        local = pc.if_else(is_whole, local, pa.scalar(None, pa.string()))
    return pc.strptime(local, format=format, unit="s", error_is_null=True)


def _offsets(text: Any) -> np.ndarray:
    """(N,) timedelta64[s]: how far the words are ahead of UTC."""
    offset = compute().extract_regex(text, pattern=rf":\d\d{_FRACTION}(?P<offset>{_OFFSET})$")
    encoded = compute().struct_field(offset, "offset").dictionary_encode()
    seconds = np.array([_seconds(offset) for offset in encoded.dictionary.to_pylist()] + [0], dtype="timedelta64[s]")
    return seconds[encoded.indices.fill_null(len(seconds) - 1).to_numpy(zero_copy_only=False)]


def _seconds(offset: str) -> int:
    digits = offset[1:].replace(":", "").ljust(4, "0")
    return (-60 if offset[0] == "-" else 60) * (60 * int(digits[:2]) + int(digits[2:]))


# Kinds of columns, decided on the source alone


@dataclass(frozen=True)
class Kind:
    """name: "number", "category", "date", "text" or "left out"; why: for a column that is left out."""

    name: str
    why: str = ""
    format: str | None = None  # of dates that are words


def kind_of(name: str, column: Any, labels: np.ndarray | None, chosen: Mapping[str, str]) -> Kind:
    """The kind of a column of the source.

    labels: (N,) class indices, to recognise a copy of them
    chosen: the kinds that the user has set, by column
    """
    form = form_of(column)
    if form is None:
        if chosen.get(name, LEFT_OUT) != LEFT_OUT:
            raise UsageError(f"column {name!r} holds {column.type}, which cannot be read as {chosen[name]}.")
        return Kind(LEFT_OUT, f"it holds {column.type}")
    text = words(column)
    present = len(text) - text.null_count
    if name in chosen:
        kind = "date" if chosen[name] == "number" and form == "time" else chosen[name]
        return Kind(kind, "as you asked" if kind == LEFT_OUT else "")
    if INDEX.fullmatch(name):
        return Kind(LEFT_OUT, "it is the index of pandas")
    if not present:
        return Kind(LEFT_OUT, "it is empty")
    values = numbers(column).values[~np.isnan(numbers(column).values)] if form == "number" else None
    distinct = len(counts_of(text)) if values is None else len(np.unique(values))
    if distinct == 1 and 1 < present == len(text):
        return Kind(LEFT_OUT, "it is constant")
    if labels is not None and _is_copy(text, labels, distinct):
        return Kind(LEFT_OUT, "it is a copy of the label")
    if form == "category":
        return _kind_of_words(text, present, distinct)
    if form == "time":
        return Kind("date")
    if len(text) - _parsed(text, DIGITS).null_count == present:
        return Kind("date", format=DIGITS)
    read = numbers(column)
    if not read.is_word.sum() > (1 - _NUMBERS) * present:
        return Kind(LEFT_OUT, "it numbers the rows") if _numbers_rows(name, read.values) else Kind("number")
    times_in = [len(text) - _parsed(text, format).null_count for format in FORMATS]
    if max(times_in) >= _TIMES * present:
        return Kind("date", format=FORMATS[int(np.argmax(times_in))])
    return _kind_of_words(text, present, distinct)


def _kind_of_words(text: Any, present: int, distinct: int) -> Kind:
    if present < _ENOUGH or distinct <= max(_ENOUGH, _UNIQUE * present):
        return Kind("category")
    sample = text.drop_null().slice(0, 1000).to_pylist()
    if sum(len(value.split()) for value in sample) >= _LONG * len(sample):
        return Kind("text")
    return Kind(LEFT_OUT, f"it has {distinct:,} different words in {counted(present, 'row')}")


def _numbers_rows(name: str, numbers: np.ndarray) -> bool:
    """Different whole numbers that count up, or are named like an id."""
    if len(numbers) < _ENOUGH or not np.isfinite(numbers).all() or (numbers != np.floor(numbers)).any():
        return False
    if len(np.unique(numbers)) < len(numbers):
        return False
    return bool(_ID_NAME.search(name) or _ID_ENDING.search(name) or (np.diff(numbers) == 1).all())


def _is_copy(text: Any, labels: np.ndarray, distinct: int) -> bool:
    """Whether every label has one word of its own, and the other way round."""
    classes = len(np.unique(labels))
    if len(labels) < _ENOUGH or classes < 2 or distinct != classes or text.null_count:
        return False
    codes = text.dictionary_encode().indices.to_numpy(zero_copy_only=False)
    return len(np.unique(np.stack([codes, labels]), axis=1).T) == classes


@dataclass(frozen=True)
class Seen:
    """What the source has in a column, for the plan: its kind, missing values and a few others."""

    name: str
    kind: str
    missing: int
    examples: tuple[str, ...]
    why: str = ""  # it is left out

    @classmethod
    def of(cls, name: str, column: Any, kind: Kind) -> Self:
        if form_of(column) is None:
            return cls(name, kind.name, 0, (), kind.why)
        text = words(column)
        missing, shown = text.null_count, [value for value, _ in counts_of(text.slice(0, 10_000))[:_SHOWN]]
        if kind.name == "number":
            values = numbers(column).values
            missing, known = np.isnan(values).sum(), values[np.isfinite(values)]
            if len(known):
                shown = [f"{known.min():.6g} to {known.max():.6g}", f"median {np.median(known):.6g}"]
        return cls(name, kind.name, int(missing), tuple(map(_shortened, shown)), kind.why)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Self:
        return cls(**{**fields, "examples": tuple(fields["examples"])})


def _shortened(value: str) -> str:
    value = " ".join(value.split())
    return value if len(value) <= _LONGEST else f"{value[: _LONGEST - 1]}…"


def left_out(columns: Sequence[Seen]) -> tuple[str, ...]:
    """The names of the columns that are left out: titles, comments, ids."""
    return tuple(seen.name for seen in columns if seen.kind == LEFT_OUT)


def plan_of(columns: Sequence[Seen]) -> list[str]:
    """The columns of a table as lines to print: column, kind, missing values, a few values."""
    rows = [("column", "kind", "missing", "values")]
    rows += [(seen.name, seen.kind, f"{seen.missing:,}", seen.why or ", ".join(seen.examples)) for seen in columns]
    wide = [max(len(row[at]) for row in rows) for at in range(3)]
    return [f"  {a:<{wide[0]}}  {b:<{wide[1]}}  {c:>{wide[2]}}  {d}".rstrip() for a, b, c, d in rows]
