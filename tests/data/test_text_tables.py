"""Text files keep their rows and their labels: quotes, encodings, and numbers that are names."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from soseleto.data import Reading, as_examples, tables
from soseleto.errors import DataError


def read(path: Path, content: str | bytes, **options):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return as_examples(path, name="source", reading=Reading(**options))


def names(examples) -> list[str]:
    return [examples.classes[label] for label in examples.labels.tolist()]


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ('a,note,label\n1,fine,x\n2,"p,x\n3,q,y\n', "line 3"),  # to the end of the file
        ('a,note,label\n1,"p,x\n2,"q",y\n3,r,x\n', "line 2"),
        ('a,"note,label\n1,p,x\n', "line 1"),
    ],
)
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_a_stray_quote_merges_no_rows(tmp_path, content, place, suffix):
    """pyarrow reads the first as one row."""
    content = content if suffix == ".csv" else content.replace(",", "\t")
    with pytest.raises(DataError, match=f"the row in {place} of .* has a stray quote .*save the table as Parquet"):
        read(tmp_path / f"t{suffix}", content)


def test_quoted_line_breaks_are_read(tmp_path):
    content = 'id,a,label\r\n"p\n1,2,x",1,x\r\n"q ""said""\r\n\r\nmore\n",2,"y"\r\nr,3,5" nail\r\n'
    made = read(tmp_path / "t.csv", content)
    assert made.ids == ("p\n1,2,x", 'q "said"\r\n\r\nmore\n', "r")
    assert names(made) == ["x", "y", '5" nail']
    long = "word " * 40_000  # above the limit of Python's csv
    assert read(tmp_path / "t.csv", f'id,a,label\n"{long}\n",1,x\n').ids == (f"{long}\n",)


def test_a_label_of_a_whole_paragraph_stops_with_its_row(tmp_path):
    pa.parquet.write_table(pa.table({"a": [1, 2], "label": ["x", "y" * 201]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match="the label of row 1 has 201 characters"):
        as_examples(tmp_path / "t.parquet", name="source")
    with pytest.raises(DataError, match="the label of row 0 has a line break"):
        as_examples((np.zeros((2, 3)), ["a\nb", "c"]), name="source")


@pytest.mark.parametrize("between", [",", "\t"])
def test_large_labels_stay_distinct_beside_a_missing_one(tmp_path, between):
    """Arrow reads such a column as doubles."""
    labels, path = ["9007199254740992", "9007199254740993"], tmp_path / ("t.csv" if between == "," else "t.tsv")
    path.write_text(
        "\n".join(between.join(row) for row in (["a", "label"], *(["1", label] for label in [*labels, ""])))
    )
    assert tables.load(path)["label"].to_pylist() == [*labels, None]


def test_ids_and_correct_labels_are_text(tmp_path):
    made = read(tmp_path / "t.csv", "id,a,label,truth\n007,1,01,1\n7,2,1,01\n", truth_column="truth")
    assert made.ids == ("007", "7")
    assert [made.classes[label] for label in made.truth.tolist()] == ["1", "01"]


def test_integers_written_as_floats_by_pandas_are_integers_if_all_are(tmp_path):
    assert names(read(tmp_path / "a.csv", "a,label\n1,2.0\n2,10.0\n3,2.0\n")) == ["2", "10", "2"]
    assert read(tmp_path / "b.csv", "a,label\n1,2.5\n2,10\n3,2.0\n").labels.tolist() == [2.5, 10.0, 2.0]
    assert names(read(tmp_path / "c.csv", "a,label\n1,NA\n2,cat\n")) == ["NA", "cat"]  # Namibia


def test_integers_are_numbers_to_predict_where_that_is_said(tmp_path):
    made = read(tmp_path / "a.csv", "a,label\n1,1987\n2,NA\n3,2001\n", numeric_labels=True)
    np.testing.assert_equal(made.labels.tolist(), [1987.0, np.nan, 2001.0])
    with pytest.raises(DataError, match="the label of row 1 is 'cat' and not a number: correct it, or leave"):
        read(tmp_path / "b.csv", "a,label\n1,7\n2,cat\n", numeric_labels=True)


LATIN = "id,a,label\np,1,bébé\nq,2,bèbè\n"


@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_other_encodings_are_named_and_read(tmp_path, suffix):
    path, content = tmp_path / f"t{suffix}", LATIN.replace(",", "," if suffix == ".csv" else "\t")
    place = r"byte 0xe9 in line 2 of .* is not UTF-8"
    with pytest.raises(DataError, match=place + ".*with encoding='cp1252'"):
        read(path, content.encode("latin-1"))
    assert names(read(path, content.encode("latin-1"), encoding="latin-1")) == ["bébé", "bèbè"]
    with pytest.raises(DataError, match="encoding='utf-16'"):
        read(path, content.encode("utf-16"))
    assert names(read(path, content.encode("utf-16"), encoding="utf-16")) == ["bébé", "bèbè"]


def test_json_lines_have_an_encoding_and_bytes_are_utf8(tmp_path):
    content = '{"a": 1, "label": "bé"}\n{"a": 2, "label": "bè"}\n'.encode("latin-1")
    with pytest.raises(DataError, match=r"byte 0xe9 in line 1 of .*encoding='cp1252'"):
        read(tmp_path / "t.jsonl", content)
    assert names(read(tmp_path / "t.jsonl", content, encoding="latin-1")) == ["bé", "bè"]
    pa.parquet.write_table(pa.table({"a": [1, 2], "label": [b"b\xe9", b"b\xe8"]}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"the label of row 0 is b'b\\xe9', which is not UTF-8: save it as text"):
        as_examples(tmp_path / "t.parquet", name="source")


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("null", "is not an object"),
        ('{"a": 1, "label": "x"', "is not valid JSON"),
        ('{"a": ' * 5000, "is not valid JSON"),
    ],
)
def test_json_lines_that_are_not_objects_are_named(tmp_path, line, fault):
    """Arrow's reader ends the interpreter on ``null`` and on what begins with it."""
    (tmp_path / "t.jsonl").write_text('{"a": 1, "label": "x"}\n\n' + line)
    with pytest.raises(DataError, match=rf"line 3 of .*t\.jsonl {fault}"):
        as_examples(tmp_path / "t.jsonl", name="source")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("s.csv", "a;b;label\n1.5;2;x\n", r"by semicolons instead of commas: .*read_csv\('s.csv', sep=';'\)"),
        ("s.csv", "a\tlabel\n1\tx\n", r"by tabs instead of commas: .*sep='\\t'"),
        ("s.tsv", "a,label\n1,x\n", r"by commas instead of tabs: .*sep=','"),
    ],
)
def test_another_separator_is_named(tmp_path: Path, name: str, content: str, said: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(DataError, match=said):
        as_examples(tmp_path / name, name="source")
