"""Tables as they are: kinds of columns, missing values, and a preparation fitted on the source alone."""

import datetime
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from fabricated import saved
from soseleto.data import ProblemsError, Reading, TablePreparation, as_examples, read_pair
from soseleto.data.cells import MISSING, plan_of
from soseleto.data.columns import FIRST, GONE, OTHER
from soseleto.errors import DataError, UsageError

N = 60
LABELS = ["yes", "no"] * (N // 2)


def people(rows: int = N, seed: int = 0, **changed: object) -> dict[str, list[object]]:
    """A table with one column of every kind."""
    draw = np.random.default_rng(seed)
    table: dict[str, list[object]] = {
        "PassengerId": list(range(101, 101 + rows)),
        "age": [None if i % 10 == 3 else float(a) for i, a in enumerate(draw.integers(18, 80, rows))],
        "dose": ["?" if i % 12 == 5 else f"{d:.2f}" for i, d in enumerate(draw.normal(size=rows))],
        "town": [["Ulm", "Aix", "Bo"][i % 3] for i in range(rows)],
        "member": [bool(i % 4) for i in range(rows)],
        "since": [datetime.date(2020, 1 + i % 12, 1 + i % 28) for i in range(rows)],
        "name": [f"Person{i}" for i in range(rows)],
        "note": [f"the {i}th visit was about a cold and a cough" for i in range(rows)],
        "planet": ["Earth"] * rows,
        "answer": ["J" if one == "yes" else "N" for one in (LABELS * rows)[:rows]],
        "label": (LABELS * rows)[:rows],
    }
    return {**table, **changed}  # type: ignore[dict-item]


def kinds(preparation: TablePreparation) -> dict[str, str]:
    return {one.name: one.kind for one in preparation.seen}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source.csv"
    pd.DataFrame(people()).to_csv(path, index=False)
    return path


def test_kinds_are_inferred_alike_from_files_and_frames(source, tmp_path):
    expected = {
        "PassengerId": "left out",
        "age": "number",
        "dose": "number",
        "town": "category",
        "member": "category",
        "since": "date",
        "name": "left out",
        "note": "text",
        "planet": "left out",
        "answer": "left out",
    }
    target = pd.DataFrame(people(20, 1))
    from_file = read_pair(source, saved(target, tmp_path / "t.csv"), mode="noisy")
    frame = pd.DataFrame(people()).astype({"town": "category"})
    from_frame = read_pair(frame, target, mode="noisy")
    assert kinds(from_file.preparation) == kinds(from_frame.preparation) == expected
    assert len(from_file.target) == 20  # no row is lost
    torch.testing.assert_close(from_file.source.inputs, from_frame.source.inputs)
    why = {one.name: one.why for one in from_file.preparation.seen if one.why}
    assert why["answer"] == "it is a copy of the label"
    assert why["planet"] == "it is constant"
    plan = "\n".join(plan_of(from_file.preparation.seen))
    assert "age          number          6  " in plan


def test_given_kinds_are_taken_and_unknown_columns_are_named(source):
    reading = Reading(
        numeric_columns=["PassengerId"], categorical_columns=["name"], text_columns=["town"], drop_columns=["note"]
    )
    made = read_pair(source, pd.DataFrame(people(20, 1)), mode="noisy", reading=reading).preparation
    wanted = {"PassengerId": "number", "name": "category", "town": "text", "note": "left out"}
    assert kinds(made).items() >= wanted.items()
    with pytest.raises(UsageError, match=r"no feature column agee, twon \(did you mean 'age'\?\)"):
        as_examples(source, name="source", reading=Reading(numeric_columns=["agee"], drop_columns=["twon"]))
    with pytest.raises(UsageError, match=r"'tags' holds list<.*>, which cannot be read as text"):
        TablePreparation.fit(pa.table({"tags": [["a"], ["b"]]}), kinds={"tags": "text"})
    with pytest.raises(UsageError, match="'age' is given two kinds"):
        Reading(numeric_columns=["age"], drop_columns=["age"])


def test_a_column_of_the_target_alone_can_be_dropped(source):
    target = pd.DataFrame(people(20, 1, checked_by=["Ann"] * 20))
    with pytest.raises(DataError, match=r"the target table also has checked_by.* drop others with --drop-column"):
        read_pair(source, target, mode="noisy")
    pair = read_pair(source, target, mode="noisy", reading=Reading(drop_columns=["checked_by"]))
    assert "checked_by" not in kinds(pair.preparation)
    assert len(pair.target) == 20
    with pytest.raises(UsageError, match="no feature column checked_by"):
        read_pair(source, target, mode="noisy", reading=Reading(numeric_columns=["checked_by"]))
    with pytest.raises(UsageError, match="no feature column checkd"):
        read_pair(source, target, mode="noisy", reading=Reading(drop_columns=["checkd"]))


def test_the_docs_name_every_spelling_of_a_missing_value():
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "data.md").read_text("utf-8")
    assert [one for one in MISSING if one and f"`{one}`" not in page] == []


def test_missing_rare_and_unseen_values_have_places_of_their_own():
    town = ["Ulm"] * 10 + ["Aix"] * 8 + ["Once", None]
    made = TablePreparation.fit(pa.table({"town": town, "size": [1.0, None, *range(18)]}))
    new = made.read(pa.table({"town": ["Aix", "Once", None, "Rome", "?"], "size": [None, 2.5, 3, 4, 5]}))
    assert new[:, 0].tolist() == [FIRST + 1, OTHER, GONE, OTHER, GONE]
    assert new[0, 1:].tolist() == [8.0, 1.0]  # the source's median, and that it was missing
    places = made(new)[:, -4:]  # other, missing, Ulm, Aix
    assert places.argmax(1).tolist() == [3, 0, 1, 0, 1]
    assert (places.sum(1) == 1).all()


def test_the_encoding_of_a_number_is_piecewise_linear():
    values = np.random.default_rng(1).normal(size=200)
    made = TablePreparation.fit(pa.table({"x": values}))
    (column,) = made.columns
    x = np.array([-9.0, 0.1, 0.7, 9.0])
    got = made(made.read(pa.table({"x": x})))
    edges = np.array(column.edges)
    oracle = [[min(max((v - a) / (b - a), 0), 1) for a, b in pairwise(edges)] for v in x]
    linear = np.clip((x - values.mean()) / values.std(), -5, 5)
    torch.testing.assert_close(got.double(), torch.tensor(np.c_[linear, oracle]), rtol=0, atol=1e-5)
    assert made.width == got.shape[1]


def test_nothing_of_target_or_test_reaches_the_preparation(source, tmp_path):
    strange = pd.DataFrame(people(30, 1, town=["Rome"] * 30, age=[1e6] * 30))
    other = saved(strange, tmp_path / "other.csv")
    alone = read_pair(source, pd.DataFrame(people(20, 2)), mode="noisy")
    beside = read_pair(source, other, mode="noisy")
    tested = read_pair(source, pd.DataFrame(people(20, 2)), other, mode="noisy")
    assert beside.preparation == alone.preparation == tested.preparation
    assert torch.equal(beside.source.inputs[:5], alone.source.inputs[:5])


def test_problems_of_all_columns_are_found_at_once(tmp_path):
    table = {**people(), "tags": [["a"]] * N, "parts": [{"k": 1}] * N}
    frame = pd.DataFrame(table)
    words = pd.DataFrame({**people(20, 1), "tags": [["a"]] * 20, "parts": [{"k": 1}] * 20})
    words = words.assign(age="old", dose="two")
    with pytest.raises(ProblemsError) as caught:
        read_pair(frame, words, mode="noisy")
    found = [(problem.where, problem.kind) for problem in caught.value.problems if problem.stops]
    assert found == [("target", "not numbers")] * 2
    text = " ".join(map(str, caught.value.problems))
    for part in (
        "'tags', since it holds list<",
        "'parts', since it holds struct<",
        "'age' has 20 values that cannot be",
        "'dose' has",
    ):
        assert part in text
    with pytest.raises(DataError, match=r"column 'age' holds list<.* and other values in the source"):
        read_pair(pd.DataFrame(people()), pd.DataFrame(people(20)).assign(age=[[1.0]] * 20), mode="noisy")
    with pytest.raises(DataError, match="the target table lacks age, town; the test table also has extra"):
        read_pair(
            pd.DataFrame(people()),
            pd.DataFrame(people()).drop(columns=["age", "town"]),
            pd.DataFrame(people()).assign(extra=1.5),
            mode="noisy",
        )


def test_texts_are_bags_of_words_of_unit_length():
    texts = ["a red fox", "A fox, red!", "the sea", ""]
    table = pa.table({"note": texts})
    made = TablePreparation.fit(table, kinds={"note": "text"}).read(table).numpy()
    assert np.allclose(np.linalg.norm(made, axis=1), [1, 1, 1, 0])
    assert abs(made[0] @ made[2]) < 0.2 < made[0] @ made[1]


def test_rows_that_coincide_by_chance_do_not_stop():
    draw = np.random.default_rng(0)

    def rows(n: int) -> pd.DataFrame:
        columns = {name: draw.choice(["u", "v", "w"], n) for name in "abcd"}
        return pd.DataFrame({**columns, "label": draw.choice(["x", "y"], n)})

    source = rows(400)
    pair = read_pair(source, rows(40), mode="noisy")
    assert {problem.kind for problem in pair.problems} == {"near duplicate"}
    numbers = pd.DataFrame(draw.normal(size=(400, 4)), columns=list("abcd")).assign(label=source["label"])
    with pytest.raises(ProblemsError, match="the source has copies of 40 target examples"):
        read_pair(numbers, numbers.head(40), mode="noisy")


# The index of a pandas frame, saved as a column, is no feature


def indexed(path: Path, start: float = 0.0) -> Path:
    """A frame without two of its rows, saved with its index."""
    frame = pd.DataFrame({"a": start + np.arange(8) * 0.5, "b": np.arange(8)[::-1] * 0.1, "label": ["x", "y"] * 4})
    frame = frame.drop([1, 2])
    if path.suffix == ".csv":
        frame.to_csv(path)
        if path.stem == "twice":
            pd.read_csv(path).to_csv(path)  # "Unnamed: 0" beside a new index
    else:
        frame.to_parquet(path)
    return path


@pytest.mark.parametrize("name", ["s.csv", "twice.csv", "s.parquet"])
def test_a_pandas_index_is_no_feature_and_that_is_said(name: str, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    pair = read_pair(indexed(tmp_path / name), indexed(tmp_path / "other" / name, 0.25), mode="noisy")
    assert pair.preparation.names == ("a", "b")
    (said,) = [str(problem) for problem in pair.problems if problem.kind == "left out"]
    assert said.startswith("source: not used as features")
    assert "since it is the index of pandas" in said
    (tmp_path / "without").mkdir()
    plain = saved(pd.DataFrame({"a": [0.7, 1.2], "b": [0.5, 0.9], "label": ["x", "y"]}), tmp_path / "without" / name)
    of_target = read_pair(plain, tmp_path / "other" / name, mode="noisy")  # an index of the target alone
    assert of_target.preparation.names == ("a", "b")


def test_an_index_that_is_named_as_the_ids_is_used(tmp_path: Path) -> None:
    reading = Reading(id_column="__index_level_0__")
    read = as_examples(indexed(tmp_path / "s.parquet"), name="source", reading=reading)
    assert read.ids == ("0", "3", "4", "5", "6", "7")
    assert read.inputs.shape == (6, 2)
