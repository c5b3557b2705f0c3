"""Names of classes, columns and files."""

import os

import numpy as np
import pytest
from PIL import Image

from soseleto.data import ProblemsError, Reading, as_examples, read_pair
from soseleto.errors import DataError, UsageError


def table(path, labels, first=0):
    rows = "".join(f"{first + at},{at % 3},{label}\n" for at, label in enumerate(labels))
    path.write_text("a,b,label\n" + rows, "utf-8")
    return path


def test_a_class_that_the_source_spells_otherwise_is_named(tmp_path):
    source = table(tmp_path / "s.csv", ["Cat", "dog", "Cat", "dog"])
    target = table(tmp_path / "t.csv", ["cat", "dog"], first=10)
    with pytest.raises(ProblemsError, match=r"the source has no example of class cat \(did you mean 'Cat'\?\)"):
        read_pair(source, target, mode="noisy")


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


def test_names_that_are_not_utf8(odd_names):
    with pytest.raises(DataError, match=r"the name of the file 'caf\\udce9/.* is not UTF-8: rename it"):
        as_examples(odd_names, name="source")
