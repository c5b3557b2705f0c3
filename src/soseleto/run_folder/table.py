"""Columns of equal length by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


class Table(Mapping[str, np.ndarray]):
    """Columns of equal length by name; convert with ``to_pandas`` or ``to_arrow``."""

    def __init__(self, columns: Mapping[str, np.ndarray]) -> None:
        self._columns = dict(columns)

    def __getitem__(self, column: str) -> np.ndarray:
        return self._columns[column]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        """The number of columns, as for any mapping; ``rows`` is the number of rows."""
        return len(self._columns)

    @property
    def rows(self) -> int:
        return len(next(iter(self._columns.values())))

    def head(self, n: int = 10) -> Table:
        return Table({name: column[:n] for name, column in self._columns.items()})

    def tail(self, n: int = 10) -> Table:
        return Table({name: column[-n:] for name, column in self._columns.items()})

    def to_pandas(self) -> Any:
        import pandas

        return pandas.DataFrame(self._columns)

    def to_arrow(self) -> Any:
        import pyarrow

        return pyarrow.table(self._columns)

    def __repr__(self) -> str:
        shown = min(10, self.rows)
        lines = ["  ".join(f"{name:>12}" for name in self)]
        for row in range(shown):
            lines.append("  ".join(f"{_cell(column[row]):>12}" for column in self._columns.values()))
        return "\n".join(lines) + (f"\n... {self.rows} rows" if self.rows > shown else "")


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (float, np.floating)) else str(value)
