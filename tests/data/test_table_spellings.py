"""The same table in another file format, or with dates spelled otherwise, is the same inputs or a message."""

import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from fabricated import saved
from soseleto.data import ProblemsError, Reading, TablePreparation, read_pair
from soseleto.data.columns import FIRST, OTHER
from soseleto.data.preparation import prepared
from soseleto.data.tables import frame_table, load
from soseleto.errors import DataError

FORMATS = ("csv", "parquet", "jsonl")
CATEGORIES = Reading(categorical_columns=["zone"])


def visits(rows: int, seed: int) -> pd.DataFrame:
    draw = np.random.default_rng(seed)
    when = pd.Timestamp("2021-03-01") + pd.to_timedelta(draw.integers(0, 300 * 86_400, rows), unit="s")
    zone = pd.Series(draw.integers(1, 5, rows).astype(float)).where(draw.random(rows) > 0.1)
    frame = pd.DataFrame(
        {"member": draw.random(rows) < 0.5, "zone": zone, "when": when, "size": draw.normal(size=rows)}
    )
    return frame.assign(label=np.where(frame["member"] ^ (draw.random(rows) < 0.2), "yes", "no"))


def fitted(**columns: list[object]) -> TablePreparation:
    return TablePreparation.fit(pa.table(columns))


@pytest.mark.parametrize("source", FORMATS)
def test_every_file_format_gives_the_same_inputs(source, tmp_path):
    pair = read_pair(saved(visits(200, 0), tmp_path / f"s.{source}"), visits(60, 1), mode="noisy", reading=CATEGORIES)
    assert [one.kind for one in pair.preparation.seen] == ["category", "category", "date", "number"]
    kept = TablePreparation.from_dict(json.loads(json.dumps(pair.preparation.to_dict())))
    whole = visits(60, 1).astype({"zone": "Int64"})  # 2 for 2.0
    files = [saved(visits(60, 1), tmp_path / f"t.{ending}") for ending in FORMATS]
    files += [saved(whole, tmp_path / f"whole.{ending}") for ending in FORMATS]
    found = [prepared(load(file), kept, "new")[0] for file in files]
    assert all(torch.equal(one, pair.target.inputs) for one in found)
    assert (found[0][:, :2] != OTHER).all()
    assert found[0][:, 2].unique().numel() > 40  # no median in place of dates


def test_booleans_and_whole_numbers_have_one_spelling():
    made = fitted(code=["1"] * 5 + ["1.0"] * 4 + ["True"] * 4 + ["true"] * 3 + ["07"] * 3)
    read = made.read(pa.table({"code": ["1", "1.00", "True", "true", "07", "TRUE", "7", "07.0"]}))[:, 0]
    assert read.tolist() == [FIRST, FIRST, FIRST + 1, FIRST + 1, FIRST + 2, FIRST + 1, OTHER, FIRST + 2]


DAYS = pd.date_range("2021-01-05 10:30", periods=30, freq="25h")
SPELLED = {
    "z": [f"{day:%Y-%m-%dT%H:%M:%SZ}" for day in DAYS],
    "fraction": [f"{day:%Y-%m-%d %H:%M:%S}.250" for day in DAYS],
    "ahead": [f"{day + pd.Timedelta(hours=5, minutes=30):%Y-%m-%dT%H:%M:%S}+05:30" for day in DAYS],
    "behind": [f"{day - pd.Timedelta(hours=3, minutes=30):%Y-%m-%d %H:%M}-0330" for day in DAYS],
    "hours": [f"{day + pd.Timedelta(hours=1):%Y-%m-%d %H:%M:%S}.5+01" for day in DAYS],
    "zone": pa.array(DAYS.tz_localize("UTC").tz_convert("Asia/Tokyo")),
}


@pytest.mark.parametrize("source", ["times", "words"])
@pytest.mark.parametrize("spelled", SPELLED)
def test_times_are_read_in_every_spelling(source, spelled):
    made = fitted(when=list(DAYS) if source == "times" else [f"{day:%Y-%m-%d %H:%M:%S}" for day in DAYS])
    expected = made.read(pa.table({"when": pa.array(DAYS)}))
    assert torch.equal(prepared(pa.table({"when": SPELLED[spelled]}), made, "new")[0], expected)


def test_day_and_month_are_not_guessed():
    days = list(pd.date_range("2020-01-01", periods=300))
    british = fitted(when=[f"{day:%d/%m/%Y}" for day in days])
    expected = british.read(pa.table({"when": days}))
    for format in ("%d/%m/%Y", "%Y-%m-%d"):
        words = [day.strftime(format) for day in days]
        assert torch.equal(prepared(pa.table({"when": [*words, "no idea"]}), british, "new")[0][:300], expected)
    with pytest.raises(DataError, match=r"'when' has \d+ values that cannot be read as dates in the source's format"):
        prepared(pa.table({"when": [f"{day:%m/%d/%Y}" for day in days]}), british, "new")


@pytest.mark.parametrize(
    "spelled", ["%b %d %Y", "%B %-d, %Y", "%d-%b-%y", "%d.%b.%Y", "%d.%m.%y", "%m/%d/%y", "%Y%m%d"]
)
def test_months_by_name_two_digits_and_eight_are_dates(spelled):
    days = pd.date_range("1969-01-01", "2068-12-31", periods=60).normalize()
    words = [day.strftime(spelled) for day in days]
    iso = fitted(when=[f"{day:%Y-%m-%d}" for day in days])
    tables = [pa.table({"when": words})]
    if spelled == "%Y%m%d":
        tables.append(pa.table({"when": [int(word) for word in words]}))
    for table in tables:
        made = TablePreparation.fit(table)
        assert [one.kind for one in made.seen] == ["date"]
        assert torch.equal(made.read(table), iso.read(pa.table({"when": days})))
        assert torch.equal(prepared(table, made, "new")[0], made.read(table))


def test_numbers_of_eight_digits_stay_numbers():
    assert fitted(price=[20010115 + 7 * at for at in range(30)]).seen[0].kind == "number"


def test_values_of_another_kind_stop_fit_and_prediction(caplog):
    source, other = visits(100, 0), visits(60, 1)
    other = other.assign(size="large", when="soon", member=["J", "N"] * 30)
    with pytest.raises(ProblemsError) as caught:
        read_pair(source, visits(40, 2), other, mode="noisy")
    stopping = [(one.where, one.kind) for one in caught.value.problems if one.stops]
    assert stopping == [("test", "not dates"), ("test", "not numbers")]
    (unseen,) = [one for one in caught.value.problems if one.kind == "unseen"]
    assert unseen.text == (
        "column 'member' has 60 values that the source does not have ('J', 'N'; the source has "
        "false, true): they are read as one unseen value."
    )
    made = read_pair(source, visits(40, 2), mode="noisy").preparation
    with pytest.raises(DataError, match=r"new: column 'when' has 60 values .*\('soon'; the source has 2021.*'size'"):
        prepared(frame_table(other), made, "new")
    prepared(frame_table(visits(60, 1).assign(member="J")), made, "new")
    assert caplog.messages[0] == "new: column 'member': 60 unseen ('J'), of 60"


def test_a_few_values_of_another_kind_are_missing(caplog):
    made = read_pair(visits(100, 0), visits(40, 2), mode="noisy").preparation
    some = visits(60, 1).astype({"size": object, "when": str})
    some.loc[:9, ["size", "when"]] = "unknown"
    few, _ = prepared(frame_table(some), made, "new")
    assert "10 unreadable ('unknown')" in caplog.text
    empty = visits(60, 1)
    empty.loc[:9, ["size", "when"]] = None
    assert torch.equal(few, made.read(frame_table(empty)))
    pair = read_pair(visits(100, 0), some, mode="noisy")
    assert [(one.kind, one.stops) for one in pair.problems if one.kind.startswith("not ")] == [
        ("not dates", False),
        ("not numbers", False),
    ]
