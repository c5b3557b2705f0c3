"""The same table in another file format is the same inputs or a message."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from soseleto.data import ProblemsError, Reading, TablePreparation, read_pair
from soseleto.data.columns import FIRST, OTHER
from soseleto.data.preparation import prepared
from soseleto.data.tables import frame_table, load
from soseleto.errors import DataError

FORMATS = ("csv", "parquet", "jsonl")
CATEGORIES = Reading(categorical_columns=["zone"])


def visits(rows: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    zone = pd.Series(draw.integers(1, 5, rows).astype(float)).where(draw.random(rows) > 0.1)
    frame = pd.DataFrame({"member": draw.random(rows) < 0.5, "zone": zone, "size": draw.normal(size=rows)})
    return frame.assign(label=np.where(frame["member"] ^ (draw.random(rows) < 0.2), "yes", "no"))


def saved(frame: pd.DataFrame, path: Path) -> Path:
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    elif path.suffix == ".parquet":
        frame.to_parquet(path)
    else:
        frame.to_json(path, orient="records", lines=True, date_format="iso", double_precision=15)
    return path


def fitted(**columns: list[object]) -> TablePreparation:
    return TablePreparation.fit(pa.table(columns))


@pytest.mark.parametrize("source", FORMATS)
def test_every_file_format_gives_the_same_inputs(source, tmp_path):
    pair = read_pair(saved(visits(200, 0), tmp_path / f"s.{source}"), visits(60, 1), mode="noisy", reading=CATEGORIES)
    assert [one.kind for one in pair.preparation.seen] == ["category", "category", "number"]
    kept = TablePreparation.from_dict(json.loads(json.dumps(pair.preparation.to_dict())))
    whole = visits(60, 1).astype({"zone": "Int64"})  # 2 for 2.0
    files = [saved(visits(60, 1), tmp_path / f"t.{ending}") for ending in FORMATS]
    files += [saved(whole, tmp_path / f"whole.{ending}") for ending in FORMATS]
    found = [prepared(load(file), kept, "new") for file in files]
    assert all(torch.equal(one, pair.target.inputs) for one in found)
    assert (found[0][:, :2] != OTHER).all()


def test_spellings_that_the_source_tells_apart_stay_apart():
    made = fitted(code=["1"] * 5 + ["1.0"] * 4 + ["True"] * 4 + ["true"] * 3 + ["07"] * 3)
    read = made.read(pa.table({"code": ["1", "1.0", "True", "true", "07", "TRUE", "7", "07.0"]}))[:, 0]
    assert read.tolist() == [FIRST, FIRST + 1, FIRST + 2, FIRST + 4, FIRST + 3, FIRST + 4, OTHER, FIRST + 3]


def test_values_of_another_kind_stop_fit_and_prediction():
    source, other = visits(100, 0), visits(60, 1)
    other = other.assign(size="large", member=["J", "N"] * 30)
    with pytest.raises(ProblemsError) as caught:
        read_pair(source, visits(40, 2), other, mode="noisy")
    stopping = [(one.where, one.kind) for one in caught.value.problems if one.stops]
    assert stopping == [("test", "not numbers")]
    made = read_pair(source, visits(40, 2), mode="noisy").preparation
    with pytest.raises(DataError, match=r"new: column 'size' has 60 values .*\('large'; the source has "):
        prepared(frame_table(other), made, "new")


def test_a_few_values_of_another_kind_are_missing():
    made = read_pair(visits(100, 0), visits(40, 2), mode="noisy").preparation
    some = visits(60, 1).astype({"size": object})
    some.loc[:9, "size"] = "unknown"
    few = prepared(frame_table(some), made, "new")
    empty = visits(60, 1)
    empty.loc[:9, "size"] = None
    assert torch.equal(few, made.read(frame_table(empty)))
    pair = read_pair(visits(100, 0), some, mode="noisy")
    assert [(one.kind, one.stops) for one in pair.problems if one.kind.startswith("not ")] == [
        ("not numbers", False),
    ]
