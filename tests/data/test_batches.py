"""Batch indices: every source example once per epoch, targets equally often, the same after a resume."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soseleto.data import TargetCycle, generator, seed_for, source_batches, source_order
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


def test_wrong_sizes_and_labels_of_a_cycle():
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
