"""Streams: every example once an epoch, the same ones after a resume, shards divided over workers, keys as ids."""

import random

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import soseleto
from soseleto.data import Examples, Stream
from soseleto.data.items import Request
from soseleto.data.joined import Joined
from soseleto.errors import DataError, UsageError


class Shard(IterableDataset):
    """Rows numbered from ``first``, with some noise; counts how often an example was made."""

    def __init__(self, first, n, noise=True):
        self.first, self.n, self.noise = first, n, noise
        self.made = []

    def __iter__(self):
        for at in range(self.first, self.first + self.n):
            self.made.append(at)
            noise = random.random() + float(torch.rand(())) if self.noise else 0.0
            yield {"x": torch.tensor([float(at), noise, 1.0]), "labels": at % 2, "name": f"row {at}"}


LENGTHS = [30, 11, 10, 9]


def shards(noise=True):
    return [Shard(0, 30, noise), Shard(30, 11, noise), Shard(41, 10, noise), Shard(51, 9, noise)]


def epoch_of(stream, epoch=1, size=4, start=0, seed=0):
    batches = stream.batches(size, seed=seed, epoch=epoch)[start:]
    made = [inputs["x"] for inputs, _ in stream.read(batches, seed=seed, purpose=f"epoch {epoch}")]
    stream.close()
    return batches, made


def stream(**options):
    return Stream(shards(), **{"key": "name", "window": 8, "workers": 0, **options})


def test_an_epoch_holds_every_example_once_in_an_order_of_its_own():
    one, again, other = (epoch_of(stream(), epoch) for epoch in (1, 1, 2))
    assert [len(batch) for batch in one[0]] == [4] * 15
    assert torch.cat(one[0]).sort().values.tolist() == list(range(60))
    assert not torch.equal(torch.cat(one[0]), torch.cat(other[0]))
    assert torch.equal(torch.cat(one[1])[:, 0].long(), torch.cat(one[0]))  # numbers are places in the stream
    assert torch.equal(torch.cat(one[1]), torch.cat(again[1]))
    back = torch.cat(other[1])[torch.cat(other[0]).argsort()] - torch.cat(one[1])[torch.cat(one[0]).argsort()]
    assert (back[:, 1] != 0).all()  # the noise is new


def test_workers_and_a_resume_change_nothing():
    _, whole = epoch_of(stream())
    _, by_workers = epoch_of(stream(workers=2))
    assert torch.equal(torch.cat(whole), torch.cat(by_workers))
    for start in (1, 7, 14):
        _, rest = epoch_of(stream(), start=start)
        assert torch.equal(torch.cat(rest), torch.cat(whole[start:]))


def test_shards_are_read_once_an_epoch_and_finished_ones_are_skipped():
    given = shards()
    epoch_of(Stream(given, length=LENGTHS, key="name", window=8, workers=0))
    assert sorted(at for shard in given for at in shard.made) == list(range(60))
    given = shards()
    batches, _ = epoch_of(Stream(given, length=LENGTHS, key="name", window=8, workers=0), start=12)
    untouched = {0, 1, 2, 3} - {int(at >= 30) + int(at >= 41) + int(at >= 51) for at in torch.cat(batches).tolist()}
    assert all(not given[which].made for which in untouched)


def test_only_a_window_of_a_shard_is_held():
    items = stream()._items
    for at in (7, 3, 25, 24):
        items._at(at, Request([at], 0, "read"))
        assert len(items._open[0].held) <= 8


def test_lanes_are_divided_over_workers_without_overlap():
    many = Stream([Shard(8 * at, 8) for at in range(4)], window=8, workers=2)
    batches = many.batches(4, seed=0, epoch=1)
    of_worker = [{at // 8 for batch in batches[worker::2] for at in batch.tolist()} for worker in (0, 1)]
    assert not of_worker[0] & of_worker[1]


def fitted(source, out=None, **options):
    torch.manual_seed(0)

    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x)

    target = ({"x": torch.randn(12, 3)}, torch.arange(12) % 2)
    return soseleto.fit(Net(3, 2), source, target, epochs=2, batch_size=8, lr=1e-3, out=out, **options)


def test_fit_keeps_weights_by_key_and_resumes(tmp_path, stop_after):
    whole = fitted(stream(), tmp_path / "whole", test=stream())
    assert set(whole.ranking()["id"]) == {f"row {at}" for at in range(60)}
    assert whole.weights.shape == (60,)
    assert (torch.tensor(whole.ranking()["visits"]) == 2).all()

    every = soseleto.Checkpoints(steps=2)
    with stop_after(11):
        fitted(stream(), tmp_path / "run", test=stream(), checkpoints=every)
    again = fitted(stream(workers=1), tmp_path / "run", test=stream(), checkpoints=every)
    assert "resumed after step 10" in again.messages
    assert torch.equal(again.weights, whole.weights)
    assert torch.equal(again.model.weight, whole.model.weight)
    assert again.ranking()["id"].tolist() == whole.ranking()["id"].tolist()


def test_hugging_face_streams_are_divided_into_their_shards():
    class Streamed:
        """As ``datasets.IterableDataset``."""

        num_shards = 2

        def __init__(self, of=range(2)):
            self.of = of

        def shard(self, num_shards, index):
            return Streamed([index])

        def __iter__(self):
            for at in self.of:
                yield from ({"x": torch.ones(3) * at, "label": at} for _ in range(5))

    made = Stream(Streamed(), workers=0)
    assert len(made) == 10
    assert made.labels.tolist() == [0] * 5 + [1] * 5


def test_what_is_refused():
    with pytest.raises(UsageError, match="iterated only once"):
        fitted(iter([]))
    with pytest.raises(UsageError, match="one number of examples"):
        Stream(shards(), length=[1, 2])
    with pytest.raises(DataError, match="ended after 9 examples, and has 25"):
        epoch_of(stream(length=[30, 11, 10, 25]))
    with pytest.raises(DataError, match="no entry 'id'"):
        epoch_of(stream(key="id"))

    class Shuffled(Shard):
        def __iter__(self):
            self.first += 1
            return super().__iter__()

    moved = Stream([Shuffled(0, 10)], length=10, key="name", workers=0)
    epoch_of(moved, 1)
    with pytest.raises(DataError, match="the same order in every pass"):
        epoch_of(moved, 2)


@pytest.mark.parametrize("side", ["source", "target", "test"])
def test_a_loader_is_refused_with_its_dataset(side):
    pair = torch.randn(20, 4), torch.arange(20) % 2
    loader = DataLoader(TensorDataset(*pair), batch_size=5, shuffle=True)
    sides = {"source": pair, "target": pair, "test": pair, side: loader}
    with pytest.raises(UsageError, match=r"pass its dataset, as in fit\(model, loader.dataset, \.\.\., batch_size"):
        soseleto.fit(nn.Linear(4, 2), **sides, epochs=1)


def test_a_loader_is_refused_among_shards_and_beside_files(tmp_path):
    loader = DataLoader(TensorDataset(torch.randn(20, 4), torch.arange(20) % 2), batch_size=None)
    for read in (lambda: Stream([Shard(0, 5), loader]), lambda: soseleto.read_pair(loader, tmp_path, mode="noisy")):
        with pytest.raises(UsageError, match="pass its dataset"):
            read()


class Points(IterableDataset):
    """Points with the sign of their first number as label, every fifth label wrong; counts its passes."""

    def __init__(self, first, n):
        self.first, self.n, self.made = first, n, 0

    def __iter__(self):
        x = torch.randn(self.n, 4, generator=torch.Generator().manual_seed(self.first))
        for at in range(self.n):
            self.made += 1
            label = int(x[at, 0] > 0)
            yield {"x": x[at], "labels": 1 - label if at % 5 == 0 else label, "name": f"{self.first + at}"}


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x):
        return self.linear(x)


def test_probes_are_spread_over_the_batches_of_a_stream(tmp_path, stop_after):
    given = [Points(0, 300), Points(300, 200)]
    source = Stream(given, length=[300, 200], key="name", window=16, workers=0)
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(9))
    target = soseleto.data.Examples({"x": x}, (x[:, 0] > 0).long())

    def fitted(**options):
        torch.manual_seed(0)
        probes = soseleto.Probes(share=0.4)
        settings = {"epochs": 4, "batch_size": 20, "lr": 0.3, "probes": probes, "device": "cpu", **options}
        return soseleto.fit(Named(), source, target, **settings)

    result = fitted()
    every = soseleto.Checkpoints(steps=10)
    with stop_after(45):
        fitted(out=tmp_path / "run", checkpoints=every)
    again = fitted(out=tmp_path / "run", checkpoints=every)
    assert "resumed after step 40" in again.messages
    assert torch.equal(again.weights, result.weights)
    assert torch.equal(again.suspects(0.8).probability, result.suspects(0.8).probability)
    suspects = result.suspects(0.8)
    wrong = torch.tensor([at % 5 == 0 for at in [*range(300), *range(200)]])
    assert len(suspects) > 40
    assert wrong[suspects.is_suspect].float().mean() > 0.7
    assert set(result.ranking()["id"]) == {str(at) for at in range(500)}
    joined = Joined(source, target, torch.zeros(200, dtype=torch.int64))
    batches = joined.batches(20, seed=0, epoch=3)
    assert torch.cat(list(batches)).sort().values.tolist() == list(range(700))
    assert len(batches) == 35  # as many as of any source, by which steps are counted
    assert max(len(batch) for batch in batches) <= 21
    assert all(5 <= (batch >= 500).sum() <= 6 for batch in batches)
    for size in (1, 3, 499, 700):
        batches = joined.batches(size, seed=0, epoch=1)
        assert len(batches) == -(-700 // size)
        assert torch.cat(list(batches)).sort().values.tolist() == list(range(700))
    batches = joined.batches(20, seed=0, epoch=3)
    for shard in given:
        shard.made = 0
    for _ in joined.read(batches, seed=0, purpose="epoch 3"):
        pass
    assert [shard.made for shard in given] == [300, 200]  # one pass: probes do not disturb the order of the stream


def test_a_part_of_a_stream_is_read_into_memory_in_one_pass():
    given = [Points(0, 30), Points(30, 20)]
    source = Stream(given, length=[30, 20], key="name", workers=0)
    part = source.subset([40, 3, 17])
    assert part.ids == ("40", "3", "17")
    whole = source.in_memory()
    assert part.inputs["x"].equal(whole.inputs["x"][[40, 3, 17]])
    assert part.labels.equal(whole.labels[[40, 3, 17]])


def test_probes_of_another_padded_length_are_one_sentence() -> None:
    one, other = (Examples(torch.zeros(3, length), torch.arange(3) % 2) for length in (4, 2))
    joined = Joined(one, other, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UsageError, match=r"of shape \[4\] with target examples of shape \[2\]: pad all to one length"):
        joined.take(torch.tensor([0, 5]))
