"""Data frames of pandas and polars, and columns in memory, as pyarrow tables; mixed columns become text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from soseleto.errors import need


def is_frame(data: Any) -> bool:
    return hasattr(data, "columns") and hasattr(data, "to_numpy")


def frame_table(data: Any) -> Any:
    """A data frame as a pyarrow table that keeps names and kinds; the index of pandas is left out."""
    if hasattr(data, "to_arrow"):  # polars
        return data.to_arrow()
    return column_table({str(name): data.iloc[:, at] for at, name in enumerate(data.columns)})


def column_table(columns: Mapping[str, Sequence[Any]]) -> Any:
    """A pyarrow table of named columns."""
    pyarrow = need("pyarrow", to="reading a data frame")
    return pyarrow.table({name: _array(pyarrow, values) for name, values in columns.items()})


def _array(pyarrow: Any, values: Any) -> Any:
    try:
        return pyarrow.array(values, from_pandas=True)
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):  # mixed types
        return pyarrow.array([None if _is_missing(value) else str(value) for value in values], pyarrow.string())


def _is_missing(value: Any) -> bool:
    return value is None or value != value


def stacked(first: Any, second: Any) -> Any:
    """Rows of ``first`` and then of ``second``, in the form of ``first``: data frames, sparse matrices or arrays."""
    if is_frame(first):
        if hasattr(first, "vstack"):  # polars
            return first.vstack(second)
        pandas = need("pandas", to="joining data frames")
        return pandas.concat([first, second.astype(dict(first.dtypes))], ignore_index=True)
    if hasattr(first, "toarray"):
        return need("scipy.sparse", to="joining sparse matrices").vstack([first, second]).tocsr()
    return np.concatenate([np.asarray(first), np.asarray(second)])
