"""All problems in one list before training, and reading without the affected examples."""

import numpy as np
import pytest
import torch
from PIL import Image

from soseleto.data import Examples, ProblemsError, Reading, check_pair, read_pair
from soseleto.data.groups import duplicates, near_duplicates
from soseleto.errors import DataError


def kinds(problems):
    return {(problem.where, problem.kind) for problem in problems}


@pytest.fixture
def messy(image_folder):
    """Folders with one problem of each kind."""
    source = image_folder("source", {"ant": list(range(10)), "bee": list(range(10, 20)), "empty": []}, (48, 48))
    target = image_folder("target", {"ant": [100, 101], "bee": [102, 103], "yak": [104]})
    test = image_folder("test", {"ant": [200, 201], "bee": [202], "gnu": [203]})
    whole = (source / "ant" / "0000.png").read_bytes()
    (source / "ant" / "cut.png").write_bytes(whole[: len(whole) // 2])
    (source / "ant" / "text.jpg").write_text("this is no image")
    (source / "ant" / "nothing.png").write_bytes(b"")
    Image.new("RGB", (1000, 8)).save(source / "bee" / "strip.png")
    (target / "ant" / "same.png").write_bytes((test / "ant" / "0200.png").read_bytes())
    Image.open(source / "bee" / "0012.png").resize((96, 96), Image.Resampling.BICUBIC).save(
        target / "bee" / "resized.jpg", quality=90
    )
    return source, target, test


def test_everything_is_found_at_once(messy):
    problems = check_pair(*messy, mode="noisy")
    assert kinds(problems) == {
        ("source", "empty class"),
        ("source", "unreadable"),
        ("source", "absurd size"),
        ("target", "class not in source"),
        ("test", "unknown class"),
        ("test", "duplicate"),
        ("source", "near duplicate"),
    }
    bad = {one for problem in problems if problem.where == "source" for one in problem.ids}
    assert bad == {"ant/cut.png", "ant/text.jpg", "ant/nothing.png", "bee/strip.png", "bee/0012.png"}
    (copy,) = [problem for problem in problems if problem.kind == "duplicate"]
    assert copy.ids == ("ant/0200.png",)
    assert "target ant/same.png = test ant/0200.png" in copy.text
    (near,) = [problem for problem in problems if problem.kind == "near duplicate"]
    assert "target bee/resized.jpg = source bee/0012.png" in near.text
    assert not near.stops
    assert ("target", "class not in source") not in kinds(check_pair(*messy, mode="transfer"))  # it has its own


def test_they_stop_or_are_left_out(messy):
    with pytest.raises(ProblemsError, match=r"the data have \d+ problems.*skip_bad=True") as caught:
        read_pair(*messy, mode="noisy")
    assert kinds(caught.value.problems) == kinds(check_pair(*messy, mode="noisy"))
    assert "ant/cut.png" in str(caught.value)
    pair = read_pair(*messy, mode="noisy", skip_bad=True)
    assert len(pair.source) == 20  # with the near duplicate, which may be another image
    assert "yak/0104.png" not in pair.target.ids
    assert pair.test.ids == ("ant/0201.png", "bee/0202.png")
    assert {one for problem in pair.dropped for one in problem.ids} >= {"yak/0104.png", "gnu/0203.png"}
    assert all(problem.text for problem in pair.dropped)
    again = check_pair(pair.source, pair.target, pair.test, mode="noisy")
    assert not [problem for problem in again if problem.stops]


def test_missing_files_of_a_table(tmp_path, image_folder):
    image_folder("images", {"a": [1, 2]})
    table = tmp_path / "t.csv"
    table.write_text("path,label\nimages/a/0001.png,x\nimages/a/none.png,x\n,y\nimages/a/0002.png,y\n")
    target = image_folder("target", {"x": [7], "y": [8]})
    problems = check_pair(table, target, mode="noisy")
    assert kinds(problems) == {("source", "missing")}
    assert {one for problem in problems for one in problem.ids} == {"1", "2"}
    pair = read_pair(table, target, mode="noisy", skip_bad=True)
    assert pair.source.ids == ("0", "3")  # rows keep their numbers
    assert pair.source.labels.tolist() == [0, 1]


@pytest.mark.parametrize("infinite", ["inf", "1e300"])  # the latter in float32
def test_columns_of_a_table(tmp_path, infinite):
    source = tmp_path / "s.csv"
    source.write_text(f"a,b,c,d,e,label\n1,5,1,1,2,x\n2,5,nan,2,3,y\n3,5,3,{infinite},1,x\n4,5,4,4,2,y\n")
    target = tmp_path / "t.csv"
    target.write_text("a,b,c,d,e,label\n4,5,4,4,2,y\n9,9,9,9,9,x\n")
    problems = check_pair(source, target, mode="noisy")
    found = {problem.kind: problem for problem in problems}
    assert set(found) == {"nan", "left out", "duplicate"}
    assert found["nan"].ids == ("2",)  # a missing value is no problem
    assert "in column 'd' " in found["nan"].text
    assert "'b', since it is constant" in found["left out"].text
    assert not found["left out"].stops
    assert found["duplicate"].ids == ("3",)
    assert read_pair(source, target, mode="noisy", skip_bad=True).source.ids == ("0", "1")


def test_images_that_are_only_similar_do_not_stop(image_folder):
    source = image_folder("source", {"a": list(range(8)), "b": list(range(8, 16))})
    target = image_folder("target", {"a": [100], "b": [101]})
    similar = np.asarray(Image.open(source / "a" / "0003.png")).copy()
    similar[8:12, 8:12] ^= 3  # another picture, though hardly
    Image.fromarray(similar).save(target / "a" / "like.png")
    pair = read_pair(source, target, mode="noisy")
    problem, groups = pair.problems
    assert (problem.kind, problem.stops, pair.dropped) == ("near duplicate", False, ())
    assert str(groups) == "target: 1 group of copies (2 examples), kept together on one side of every split."
    assert int(pair.target.groups[pair.target.ids.index("a/like.png")]) == int(pair.source.groups[3])
    assert "(target a/like.png = source a/0003.png)" in problem.text
    assert "a/0003.png" in pair.source.ids


def test_rows_equal_only_where_both_are_missing_are_no_duplicates(tmp_path):
    source, target = tmp_path / "s.csv", tmp_path / "t.csv"
    head = "id,a,b,c,d,e,label\n"
    source.write_text(head + "p,,,,,7,x\nq,1,2,3,4,5,y\nr,,,,,,x\ns,1,,3,4,5,x\n")
    target.write_text(head + "t,,,,,7,x\nu,9,2,3,4,5,y\nv,,,,,,x\nw,1,,3,4,5,y\n")
    kinds = ("checked", "near duplicate")
    found = [problem for problem in check_pair(source, target, mode="noisy") if problem.kind in kinds]
    assert [(problem.kind, problem.stops, problem.ids) for problem in found] == [
        ("checked", False, ("s",)),  # four equal values are no chance
        ("near duplicate", False, ("p", "r")),
    ]
    assert "(target t = source p, target v = source r)" in found[1].text


def test_labels_that_are_hardly_labels(tmp_path):
    source = (np.random.default_rng(0).random((200, 3)), [str(i) for i in range(200)])
    problems = check_pair(source, (np.zeros((1, 3)), ["5"]), mode="noisy")
    assert kinds(problems) == {("source", "absurd classes")}
    targets = torch.tensor([0.5, float("nan"), 1.0])
    problems = check_pair((np.random.default_rng(0).random((3, 3)), targets), (np.zeros((1, 3)), [0.5]), mode="noisy")
    assert [problem.ids for problem in problems] == [("1",)]


def test_nothing_left_says_so(image_folder):
    target = image_folder("target", {"yak": [1]})
    source = image_folder("source", {"ant": [2]})
    with pytest.raises(DataError, match="no example of the target is left: all 1 have problems"):
        read_pair(source, target, mode="noisy", skip_bad=True)
    (source / "ant" / "0002.png").write_bytes(b"broken")
    with pytest.raises(DataError, match="none of the sampled source images can be read"):
        check_pair(source, target, mode="noisy", reading=Reading())


def test_resized_and_recompressed_copies_are_found_and_others_are_not(image_folder, tmp_path):
    root = image_folder("many", {"a": list(range(300))}, size=(64, 64))
    originals = torch.stack([_read(path) for path in sorted(root.rglob("*.png"))])
    copies = []
    for seed in range(0, 300, 10):
        image = Image.open(root / "a" / f"{seed:04d}.png")
        image.resize((200, 200), Image.Resampling.LANCZOS).save(tmp_path / "copy.jpg", quality=75)
        copies.append(_read(tmp_path / "copy.jpg"))
    found = near_duplicates(torch.stack(copies), originals)
    assert set(map(tuple, found.tolist())) == {(i, 10 * i) for i in range(30)}
    assert not len(duplicates(torch.stack(copies), originals))


def _read(path):
    image = Image.open(path).convert("RGB").resize((32, 32), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.asarray(image).transpose(2, 0, 1).copy())


def test_a_class_that_nothing_trusted_has_is_reported():
    source = Examples(torch.rand(5, 5), torch.tensor([0, 0, 1, 2, 2]), classes=("a", "b", "c"))
    target = Examples(torch.rand(2, 5), torch.tensor([0, 1]), classes=("a", "b", "c"))
    (problem,) = check_pair(source, target, mode="noisy")
    assert str(problem) == (
        "target: the source has 2 examples of class c, and the target none to judge them by: add target examples."
    )
    assert not problem.stops
    assert not check_pair(source, target, mode="transfer")


def test_real_images_are_not_taken_for_copies_of_each_other(real_root):
    from experiments.data import load

    for name in ("mnist", "cifar10"):
        train, test = load(name, "train", real_root), load(name, "test", real_root)
        sides = train.inputs[:500], test.inputs[:4000]
        assert len(duplicates(*sides)) + len(near_duplicates(*sides)) <= 2, name
