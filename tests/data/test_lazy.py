"""Datasets that are read in every epoch: randomness, errors, labels, and fit with them."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset

import soseleto
from soseleto.data import LazyDataset, as_example_set
from soseleto.data.examples import Examples
from soseleto.data.feeding import feed
from soseleto.errors import DataError, UsageError


class Noisy(Dataset):
    """A row of numbers plus noise from all three global generators, with its class."""

    def __init__(self, n=60, draws=True):
        self.rows = torch.arange(n * 3, dtype=torch.float32).reshape(n, 3) / n
        self.draws = draws

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, at):
        noise = torch.zeros(3)
        if self.draws:
            noise = torch.tensor([float(torch.rand(())), np.random.rand(), random.random()])  # noqa: NPY002
        return self.rows[at] + noise, at % 2


def batches(data, purpose="source/augment/1", seed=0, index=((3, 1), (5, 0, 2))):
    return [inputs for inputs, _ in data.read([torch.tensor(one) for one in index], seed=seed, purpose=purpose)]


def test_randomness_follows_seed_purpose_and_index_whatever_the_workers():
    torch.manual_seed(7)
    here = batches(LazyDataset(Noisy(), workers=0))
    after = torch.rand(())
    torch.manual_seed(7)
    assert torch.equal(torch.rand(()), after)  # the global generator is left alone
    two = LazyDataset(Noisy(), workers=2)
    for again in (two, two.to("cpu")):
        assert all(torch.equal(a, b) for a, b in zip(here, batches(again), strict=True))
    assert torch.equal(here[1][1:], batches(LazyDataset(Noisy(), workers=0), index=((0, 2),))[0])  # not of the batch
    noise = here[0] - Noisy().rows[[3, 1]]
    assert ((noise[0] - noise[1]).abs() > 1e-4).all()  # each item has its own
    for other in ({"purpose": "source/augment/2"}, {"seed": 1}):
        changed = batches(LazyDataset(Noisy(), workers=0), **other)[0] - here[0]
        assert (changed.abs() > 1e-4).all()  # of all three generators


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_names_the_item(workers):
    class Broken(Noisy):
        def __getitem__(self, at):
            if at == 41:
                raise ValueError("cannot decode")
            return super().__getitem__(at)

    lazy = LazyDataset(Broken(), workers=workers).named("source")
    with pytest.raises(DataError, match=r"item 41 of the source data set cannot be read \(ValueError: cannot decode\)"):
        list(lazy.read(torch.arange(60).split(10)))


def test_ragged_items_need_a_collate_function():
    ragged = [(torch.ones(1 + at % 3), at % 2) for at in range(9)]
    with pytest.raises(DataError, match="collate_fn"):
        batches(LazyDataset(ragged, workers=0), index=((0, 1),))

    def padded(items):
        rows = nn.utils.rnn.pad_sequence([row for row, _ in items], batch_first=True)
        return {"rows": rows, "labels": torch.tensor([label for _, label in items])}

    inputs, labels = next(LazyDataset(ragged, collate_fn=padded, workers=0).read([torch.tensor([0, 2])]))
    assert inputs["rows"].shape == (2, 3)
    assert labels.tolist() == [0, 0]


def test_labels_are_those_that_were_read_and_the_missing_are_read_when_asked_for():
    lazy = LazyDataset(Noisy(10, draws=False), workers=0)
    list(lazy.read([torch.tensor([1, 4])]))
    copied = lazy.to("cpu")
    assert copied.labels.tolist() == lazy.labels.tolist() == [0, 1] * 5
    tokens = LazyDataset([(torch.ones(2), torch.arange(3)) for _ in range(4)], workers=0)
    assert tokens.labels.shape == (4, 0)  # several numbers per example are not kept


def test_a_dataset_is_read_into_memory_where_that_is_free():
    assert isinstance(as_example_set(Noisy(draws=False), name="source"), Examples)
    assert isinstance(as_example_set(Noisy(), name="source"), LazyDataset)  # random

    class Large(Noisy):
        def __len__(self):
            return 10**8

        def __getitem__(self, at):
            return super().__getitem__(at % 60)

    assert isinstance(as_example_set(Large(draws=False), name="source"), LazyDataset)


class Doubled(TensorDataset):
    def __getitem__(self, at):
        x, y = super().__getitem__(at)
        return 2 * x, y


def test_items_of_a_dataset_with_tensors_are_its_own():
    data, expected = Doubled(torch.arange(6.0)[:, None], torch.arange(6) % 2), [0, 2, 4, 6, 8, 10]
    made = as_example_set(data, name="source")
    assert made.inputs.flatten().tolist() == expected
    assert made.labels.tolist() == [data[at][1] for at in range(len(data))]
    part = as_example_set(Subset(data, [2, 0]), name="source")
    assert part.inputs.flatten().tolist() == [expected[2], expected[0]]


def test_a_tensor_dataset_is_not_read_item_by_item(monkeypatch):
    def refuse(self, at):
        raise AssertionError

    monkeypatch.setattr(TensorDataset, "__getitem__", refuse)
    x = torch.randn(6, 2)
    assert as_example_set(TensorDataset(x, torch.arange(6) % 2), name="source").inputs.data_ptr() == x.data_ptr()


def test_images_of_pillow_and_numpy_become_channels_first():
    image = pytest.importorskip("PIL.Image")
    pictures = [(image.fromarray(np.full((6, 5, 3), at, np.uint8)), at % 2) for at in range(4)]
    inputs, _ = LazyDataset(pictures, workers=0).take(torch.tensor([2, 1]))
    assert inputs.shape == (2, 3, 6, 5)
    assert inputs.dtype == torch.uint8
    assert int(inputs[0, 0, 0, 0]) == 2


def test_the_feed_of_a_rank_holds_its_rows_of_the_whole_batch():
    plan = torch.arange(12).split(4)
    data = LazyDataset(Noisy(), workers=0)
    whole = list(feed(data, plan, seed=0, epoch=1))
    mine = list(feed(data, plan, seed=0, epoch=1, keep=lambda batch: batch % 5 == 0, start=1))
    assert [fed.index.tolist() for fed in mine] == [[5], [10]]
    assert torch.equal(mine[0].inputs, whole[1].inputs[1:2])
    empty = list(feed(data, plan, seed=0, epoch=1, keep=lambda batch: batch < 0))
    assert empty[0].inputs.shape == (0, 3)


def fitted(source, **options):
    torch.manual_seed(0)
    target = (torch.randn(12, 3), torch.arange(12) % 2)
    return soseleto.fit(nn.Linear(3, 2), source, target, epochs=2, batch_size=8, **options)


def test_fit_reads_a_lazy_set_in_every_epoch_and_equals_memory_where_nothing_is_random(tmp_path):
    in_memory = fitted(Noisy(draws=False))
    lazy = fitted(LazyDataset(Noisy(draws=False), workers=1), out=tmp_path / "run")
    assert torch.equal(in_memory.weights, lazy.weights)
    assert torch.equal(in_memory.scores, lazy.scores)
    assert torch.equal(in_memory.model.weight, lazy.model.weight)
    assert lazy.ranking()["predicted_label"].shape == (60,)
    assert "items" in lazy.config["source_fingerprint"]


def test_suspects_of_a_lazy_source_come_from_a_scan():
    class Separable(Noisy):
        def __getitem__(self, at):
            row, label = super().__getitem__(at)
            return row * 0.1 + 3 * label, label if at % 10 else 1 - label

    rows = torch.randn(60, 3) * 0.1 + 3 * (torch.arange(60) % 2)[:, None]
    source, target = LazyDataset(Separable(100), workers=0), (rows, torch.arange(60) % 2)
    with pytest.raises(UsageError, match="read in every epoch: say probes=0"):
        soseleto.fit(nn.Linear(3, 2), source, target, epochs=3, probes="auto")
    assert soseleto.scan(source, target).suspects().probability.shape == (100,)
