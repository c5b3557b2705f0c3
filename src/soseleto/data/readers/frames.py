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
    """Rows of ``first`` and then of ``second``, in the form of ``first``: data frames, sparse matrices or arrays.

    Columns of numbers get a type that holds both, so that whole numbers may have gaps in ``second``.
    """
    if is_frame(first):
        if hasattr(first, "to_arrow"):
            polars = need("polars", to="joining data frames")
            same = second.select(first.columns) if is_frame(second) else polars.DataFrame(second, schema=first.columns)
            return polars.concat([first, same], how="vertical_relaxed")
        pandas = need("pandas", to="joining data frames")
        if not is_frame(second):
            second = pandas.DataFrame(second, columns=first.columns)
        kinds = {name: kind for name, kind in first.dtypes.items() if not pandas.api.types.is_numeric_dtype(kind)}
        return pandas.concat([first, second.astype(kinds)], ignore_index=True)
    if hasattr(first, "toarray"):
        return need("scipy.sparse", to="joining sparse matrices").vstack([first, second]).tocsr()
    return np.concatenate([np.asarray(first), np.asarray(second)])
