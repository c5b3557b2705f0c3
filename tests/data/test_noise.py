"""Label noise: exact counts, correct masks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soseleto.data import pair_flip, symmetric
from soseleto.errors import UsageError

label_lists = st.lists(st.integers(0, 4), min_size=1, max_size=60)
rates = st.floats(0, 1)


@settings(deadline=None, max_examples=80)
@given(labels=label_lists, rate=rates, seed=st.integers(0, 3))
def test_exactly_the_asked_number_is_flipped(labels, rate, seed):
    labels = torch.tensor(labels)
    for made in (symmetric(labels, rate, 5, seed), pair_flip(labels, rate, 5, seed)):
        assert int(made.flipped.sum()) == round(rate * len(labels))
        assert torch.equal(made.flipped, made.labels != labels)
        assert int(made.labels.min()) >= 0
        assert int(made.labels.max()) <= 4


def test_symmetric_is_uniform_over_the_other_classes():
    labels = torch.arange(10).repeat(3000)
    made = symmetric(labels, 0.4, 10, seed=0)
    shift = (made.labels - labels)[made.flipped] % 10
    counts = torch.bincount(shift, minlength=10)
    assert counts[0] == 0
    expected = 12000 / 9
    assert ((counts[1:] - expected).abs() < 5 * expected**0.5).all()
    assert not torch.equal(made.labels, symmetric(labels, 0.4, 10, seed=1).labels)
    assert torch.equal(made.labels, symmetric(labels, 0.4, 10, seed=0).labels)


def test_pair_flip_goes_to_the_next_class():
    labels = torch.arange(5).repeat(20)
    made = pair_flip(labels, 0.5, 5, seed=0)
    assert torch.equal(made.labels[made.flipped], (labels[made.flipped] + 1) % 5)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: symmetric(torch.tensor([0, 1]), 40, 2, 0), "rate must be between 0 and 1, got 40"),
        (lambda: symmetric(torch.tensor([0, 2]), 0.4, 2, 0), "outside 0 to 1"),
        (lambda: symmetric(torch.tensor([0, 0]), 0.4, 1, 0), "classes must be at least 2"),
        (lambda: pair_flip(torch.tensor([0.5]), 0.4, 2, 0), "class indices"),
    ],
)
def test_wrong_arguments_are_named(call, words):
    with pytest.raises(UsageError, match=words):
        call()
