"""User files: folders, tables, arrays, Hugging Face data sets, and one rule for their labels."""

import gzip
import json
import os
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from soseleto.data import LazyDataset, ProblemsError, Reading, as_example_set, as_examples, read_pair
from soseleto.errors import DataError, UsageError

datasets = pytest.importorskip("datasets")


def test_an_image_folder(image_folder):
    root = image_folder("source", {"dog": [1, 2], "cat": [3]})
    (root / "cat" / "deeper").mkdir()
    Image.new("RGB", (32, 32), "red").save(root / "cat" / "deeper" / "z.png")
    (root / "cat" / "notes.txt").write_text("not an image")
    (root / "cat" / ".hidden.png").write_bytes(b"not an image")
    made = as_examples(root, name="source")
    assert made.ids == ("cat/0003.png", "cat/deeper/z.png", "dog/0001.png", "dog/0002.png")
    assert (made.classes, made.labels.tolist()) == (("cat", "dog"), [0, 0, 1, 1])
    assert made.inputs.dtype == torch.uint8
    assert made.inputs[1, :, 5, 5].tolist() == [255, 0, 0]
    wanted = np.asarray(Image.open(made.paths[2])).transpose(2, 0, 1)
    assert np.array_equal(made.inputs[2].numpy(), wanted)
    assert as_examples(root, name="source").fingerprint() == made.fingerprint()


def test_every_format_of_pillow_is_read_and_other_files_are_named(tmp_path, image_folder):
    root = image_folder("source", {"cat": [1], "dog": [2]})
    for seed, ending in enumerate(("jfif", "jpe", "avif", "jp2", "apng", "pnm", "ico"), start=3):
        Image.radial_gradient("L").rotate(seed).save(root / "cat" / f"{seed}.{ending}")
    Image.new("RGB", (32, 32)).save(root / "loose.png")
    (root / "dog" / "deep").mkdir()
    for path in ("README.txt", "dog/deep/a.heic", "dog/b.xml"):
        (root / path).write_bytes(b"no image")
    target = image_folder("target", {"cat": [10], "dog": [11]})
    (root / "dog" / "link").symlink_to(target / "dog")
    pair = read_pair(root, target, mode="noisy")
    assert len(pair.source) == 9
    assert [(one.kind, one.stops, one.text) for one in pair.problems] == [
        (
            "not read",
            False,
            "5 files are not used, since Pillow does not read them as images, or they are beside the class folders "
            "(README.txt, loose.png, dog/b.xml, dog/deep/a.heic, dog/link).",
        )
    ]


def write_table(path, columns):
    if path.suffix == ".parquet":
        pa.parquet.write_table(pa.table(columns), path)
    elif path.suffix in (".csv", ".tsv"):
        between = "," if path.suffix == ".csv" else "\t"
        rows = [list(columns), *zip(*columns.values(), strict=True)]
        path.write_text("".join(between.join(map(str, row)) + "\n" for row in rows))
    else:
        rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_tables_of_image_paths(tmp_path, image_folder):
    image_folder("images", {"a": [1], "b": [2]})
    columns = {"file": ["images/a/0001.png", "images/b/0002.png"], "label": [7, 3]}
    made = as_examples(write_table(tmp_path / "t.csv", columns), name="source")
    assert made.inputs.shape == (2, 3, 32, 32)
    assert (made.ids, made.classes, made.labels.tolist()) == (None, ("3", "7"), [1, 0])
    assert [os.path.basename(path) for path in made.paths] == ["0001.png", "0002.png"]
    (tmp_path / "elsewhere").mkdir()
    moved = write_table(tmp_path / "elsewhere" / "t.csv", columns)
    again = as_examples(moved, name="source", reading=Reading(root=tmp_path))
    assert torch.equal(again.inputs, made.inputs)


def test_columns_by_option_and_errors_that_help(tmp_path):
    columns = {"one": [1, 2], "two": [3, 4], "what": ["x", "y"], "who": ["u", "v"], "truly": ["x", "x"]}
    path = write_table(tmp_path / "t.csv", columns)
    made = as_examples(path, name="source", reading=Reading(label_column="what", id_column="who", truth_column="truly"))
    assert (made.inputs.tolist(), made.ids, made.truth.tolist()) == ([[1, 3], [2, 4]], ("u", "v"), [0, 0])
    with pytest.raises(DataError, match=r"no label column among one, two, what.*label_column"):
        as_examples(path, name="source")
    with pytest.raises(UsageError, match="did you mean 'what'"):
        as_examples(path, name="source", reading=Reading(label_column="whta"))
    with pytest.raises(UsageError, match="named for two roles"):
        as_examples(path, name="source", reading=Reading(label_column="what", id_column="what"))
    with pytest.raises(UsageError, match=r"'.*tt.csv' is not there \(did you mean 't.csv'\?\)"):
        as_examples(tmp_path / "tt.csv", name="source")
    with pytest.raises(UsageError, match="has no effect on the image folder"):
        as_examples(tmp_path, name="source", reading=Reading(path_column="x"))


def test_npz(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (3, 6, 7, 3), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=x, y=np.array(["b", "a", "b"]), id=np.array(["i", "j", "k"]))
    made = as_examples(tmp_path / "a.npz", name="source")
    assert torch.equal(made.inputs, torch.from_numpy(x).permute(0, 3, 1, 2))
    assert (made.ids, made.classes, made.labels.tolist()) == (("i", "j", "k"), ("a", "b"), [1, 0, 1])
    np.savez_compressed(tmp_path / "b.npz", x=np.asfortranarray(np.arange(6.0).reshape(2, 3)), y=[4, 2])
    made = as_examples(tmp_path / "b.npz", name="source")
    assert (made.inputs.tolist(), made.classes) == ([[0, 1, 2], [3, 4, 5]], ("2", "4"))
    np.savez(tmp_path / "c.npz", x=np.zeros((2, 3)))
    with pytest.raises(DataError, match="has no array 'y'"):
        as_examples(tmp_path / "c.npz", name="source")
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 3)), y=np.zeros(3))
    with pytest.raises(DataError, match="2 inputs in x but shape"):
        as_examples(tmp_path / "d.npz", name="source")


@pytest.mark.parametrize("kind", [bool, np.longdouble])
def test_yes_or_no_and_long_doubles_are_features(tmp_path, kind):
    values = np.arange(12).reshape(4, 3) % 2
    np.savez(tmp_path / "s.npz", x=values.astype(kind), y=np.arange(4) % 2)
    inputs = as_examples(tmp_path / "s.npz", name="source").inputs
    assert inputs.dtype == torch.float32
    assert inputs.tolist() == values.tolist()


def test_files_that_are_no_text_and_pipes_are_named(tmp_path):
    packed, pipe = tmp_path / "s.csv", tmp_path / "pipe.csv"
    packed.write_bytes(gzip.compress(b"a,label\n1,x\n"))
    with pytest.raises(DataError, match="is a gzip file and no text: unpack it"):
        as_examples(packed, name="source")
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is a pipe or a device: save the data to a file first"):
        as_examples(pipe, name="source")


def test_hugging_face_images_and_features():
    images = [Image.new("RGB", (20, 10), "red"), Image.new("L", (10, 10), 100)]
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])})
    data = datasets.Dataset.from_dict({"image": images, "label": [1, 0]}, kinds)
    made = as_examples(data, name="source", reading=Reading(image_size=8))
    assert made.inputs.shape == (2, 3, 8, 8)
    assert made.inputs[:, :, 4, 4].tolist() == [[255, 0, 0], [100, 100, 100]]
    assert (made.classes, made.labels.tolist()) == (("no", "yes"), [1, 0])
    table = datasets.Dataset.from_dict({"a": [1, None], "y": ["u", "v"]})
    made = as_examples(table, name="source")
    assert made.inputs.tolist() == [[1, 0], [1, 1]]  # the median, and that it was missing


def test_a_class_label_of_none_is_a_missing_label():
    def data(labels):
        kinds = {"a": datasets.Value("float32"), "label": datasets.ClassLabel(names=["no", "yes"])}
        return datasets.Dataset.from_dict({"a": range(len(labels)), "label": labels}, datasets.Features(kinds))

    pair = read_pair(data([0, 1, None]), data([1, 0]), mode="noisy", skip_bad=True)
    assert pair.source.labels.tolist() == [0, 1]
    assert [problem.kind for problem in pair.problems if problem.ids == ("2",)] == ["no label"]


def test_noisy_mode_shares_the_classes_and_transfer_mode_does_not(image_folder):
    source = image_folder("source", {"ant": [1], "bee": [2], "cow": [3]})
    target = image_folder("target", {"cow": [4], "bee": [5]})
    test = image_folder("test", {"cow": [6]})
    shared = read_pair(source, target, test, mode="noisy")
    assert shared.source.classes == shared.target.classes == shared.test.classes == ("ant", "bee", "cow")
    assert (shared.target.labels.tolist(), shared.test.labels.tolist()) == ([1, 2], [2])
    apart = read_pair(source, target, test, mode="transfer")
    assert apart.source.classes == ("ant", "bee", "cow")
    assert apart.target.classes == apart.test.classes == ("bee", "cow")
    assert (apart.target.labels.tolist(), apart.test.labels.tolist()) == ([0, 1], [1])
    with pytest.raises(UsageError, match=r"mode must be 'noisy' or 'transfer', got 'noise' \(did you"):
        read_pair(source, target, mode="noise")


def test_known_class_order_is_kept_and_kinds_must_agree(tmp_path):
    source = as_examples((np.zeros((2, 2)), ["b", "a"]), name="source")
    fixed = type(source)(source.inputs, torch.tensor([0, 1]), classes=("zebra", "ant"))
    pair = read_pair(fixed, (np.ones((2, 2)), ["ant", "zebra"]), mode="noisy")
    assert pair.target.classes == ("zebra", "ant")
    assert pair.target.labels.tolist() == [1, 0]
    with pytest.raises(DataError, match="the source has class names but the target has class indices"):
        read_pair(fixed, (np.ones((2, 2)), [0, 1]), mode="noisy")


def test_sets_must_fit_together(tmp_path, image_folder):
    table = write_table(tmp_path / "s.csv", {"a": [1, 2], "b": [3, 5], "label": ["x", "y"]})
    turned = write_table(tmp_path / "t.csv", {"b": [7, 8], "label": ["x", "y"], "a": [5, 6]})
    pair = read_pair(table, turned, mode="noisy")
    assert pair.target.inputs.tolist() == [[5, 7], [6, 8]]  # by name, in the source's order
    assert pair.preparation.names == ("a", "b")
    other = write_table(tmp_path / "u.csv", {"a": [5, 6], "label": ["x", "y"]})
    with pytest.raises(DataError, match="the target table lacks b"):
        read_pair(table, other, mode="noisy")
    with pytest.raises(DataError, match="has images but the source has features"):
        read_pair(table, image_folder("f", {"x": [1], "y": [2]}), mode="noisy")
    with pytest.raises(DataError, match=r"target inputs are .* of shape \(2,\) but the source's are"):
        read_pair((np.zeros((2, 3)), [0, 1]), (np.zeros((2, 2)), [0, 1]), mode="noisy")


def test_a_class_that_the_source_spells_otherwise_is_named(tmp_path):
    source = write_table(tmp_path / "s.csv", {"a": [0, 1], "b": [2, 0], "label": ["Cat", "dog"]})
    target = write_table(tmp_path / "t.csv", {"a": [5, 6], "b": [1, 1], "label": ["cat", "dog"]})
    with pytest.raises(ProblemsError, match=r"the source has no example of class cat \(did you mean 'Cat'\?\)"):
        read_pair(source, target, mode="noisy")


def test_two_columns_for_one_role_are_not_chosen_between(tmp_path):
    path = write_table(tmp_path / "s.csv", {"a": [1, 2], "Label": ["x", "u"], "label": ["y", "v"]})
    with pytest.raises(UsageError, match=r"has the columns Label, label: name the one to use, such as label_column="):
        as_examples(path, name="source")
    assert as_examples(path, name="source", reading=Reading(label_column="label")).classes == ("v", "y")


# Items that change from read to read


class Drawn(torch.utils.data.Dataset):
    """Items with noise from a generator; ``share`` of them change, or only their labels do."""

    def __init__(self, noise, *, labels=False, count=40):
        self.noise, self.labels, self.count = noise, labels, count

    def __len__(self):
        return self.count

    def __getitem__(self, at):
        value = float(self.noise())
        x = torch.full((3,), float(at)) + (0 if self.labels else value)
        return x, int(value > 0.5) if self.labels else at % 2


NOISES = {
    "torch": lambda: torch.rand(1),
    "rare flip": lambda: (random.random() < 0.2) * 1.0,
    "own generator": np.random.default_rng(0).random,
}


@pytest.mark.parametrize("noise", NOISES.values(), ids=NOISES)
@pytest.mark.parametrize("labels", [False, True])
def test_a_random_dataset_is_refused_with_what_to_type(noise, labels):
    with pytest.raises(UsageError, match=r"item \d+ of the target data set changes from read to read") as raised:
        as_examples(Drawn(noise, labels=labels), name="target")
    assert "write augment=soseleto.Augment(...)" in str(raised.value)


def test_the_check_leaves_the_random_state_and_accepts_what_is_constant():
    class Seeded(torch.utils.data.Dataset):
        """Random, but the same at every read; some values are missing."""

        def __init__(self):
            self.reads = 0

        def __len__(self):
            return 30

        def __getitem__(self, at):
            self.reads += 1
            x = torch.randn(3, generator=torch.Generator().manual_seed(at))
            x[0] = float("nan")
            return x.to(torch.bfloat16), "ab"[at % 2]

    data = Seeded()
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert len(as_examples(data, name="source")) == 30
    assert data.reads <= 30 + 12 * 4
    after = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


def test_hugging_face_data_with_a_transform_is_read_in_every_epoch():
    data = datasets.Dataset.from_dict({"x": [0.0] * 4, "label": [0, 1, 0, 1]})
    data = data.with_transform(lambda rows: {"x": [torch.rand(3) for _ in rows["x"]], "label": rows["label"]})
    assert isinstance(as_example_set(data, name="source"), LazyDataset)
