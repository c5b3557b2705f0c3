"""The index of a pandas frame, saved as a column, is no feature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet
import pytest

from soseleto.data import Reading, as_examples, read_pair


def indexed(path: Path, start: float = 0.0) -> Path:
    """A frame without two of its rows, saved with its index."""
    frame = pandas.DataFrame({"a": start + np.arange(8) * 0.5, "b": np.arange(8)[::-1] * 0.1, "label": ["x", "y"] * 4})
    frame = frame.drop([1, 2])
    if path.suffix == ".csv":
        frame.to_csv(path)
        if path.stem == "twice":
            pandas.read_csv(path).to_csv(path)  # "Unnamed: 0" beside a new index
    else:
        frame.rename_axis("row" if path.stem == "named" else None).to_parquet(path)
    return path


@pytest.mark.parametrize("name", ["s.csv", "twice.csv", "s.parquet", "named.parquet"])
def test_a_pandas_index_is_no_feature_and_that_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    pair = read_pair(indexed(tmp_path / name), indexed(tmp_path / "other" / name, 0.25), mode="noisy")
    assert pair.columns == ("a", "b")
    said = [str(problem) for problem in pair.problems if problem.kind == "index"]
    assert [line.partition(":")[0] for line in said] == ["source", "target"]
    assert "the pandas index" in said[0]
    assert "is not used as a feature" in said[0]


def test_an_index_that_is_named_as_the_ids_is_used(tmp_path: Path) -> None:
    reading = Reading(id_column="__index_level_0__")
    read = as_examples(indexed(tmp_path / "s.parquet"), name="source", reading=reading)
    assert read.ids == ("0", "3", "4", "5", "6", "7")
    assert read.inputs.shape == (6, 2)


def test_damaged_pandas_metadata_is_ignored(tmp_path: Path) -> None:
    for metadata in (b"[]", b"{", b'{"index_columns": 3}', b'{"index_columns": [{"kind": "range"}]}'):
        whole = pyarrow.table({"a": [1.0, 2.0], "label": ["x", "y"]}).replace_schema_metadata({b"pandas": metadata})
        pyarrow.parquet.write_table(whole, tmp_path / "s.parquet")
        assert as_examples(tmp_path / "s.parquet", name="source").inputs.tolist() == [[1.0], [2.0]]
