"""Problems found before training, each with the affected examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from soseleto.errors import DataError, counted

_SHOWN = 5


@dataclass(frozen=True)
class Problem:
    """One problem of one data set.

    where: "source", "target", "test" or "unlabelled set"
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
        return {
            "where": self.where,
            "kind": self.kind,
            "text": self.text,
            "ids": list(self.ids),
            "stops": self.stops,
        }


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


def some(items: Sequence[str]) -> str:
    """The first few items, and the number of the others."""
    shown = ", ".join(items[:_SHOWN])
    more = len(items) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
