"""Problems found before training: all of them in one list, each with the examples it concerns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from soseleto.errors import DataError

_SHOWN = 5


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with one of the data sets.

    where: "source", "target" or "test"
    kind: a short word for machines, such as "unreadable" or "duplicate"
    text: one sentence for people
    ids: the examples to leave out, which skip_bad does
    stops: whether training should not start with it
    """

    where: str
    kind: str
    text: str
    ids: tuple[str, ...] = ()
    stops: bool = True

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for the run folder."""
        return {
            "where": self.where,
            "kind": self.kind,
            "text": self.text,
            "ids": list(self.ids),
            "stops": self.stops,
        }


class ProblemsError(DataError):
    """The data have problems that should be seen to first; ``problems`` lists them all."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        stopping = [problem for problem in problems if problem.stops]
        count = f"{len(stopping)} problem{'s' if len(stopping) != 1 else ''}"
        lines = "".join(f"\n  - {problem}" for problem in stopping)
        super().__init__(
            f"the data have {count}: mend them, or go on without these examples with skip_bad=True (--skip-bad).{lines}"
        )


def some(items: Sequence[str]) -> str:
    """The first few, and how many more there are."""
    shown = ", ".join(items[:_SHOWN])
    more = len(items) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
