"""Counter-based random numbers: against SplitMix64 in plain Python, example by example."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soseleto.data.randomness import ExampleRandom

MASK = (1 << 64) - 1
numbers = st.integers(0, (1 << 62) - 1)


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


@pytest.mark.parametrize("shift", [(0, 1), (1, 0)], ids=["next place", "next example"])
def test_numbers_are_even_and_neighbours_unrelated(shift: tuple[int, int]) -> None:
    found = ExampleRandom.of(11, torch.arange(20_000)).uniform(8).double()
    counts = torch.histc(found, 64, 0.0, 1.0)
    assert float(((counts - 2500) ** 2 / 2500).sum()) < 110  # χ² of 63 degrees of freedom: 99.98 %
    rows, columns = shift
    first, second = found[: 8 - rows, : 20_000 - columns], found[rows:, columns:]
    assert abs(float(torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1])) < 0.01
