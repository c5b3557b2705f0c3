"""Examples, and data in memory converted to Examples."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from soseleto.data import Examples, as_examples
from soseleto.errors import DataError, UsageError


def small(**changes) -> Examples:
    fields = {"inputs": torch.arange(12.0).reshape(4, 3), "labels": torch.tensor([0, 1, 1, 0])} | changes
    return Examples(**fields)


def test_ids_default_to_places_and_survive_a_subset():
    assert small().id_of(2) == "2"
    assert small().subset([2, 0]).ids == ("2", "0")
    assert small().subset(torch.tensor([False, True, False, True])).ids == ("1", "3")
    named = small(ids=("a", "b", "c", "d"), paths=("p", "q", "r", "s"), truth=torch.tensor([1, 1, 0, 0]))
    part = named.subset(torch.tensor([3, 1]))
    assert (part.ids, part.paths, part.truth.tolist()) == (("d", "b"), ("s", "q"), [0, 1])
    with pytest.raises(IndexError):
        small().id_of(4)


def test_fingerprint_depends_on_inputs_labels_and_ids():
    same = small().fingerprint()
    assert small().fingerprint() == same
    assert small(ids=("0", "1", "2", "3")).fingerprint() == same  # what None means
    assert small(inputs=torch.arange(12.0).reshape(4, 3) + 1).fingerprint() != same
    assert small(labels=torch.tensor([0, 1, 1, 1])).fingerprint() != same
    assert small(ids=("0", "1", "2", "x")).fingerprint() != same
    assert small(inputs=torch.arange(12.0).reshape(4, 3, 1)).fingerprint() != same
    turned = torch.arange(12.0).reshape(4, 3).T.contiguous().T  # another layout in memory
    assert small(inputs=turned).fingerprint() == same


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"labels": torch.tensor([0, 1])}, "4 inputs but 2 labels"),
        ({"labels": torch.tensor([0, 1, -1, 0])}, "a label is -1"),
        ({"labels": torch.tensor([0, 1, 2, 0]), "classes": ("a", "b")}, "a label is 2 but there are 2"),
        ({"labels": torch.zeros(4, dtype=torch.int32)}, "torch.int32"),
        ({"ids": ("a", "b", "a", "c")}, "'a' is used for two"),
        ({"inputs": torch.zeros(0, 3), "labels": torch.zeros(0, dtype=torch.int64)}, "empty"),
    ],
)
def test_wrong_fields_are_named(changes, words):
    with pytest.raises(DataError, match=words):
        small(**changes)


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, at):
        return self.items[at]


def test_datasets_are_stacked():
    made = as_examples(Items([(torch.ones(2) * i, i % 2) for i in range(5)]), name="source")
    assert made.inputs.tolist() == [[float(i)] * 2 for i in range(5)]
    assert made.labels.tolist() == [0, 1, 0, 1, 0]
    pair = TensorDataset(torch.zeros(3, 4), torch.tensor([0, 1, 2]))
    assert as_examples(pair, name="source").inputs.shape == (3, 4)
    floats = as_examples(Items([(np.ones(2), 0.5), (np.ones(2), 1.5)]), name="source")
    assert floats.labels.tolist() == [0.5, 1.5]


def test_what_cannot_be_read_says_what_can():
    class Endless(IterableDataset):
        def __iter__(self):
            yield torch.ones(2), 0

    with pytest.raises(UsageError, match="map-style"):
        as_examples(Endless(), name="source")
    with pytest.raises(UsageError, match="is a int: give a path"):
        as_examples(3, name="source")
    with pytest.raises(DataError, match=r"return \(input, label\)"):
        as_examples(Items([{"x": 1}]), name="source")
    with pytest.raises(DataError, match="3 inputs but 2 labels"):
        as_examples((torch.zeros(3, 2), torch.tensor([0, 1])), name="source")


def test_arrays_follow_the_rules_of_shape_and_type():
    images = np.zeros((2, 8, 9, 3), np.uint8)
    images[:, 1, 2, 0] = 7
    made = as_examples((images, np.array([1, 0])), name="source")
    assert made.inputs.shape == (2, 3, 8, 9)
    assert made.inputs[0, 0, 1, 2] == 7
    assert as_examples((images[..., 0], [0, 1]), name="source").inputs.shape == (2, 1, 8, 9)
    assert as_examples((np.zeros((2, 3)), [0, 1]), name="source").inputs.dtype == torch.float32
    assert as_examples((np.zeros((2, 3), ">i2"), [0, 1]), name="source").inputs.dtype == torch.int64
    assert as_examples((np.zeros(2), [0, 1]), name="source").inputs.shape == (2, 1)
    named = as_examples((np.zeros((3, 2)), ["dog", "cat", "dog"]), name="source")
    assert (named.classes, named.labels.tolist()) == (("cat", "dog"), [1, 0, 1])
