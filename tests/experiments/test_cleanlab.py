"""cleanlab's rankings as we compute them: equal to the package's, from probabilities that are out of sample."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from experiments import cleanlab as ours
from soseleto.data import Examples
from soseleto.errors import UsageError


@pytest.fixture(params=[3, 10])
def problem(request: pytest.FixtureRequest) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities that lean towards the label, some of them confidently to another."""
    draw = np.random.default_rng(request.param)
    labels = np.arange(600) % request.param
    scores = draw.normal(size=(600, request.param))
    scores[np.arange(600), np.where(draw.random(600) < 0.8, labels, (labels + 1) % request.param)] += 2.0
    p = np.exp(scores)
    return p / p.sum(axis=1, keepdims=True), labels


def test_rankings_are_the_packages_own(problem: tuple[np.ndarray, np.ndarray]) -> None:
    from cleanlab import filter as find
    from cleanlab import rank

    p, y = problem
    found = ours.trusts(torch.from_numpy(p), torch.from_numpy(y))
    for name, settings in {
        "cleanlab_self_confidence": {"method": "self_confidence"},
        "cleanlab_margin": {"method": "normalized_margin"},
        "cleanlab_confident": {"method": "normalized_margin", "adjust_pred_probs": True},
    }.items():
        theirs = rank.get_label_quality_scores(y, p, **settings)
        np.testing.assert_allclose(found[name].numpy(), theirs, rtol=1e-10, atol=1e-12)
    issues = find.find_label_issues(y, p, filter_by="confident_learning", n_jobs=1)
    mine = ours.confident_issues(p, y)
    assert mine.any()
    # The package then spares labels that the model itself would give.
    assert np.array_equal(mine & (p.argmax(axis=1) != y), issues)


def test_every_example_is_judged_by_a_model_that_has_not_seen_it() -> None:
    source = Examples(torch.arange(103.0)[:, None], torch.arange(103) % 4)
    seen: list[int] = []

    def predict(training: Examples, inputs: Tensor, fold: int) -> Tensor:
        known = {float(x) for x in training.inputs}
        assert not known & {float(x) for x in inputs}
        assert len(known) + len(inputs) == 103
        seen.append(fold)
        return inputs.expand(-1, 4)

    found = ours.out_of_sample(source, 4, 0, predict)
    assert seen == [0, 1, 2, 3]
    assert torch.equal(found[:, :1], source.inputs)  # in the source's own order


def test_the_budget_is_that_of_one_training() -> None:
    assert [ours.fold_epochs(60, folds) for folds in (2, 4, 5)] == [60, 20, 15]
    with pytest.raises(UsageError, match="at least 2 folds"):
        ours.fold_epochs(60, 1)
