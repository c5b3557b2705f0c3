"""Weights, scores and visits: the only clip, the running mean, the summary, the ranking."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soseleto.errors import DataError, UsageError
from soseleto.weights import Weights


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=30), st.floats(0, 1, width=32))
def test_steps_clip_weights_and_never_scores(changes: list[float], start: float) -> None:
    weights = Weights(3, initial=start)
    expected, total = np.float32(start), 0.0
    for change in changes:
        weights.step(torch.tensor([1]), torch.tensor([change]), torch.tensor([10 * change]))
        expected = np.clip(np.float32(expected + np.float32(change)), 0, 1)
        total += 10 * change
    assert weights.values[1] == expected
    assert weights.visits.tolist() == [0, len(changes), 0]
    assert weights.scores[1] == pytest.approx(total / len(changes), abs=1e-4)
    assert weights.values[0] == weights.values[2] == np.float32(start)
    assert weights.scores[0] == 0


def test_summary_of_the_distribution_of_weights() -> None:
    weights = Weights(8)
    weights.values.copy_(torch.tensor([0, 0, 0.049, 0.051, 0.5, 0.999, 1, 1]))
    summary = weights.summary()
    values = weights.values.double()
    assert summary["mean_weight"] == pytest.approx(float(values.mean()))
    assert summary["effective_source"] == pytest.approx(float(values.sum() ** 2 / values.square().sum()))
    assert (summary["share_at_zero"], summary["share_at_one"]) == (0.25, 0.25)
    assert sum(t.nbytes for t in Weights(50).state().values()) == 12 * 50
    assert Weights(50, initial=0.3).summary()["effective_source"] == pytest.approx(50)
    assert Weights(50, initial=0.0).summary()["effective_source"] == 0


def test_order_is_by_score_then_weight_then_place() -> None:
    weights = Weights(5)
    weights.scores.copy_(torch.tensor([0.0, 2.0, -1.0, 0.0, 0.0]))
    weights.values.copy_(torch.tensor([0.5, 0.1, 1.0, 0.9, 0.5]))
    assert weights.order().tolist() == [1, 3, 0, 4, 2]


def test_weights_of_another_source_are_refused() -> None:
    with pytest.raises(DataError, match="another source"):
        Weights(4).load_state(Weights(5).state())


@pytest.mark.parametrize(("n", "initial", "words"), [(0, 1.0, "at least one"), (3, 1.5, r"\[0, 1\], got 1.5")])
def test_bad_arguments(n: int, initial: float, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Weights(n, initial=initial)
