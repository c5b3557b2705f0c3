"""Random numbers; batches: every source example once per epoch, targets equally often, the same after a resume."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soseleto.data import Examples, TargetCycle, feed, generator, seed_for, source_batches
from soseleto.data.batches import ExampleRandom
from soseleto.errors import UsageError

sizes = st.integers(1, 40)
MASK = (1 << 64) - 1
numbers = st.integers(0, (1 << 62) - 1)


@settings(deadline=None, max_examples=60)
@given(n=sizes, batch_size=sizes, seed=st.integers(0, 5), epoch=st.integers(0, 5))
def test_an_epoch_visits_every_example_once(n, batch_size, seed, epoch):
    batches = source_batches(n, batch_size, seed=seed, epoch=epoch)
    assert sorted(torch.cat(batches).tolist()) == list(range(n))
    assert all(len(batch) == batch_size for batch in batches[:-1])


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


def mixed(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def slow(key: int, counters: list[int], place: int) -> float:
    for counter in counters:
        key = mixed((key + counter * 0x9E3779B97F4A7C15) & MASK)
    return (mixed((key + place * 0x9E3779B97F4A7C15) & MASK) >> 40) / 2**24


@given(numbers, st.lists(st.tuples(numbers, numbers), min_size=1, max_size=4))
@settings(max_examples=30, deadline=None)
def test_numbers_are_those_of_the_slow_loop(key: int, counters: list[tuple[int, int]]) -> None:
    found = ExampleRandom.of(key, *(torch.tensor(column) for column in zip(*counters, strict=True))).uniform(3)
    expected = [[slow(key, list(row), place) for row in counters] for place in (1, 2, 3)]
    assert torch.equal(found, torch.tensor(expected))


def test_a_stream_continues_and_an_example_has_its_own() -> None:
    index = torch.arange(50)
    whole, parts = ExampleRandom.of(3, index).uniform(5), ExampleRandom.of(3, index)
    assert torch.equal(whole, torch.cat([parts.uniform(2), parts.uniform(3)]))
    some = torch.tensor([31, 7])
    assert torch.equal(whole[:, some], ExampleRandom.of(3, some).uniform(5))


def test_blocks_of_many_steps_hold_the_same_batches(monkeypatch):
    data = Examples(torch.randint(0, 256, (100, 3, 8, 8), dtype=torch.uint8), torch.arange(100) % 7)
    batches = source_batches(100, 8, seed=0, epoch=3)
    single = list(feed(data, batches, seed=0, epoch=3))
    assert all(torch.equal(batch.inputs, data.inputs[index]) for batch, index in zip(single, batches, strict=True))
    monkeypatch.setattr("soseleto.data.feeding.block_steps", lambda examples, batch_size: 4)
    for start in (0, 3, 4, 12):
        blocks = list(feed(data, batches, seed=0, epoch=3, start=start))
        assert len(blocks) == 13 - start
        for one, other in zip(single[start:], blocks, strict=True):
            assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("index", "inputs", "labels"))
