"""Columns that are the index of a pandas data frame, which says nothing about an example and is not a feature."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from soseleto.data.readers.problems import Problem, some

# The names that pandas gives an index without one: in Parquet, and after reading a CSV file back.
_UNNAMED = re.compile(r"__index_level_[0-9]+__|Unnamed: 0(\.[0-9]+)?")


def is_index(column: str, place: int) -> bool:
    """Whether the column has the name of an unnamed index; in a CSV file that is an empty name in the first place."""
    return _UNNAMED.fullmatch(column) is not None or (not column and place == 0)


def index_columns(table: Any) -> list[str]:
    """The index columns of a pyarrow table: by their names, and by what pandas recorded in a Parquet file."""
    recorded = _recorded(table)
    return [name for at, name in enumerate(table.column_names) if is_index(name, at) or name in recorded]


def _recorded(table: Any) -> list[str]:
    metadata = (table.schema.metadata or {}).get(b"pandas", b"{}")
    try:
        found = json.loads(metadata).get("index_columns", [])
    except (ValueError, AttributeError, RecursionError):  # written by something else
        return []
    return [name for name in found if isinstance(name, str)] if isinstance(found, list) else []


def index_problem(name: str, columns: Sequence[str]) -> tuple[Problem, ...]:
    """The message that these columns of the set ``name`` are left out; none where there are none."""
    if not columns:
        return ()
    listed = some([repr(column) for column in columns])
    text = f"the pandas index {listed} is not used as a feature (rename it to use it; index=False leaves it out)."
    return (Problem(name, "index", text, stops=False),)
