"""Values of a table that are not of the kind that the training's column has: they are read as missing, or as unseen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from soseleto.data import cells
from soseleto.data.columns import OTHER, Category, Column, Date, Number, Text
from soseleto.data.preparation import TablePreparation
from soseleto.data.readers.large_tables import in_pieces
from soseleto.data.readers.problems import Problem, some

_WORDS = 1000  # such values, of which some are shown
_OTHER_KIND = 0.5  # share among the present values, from which a column of numbers or dates is of another kind
_UNSEEN = 0.9  # the same of categories, whose values may well be new
_NOT = {Number: "numbers", Date: "dates in a format that is certain", Category: "among the source's categories"}


@dataclass(frozen=True)
class Unusable:
    """The unusable values of one column.

    words: some of them
    known: values of the source, for the message
    source: whether the table is the source itself
    """

    column: Column
    count: int
    present: int
    words: tuple[str, ...]
    known: tuple[str, ...]
    source: bool

    @property
    def is_most(self) -> bool:
        return self.count > (_UNSEEN if isinstance(self.column, Category) else _OTHER_KIND) * self.present

    def problem(self, where: str) -> Problem:
        """It stops where most values are unusable, but unseen categories do not."""
        unseen = isinstance(self.column, Category)
        stops = self.is_most and not unseen and not self.source
        fix = "write them like those" if stops else f"they are read as {'one unseen value' if unseen else 'missing'}"
        number = f"{self.count:,} value that is" if self.count == 1 else f"{self.count:,} values that are"
        shown = some([repr(word) for word in dict.fromkeys(self.words)])
        beside = "" if self.source or not self.known else f"; the source has {', '.join(self.known)}"
        text = f"column {self.column.name!r} has {number} not {_NOT[type(self.column)]} ({shown}{beside}): {fix}."
        kind = "unseen" if unseen else f"not {_NOT[type(self.column)].split()[0]}"
        return Problem(where, kind, text, stops=stops)


def unusable_values(table: Any, preparation: TablePreparation, *, source: bool = False) -> list[Unusable]:
    """The columns with such values; of categories, only those whose values are nearly all unseen."""
    known = {one.name: one.examples for one in preparation.seen}
    found = []
    for column in preparation.formatted_as(table):
        if isinstance(column, Text) or (isinstance(column, Category) and (source or not column.values)):
            continue
        count, present, words = _counted(column, table)
        one = Unusable(column, count, present, words, known.get(column.name, ()), source)
        if one.is_most or (count and not isinstance(column, Category)):
            found.append(one)
    return found


def _counted(column: Column, table: Any) -> tuple[int, int, tuple[str, ...]]:
    """Unusable and present values, and some of the unusable ones as words."""
    count, present = 0, 0
    shown: list[str] = []
    if isinstance(column, Number) and cells.is_number(table[column.name]):
        return 0, 0, ()
    for piece in in_pieces(table.select([column.name])):
        words = cells.words(piece[column.name])
        unusable = np.flatnonzero(_is_unusable(column, piece[column.name], words))
        count, present = count + len(unusable), present + len(words) - words.null_count
        shown += words.take(unusable[: _WORDS - len(shown)]).to_pylist()
    return count, present, tuple(shown)


def _is_unusable(column: Column, found: Any, words: Any) -> np.ndarray:
    """(N,) bool"""
    if isinstance(column, Number):
        return cells.numbers(found).is_word
    if isinstance(column, Date):
        present = words.is_valid().to_numpy(zero_copy_only=False)
        return np.asarray(np.isnat(cells.times(found, column.format)) & present)
    return np.asarray(column.read(found)[:, 0] == OTHER)
