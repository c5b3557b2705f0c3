"""Batch indices: every source example once per epoch, targets equally often, the same after a resume."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soseleto.data import TargetCycle, generator, seed_for, source_batches, source_order, target_batch
from soseleto.errors import UsageError

sizes = st.integers(1, 40)


@settings(deadline=None, max_examples=60)
@given(n=sizes, batch_size=sizes, seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_visits_every_example_once(n, batch_size, seed, epoch):
    batches = source_batches(n, batch_size, seed=seed, epoch=epoch)
    assert sorted(torch.cat(batches).tolist()) == list(range(n))
    assert all(len(batch) == batch_size for batch in batches[:-1])


def test_epochs_and_seeds_differ_and_repeat():
    first = source_order(50, seed=0, epoch=0)
    assert torch.equal(first, source_order(50, seed=0, epoch=0))
    assert not torch.equal(first, source_order(50, seed=0, epoch=1))
    assert not torch.equal(first, source_order(50, seed=1, epoch=0))
    first.zero_()  # what is handed out is not the cached order itself
    assert source_order(50, seed=0, epoch=0).sum() == 49 * 50 // 2
    for epoch in (0, 1):
        batches = source_batches(50, 8, seed=0, epoch=epoch)
        assert torch.equal(torch.cat(batches), source_order(50, seed=0, epoch=epoch))


def test_static_shapes():
    dropped = source_batches(10, 4, seed=0, epoch=0, drop_last=True)
    assert [len(batch) for batch in dropped] == [4, 4]
    filled = source_batches(10, 4, seed=0, epoch=0, fill=True)
    assert [len(batch) for batch in filled] == [4, 4, 4]
    assert sorted(torch.cat(filled).unique().tolist()) == list(range(10))
    assert filled[2][2:].tolist() == filled[0][:2].tolist()
    for wrong in ({"drop_last": True, "fill": True}, {"drop_last": True}):
        with pytest.raises(UsageError):
            source_batches(3, 4, seed=0, epoch=0, **wrong)


@settings(deadline=None, max_examples=60)
@given(n=sizes, batch_size=sizes, start=st.integers(0, 60))
def test_the_target_cycle_is_one_stream_of_whole_passes(n, batch_size, start):
    cycle = TargetCycle(n, batch_size, seed=3)
    stream = cycle.block(0, 2 * n).flatten()
    assert (torch.bincount(stream, minlength=n) == 2 * batch_size).all()
    assert torch.equal(TargetCycle(n, batch_size, seed=3)(start), cycle.block(start, 3)[0])


@settings(deadline=None, max_examples=60)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=30), batch_size=sizes, start=st.integers(0, 99))
def test_balanced_batches_are_balanced_to_within_one(labels, batch_size, start):
    labels = torch.tensor(labels)
    cycle = TargetCycle(len(labels), batch_size, 0, labels)
    for batch in cycle.block(start, 4):
        counts = torch.bincount(labels[batch], minlength=5)[labels.unique()]
        assert counts.max() - counts.min() <= 1
    assert torch.equal(cycle(start + 2), cycle.block(start, 4)[2])


def test_balanced_cycling_uses_every_example_of_a_class_equally():
    labels = torch.tensor([0, 0, 0, 1, 1, 1, 1, 1, 1])
    stream = TargetCycle(9, 4, 0, labels).block(0, 30).flatten()  # 60 of each class
    counts = torch.bincount(stream, minlength=9)
    assert counts.tolist() == [20] * 3 + [10] * 6


def test_target_batch_is_the_cycle():
    labels = torch.tensor([0, 1, 1, 1])
    assert torch.equal(target_batch(4, 3, seed=1, step=7), TargetCycle(4, 3, 1)(7))
    balanced = target_batch(4, 2, seed=1, step=7, labels=labels, balanced=True)
    assert sorted(labels[balanced].tolist()) == [0, 1]
    with pytest.raises(UsageError, match="needs labels"):
        target_batch(4, 3, seed=1, step=7, balanced=True)
    with pytest.raises(UsageError, match="class indices"):
        TargetCycle(4, 3, 1, torch.zeros(4))
    with pytest.raises(UsageError, match="batch_size"):
        TargetCycle(4, 0, 1)


def test_generators_depend_on_all_three_and_nothing_else():
    draws = {
        key: torch.rand(3, generator=generator(*key)).tolist()
        for key in [(0, "a", 0), (1, "a", 0), (0, "b", 0), (0, "a", 1)]
    }
    assert len({tuple(d) for d in draws.values()}) == 4
    torch.manual_seed(99)
    assert torch.rand(3, generator=generator(0, "a", 0)).tolist() == draws[(0, "a", 0)]
    assert seed_for(0, "a", 0) == 6524340647856644559  # for good: runs of earlier versions can be resumed
    assert seed_for(0, "a1", 0) != seed_for(0, "a", 10)


@pytest.mark.parametrize("n", [1, 2, 63, 64, 65, 1000])
def test_the_order_of_a_large_set_is_a_permutation_without_a_table(n, monkeypatch):
    monkeypatch.setattr("soseleto.data.batches.MOST_IN_ORDER", 0)
    made = source_batches(n, 7, seed=3, epoch=1)
    assert len(made) == -(-n // 7)
    assert torch.cat(made[:]).sort().values.tolist() == list(range(n))
    assert torch.equal(made[len(made) - 1], made[-1])
    if n == 1000:
        other = torch.cat(source_batches(n, 7, seed=3, epoch=2)[:])
        order = torch.cat(made[:])
        assert (order == other).sum() < 10
        assert (order == torch.arange(n)).sum() < 10
        neighbours = torch.corrcoef(torch.stack([order[:-1], order[1:]]).double())[0, 1]
        assert abs(float(neighbours)) < 0.15
        assert len(source_batches(n, 7, seed=3, epoch=1, drop_last=True)) == 142


def test_the_target_of_a_long_epoch_is_the_same(monkeypatch):
    cycle = TargetCycle(10, 4, seed=0)
    at_once = cycle.batches(3, 6)
    monkeypatch.setattr("soseleto.data.batches.MOST_IN_ORDER", 0)
    assert all(torch.equal(a, b) for a, b in zip(at_once, cycle.batches(3, 6), strict=True))
