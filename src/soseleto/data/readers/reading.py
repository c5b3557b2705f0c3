"""The options of the file readers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from soseleto.data.text import Tokenizer
from soseleto.errors import UsageError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class Reading:
    """How files are read; an option that is None is chosen from the data.

    image_size: side of every image in pixels, or (height, width); default: the size of the source images, at most 224
    channels: 1 for grey, 3 for RGB; default: grey if all source images are grey
    label_column, path_column, id_column: columns of a table; default: found by their usual names
    truth_column: column of a table with the correct labels, where they are known
    before_column: column of the target's table with the labels from before a check; it is not a feature
    numeric_columns, categorical_columns, text_columns, drop_columns: columns of a table whose kind is not inferred
    tokenizer: of a pretrained text model, for which one column of text is read
    encoding: of text files (.csv, .tsv, .jsonl) and of bytes in place of text, such as "latin-1"; default: UTF-8
    merge_labels: make one class of names that differ only in case, surrounding blanks or Unicode form
    root: folder that relative paths in a table start from; default: the table's own folder
    allow_outside: follow paths and links that lead out of that folder
    cache: folder for decoded images and tokens; default: SOSELETO_CACHE, else ~/.cache/soseleto/images
    workers: number of decoding processes, 0 for none; default: one per core if there are many images
    """

    image_size: int | tuple[int, int] | None = None
    channels: int | None = None
    path_column: str | None = None
    label_column: str | None = None
    id_column: str | None = None
    truth_column: str | None = None
    before_column: str | None = None
    numeric_columns: Sequence[str] = ()
    categorical_columns: Sequence[str] = ()
    text_columns: Sequence[str] = ()
    drop_columns: Sequence[str] = ()
    tokenizer: Tokenizer | None = None
    encoding: str | None = None
    merge_labels: bool = False
    root: str | Path | None = None
    allow_outside: bool = False
    cache: str | Path | None = None
    workers: int | None = None

    def __post_init__(self) -> None:
        sides = self.sides
        if sides is not None and not (len(sides) == 2 and all(isinstance(s, int) and 4 <= s <= 4096 for s in sides)):
            raise UsageError(
                f"image_size must be one side or (height, width), each from 4 to 4096, got {self.image_size!r}."
            )
        if self.channels not in (None, 1, 3):
            raise UsageError(f"channels must be 1 (grey) or 3 (RGB), got {self.channels!r}.")
        _check_encoding(self.encoding)
        _check_kinds(self)
        if self.workers is not None and self.workers < 0:
            raise UsageError(f"workers must be 0 or more, got {self.workers}.")

    @property
    def sides(self) -> tuple[int, int] | None:
        """(height, width) of every image, if given."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size


KINDS = {
    "numeric_columns": "number",
    "categorical_columns": "category",
    "text_columns": "text",
    "drop_columns": "left out",
}


def given_kinds(reading: Reading) -> dict[str, str]:
    """The kinds that the user has set, by column."""
    return {name: kind for option, kind in KINDS.items() for name in getattr(reading, option)}


def _check_kinds(reading: Reading) -> None:
    given: list[str] = []
    for option in KINDS:
        names = getattr(reading, option)
        if isinstance(names, str):
            raise UsageError(f"{option} must be a list of column names, got {names!r}: write {option}=[{names!r}].")
        given += names
    twice = sorted({name for name in given if given.count(name) > 1})
    if twice:
        raise UsageError(f"column {twice[0]!r} is given two kinds: name it once among {', '.join(KINDS)}.")


def _check_encoding(encoding: str | None) -> None:
    try:
        "a".encode(encoding or "utf-8")
    except (LookupError, ValueError) as error:
        hint = did_you_mean(str(encoding), ("utf-8", "utf-16", "latin-1", "cp1252"))
        raise UsageError(
            f"unknown encoding {encoding!r}{hint}: give one that Python knows, such as latin-1."
        ) from error


def refuse_keywords(keywords: Mapping[str, object], *, function: str) -> None:
    """Raise for keywords that ``function`` does not take; a field of ``Reading`` gets the line to type."""
    if not keywords:
        return
    options = [field.name for field in fields(Reading)]
    unknown = next((name for name in keywords if name not in options), None)
    if unknown is not None:
        hint = did_you_mean(unknown, ["reading", *options])
        raise TypeError(f"{function}() got an unexpected keyword argument {unknown!r}{hint}")
    inside = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
    raise UsageError(f"{inside} goes into reading: type {function}(..., reading=soseleto.data.Reading({inside})).")
