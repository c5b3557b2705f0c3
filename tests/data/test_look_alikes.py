"""Class names that look alike, and file names that are not UTF-8."""

import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from soseleto.data import ProblemsError, Reading, as_examples, check_pair, read_pair
from soseleto.data.labels import plain
from soseleto.data.read import read_inputs
from soseleto.data.reading import escaped, existing
from soseleto.errors import UsageError
from soseleto.run_folder.source import image_from_file

NFC, NFD = "caf\u00e9", "cafe\u0301"


def table(path, labels, first=0):
    rows = "".join(f"{first + at},{at % 3},{label}\n" for at, label in enumerate(labels))
    path.write_text("a,b,label\n" + rows, "utf-8")
    return path


@pytest.mark.parametrize(
    "pair", [("Cat", "cat"), ("b", "b "), (NFC, NFD), ("STRASSE", "Straße"), ("red\u200b fox", "red  fox")]
)
def test_look_alikes_within_the_source_are_named_and_do_not_stop(tmp_path, pair):
    source = table(tmp_path / "s.csv", [*pair, "dog"])
    target = table(tmp_path / "t.csv", [*pair, "dog"], first=10)
    read = read_pair(source, target, mode="noisy")
    assert set(read.source.classes) == {*pair, "dog"}
    (problem,) = [one for one in read.problems if one.kind == "look-alike classes"]
    assert not problem.stops
    assert all(ascii(name) in problem.text for name in pair)
    assert "merge_labels" in problem.text
    merged = read_pair(source, target, mode="noisy", reading=Reading(merge_labels=True))
    assert set(merged.source.classes) == {plain(pair[0]), "dog"}
    assert merged.source.labels[0] == merged.source.labels[1] == merged.target.labels[0]
    assert {problem.kind for problem in merged.problems} <= {"range"}
    assert set(as_examples(source, name="source").classes) == {*pair, "dog"}


def test_look_alikes_between_the_sets_stop(tmp_path):
    source = table(tmp_path / "s.csv", ["Cat", "dog", "Cat", "dog"])
    target = table(tmp_path / "t.csv", ["cat", "dog"], first=10)
    with pytest.raises(ProblemsError, match=r"'Cat' and 'cat' look alike.* the target has spellings that the source"):
        read_pair(source, target, mode="noisy")
    pair = read_pair(source, target, mode="noisy", reading=Reading(merge_labels=True))
    assert pair.source.classes == pair.target.classes == ("cat", "dog")
    alike = [p for p in check_pair(source, target, target, mode="transfer") if p.kind == "look-alike classes"]
    assert alike == []  # each has its own classes
    more = table(tmp_path / "m.csv", ["Cat", "dog", "cat", "dog"])
    (problem,) = [p for p in check_pair(more, target, mode="noisy") if p.kind == "look-alike classes"]
    assert not problem.stops  # the target's spelling is in the source


def test_numbers_that_are_spelled_otherwise_look_alike(tmp_path):
    source = table(tmp_path / "s.csv", ["007", "8", "A1", "A01", "1.10", "1.1"])
    target = table(tmp_path / "t.csv", ["7", "8.0", "A1"], first=9)
    (problem,) = [p for p in check_pair(source, target, mode="noisy") if p.kind == "look-alike classes"]
    assert "the classes '007' and '7', '8' and '8.0' look alike but" in problem.text
    assert problem.stops


def test_two_columns_for_one_role_are_not_chosen_between(tmp_path):
    path = tmp_path / "s.csv"
    path.write_text("a,Label,label\n1,x,y\n2,u,v\n")
    with pytest.raises(UsageError, match=r"has the columns Label, label: name the one to use, such as label_column="):
        as_examples(path, name="source")
    assert as_examples(path, name="source", reading=Reading(label_column="label")).classes == ("v", "y")


@pytest.fixture
def odd_names(tmp_path):
    """An image folder with bytes in its names that are not UTF-8."""
    try:
        for at, (folder, name) in enumerate(
            [(b"caf\xe9", b"\xff1.png"), (b"caf\xe9", b"2.png"), (b"dog", b"\xe9.png"), (b"dog", b"3.png")]
        ):
            path = tmp_path / "source" / os.fsdecode(folder) / os.fsdecode(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.full((32, 32, 3), 50 * at, dtype=np.uint8)).save(path)
    except OSError:
        pytest.skip("the file system has only names of text")
    return tmp_path / "source"


def test_names_that_are_not_utf8(odd_names, tmp_path):
    made = as_examples(odd_names, name="source")
    assert made.ids == (r"caf\xe9/2.png", r"caf\xe9/\xff1.png", "dog/3.png", r"dog/\xe9.png")
    assert made.classes == (r"caf\xe9", "dog")
    columns = {"id": made.ids, "path": made.paths, "label": [made.classes[c] for c in made.labels.tolist()]}
    pa.parquet.write_table(pa.table(columns), odd_names / "t.parquet")  # ids and paths are text
    again = as_examples(odd_names / "t.parquet", name="source")
    assert torch.equal(again.inputs, made.inputs)
    assert again.paths == made.paths
    assert read_inputs([odd_names / "dog"], shape=(3, 32, 32)).names[1].endswith(r"dog/\xe9.png")
    assert all(image_from_file(path, 96) for path in made.paths)
    inside = existing(r"caf\xe9/2.png", root=odd_names)
    assert escaped(inside) == r"caf\xe9/2.png" != inside
