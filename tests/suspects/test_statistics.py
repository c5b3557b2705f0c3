"""The statistics behind suspects, each against its formula or a case that can be computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from soseleto.data import Examples
from soseleto.suspects import calibration
from soseleto.suspects.calibration import Estimate, Rectifier
from soseleto.suspects.probes import PlantedProbes
from soseleto.suspects.signals import Evidence, gather
from soseleto.suspects.suspects import Calibrated


def evidence_of(signals: np.ndarray, n_source: int, wrong: np.ndarray, checked: tuple[int, int] | None) -> Evidence:
    """Signals (n + m, d) of sources followed by probes; right labels are 0, wrong ones 1."""
    labels = torch.zeros(len(signals), dtype=torch.int64)
    probes = PlantedProbes(n_source, labels[n_source:], torch.from_numpy(wrong).long(), checked)
    even = torch.full((len(labels), 2), 0.5)
    named = {str(i): torch.from_numpy(column) for i, column in enumerate(signals.T)}
    return Evidence(probes, labels, named, even, even)


def of_noise(seed: int, checked: tuple[int, int] | None = (2000, 600)) -> Evidence:
    """Eight signals that carry no information, 300 source examples and 40 probes: a regression can only overfit."""
    draw = np.random.default_rng(seed)
    return evidence_of(draw.normal(size=(340, 8)), 300, np.arange(40) % 2 == 0, checked)


def test_the_share_of_wrong_labels_is_the_counted_one() -> None:
    found = Calibrated.learn(of_noise(0, checked=(80, 29)))
    assert found.wrong_share.value == 29 / 80
    assert found.wrong_share.low < found.probability.mean() < found.wrong_share.high  # which the regressions say
    inferred = Calibrated.learn(of_noise(0, checked=None))
    assert inferred.wrong_share.value == inferred.probability.mean()


def test_probes_are_judged_by_regressions_that_did_not_see_them() -> None:
    """Without information in the signals wrong and right probes look the same, unless they were learned from."""
    gaps = []
    for seed in range(6):
        counted = Calibrated.learn(of_noise(seed), seed).counted
        gaps.append(counted.wrong.mean() - counted.right.mean())
    assert np.mean(gaps) < 0.02


@pytest.mark.parametrize(("factor", "seed"), [(1.0, 0), (9.0, 1), (30.0, 2)])
def test_a_regression_ends_at_the_maximum_of_its_likelihood(factor: float, seed: int) -> None:
    """Also from a start that is overconfident by any factor, where Newton's method alone alternates for ever."""
    draw = np.random.default_rng(seed)
    positive = np.arange(60) % 2 == 0
    z = factor * draw.normal(np.where(positive, 1.0, -1.0), 1.0)
    a, c = calibration.log_ratio(z[:, None], positive, calibration.PULL, towards=1.0)
    left = positive - calibration.sigmoid(a * z + c)
    assert abs((z * left).sum() - calibration.PULL * (a - 1.0)) < 1e-5 * factor
    assert abs(left.sum()) < 1e-5


def test_the_rates_by_hand() -> None:
    """Two probes of each kind, one above the threshold, and the two half probes; no finite-sample variation."""
    source = np.array([0.9, 0.7, 0.2, 0.2])
    counted = Rectifier(
        wrong=np.array([0.8, 0.1]),
        right=np.array([0.6, 0.2]),
        wrong_weights=np.array([[0.4, 0.3, 0.2, 0.1]]),
        right_weights=np.array([[0.5, 0.2, 0.2, 0.1]]),
        luck=np.zeros((1, 2)),
        shares=np.array([0.4]),
    )
    missed = 0.4 * (1 - 0.8) + 0.2 * (1 - 0.8)  # of the probe at 0.8, and of the half probe at the suspects' mean, 0.8
    false = 0.5 * 0.6 + 0.2 * 0.8
    hits = (0.9 + 0.7) / 4 + 0.4 * missed - 0.6 * false
    precision, recall = counted.rates(source, 0.5)
    assert precision[0] == pytest.approx(hits / 0.5)
    assert recall[0] == pytest.approx(hits / 0.4)
    assert counted.wrong_shares(source)[0] == pytest.approx(0.4)


def test_intervals_include_finite_sample_variation() -> None:
    """With 20,000 probes hardly anything else is left: the wrong labels of n are a sum of n independent draws."""
    draw = np.random.default_rng(0)
    source = np.repeat([0.8, 0.1], [20, 80])
    known = np.repeat([0.8, 0.1], [4_000, 16_000])
    wrong = draw.random(len(known)) < known  # calibrated probabilities
    counted = Rectifier.draw(source, known, wrong, 400, draw, checked=(10_000_000, 2_400_000))
    of_all = math.sqrt((source * (1 - source)).sum()) / 100
    of_suspects = math.sqrt(20 * 0.8 * 0.2) / 20
    assert counted.wrong_shares(source).std() == pytest.approx(of_all, rel=0.15)
    precision, recall = counted.rates(source, 0.5)
    assert precision.mean() == pytest.approx(0.8, abs=0.02)
    assert precision.std() == pytest.approx(of_suspects, rel=0.15)
    assert recall.std() > 0.05


def test_an_estimate_spans_the_middle_95_percent_of_every_set() -> None:
    even = np.linspace(0, 1, 1001)
    assert Estimate.of(0.5, even) == Estimate(0.5, pytest.approx(0.025), pytest.approx(0.975))
    assert Estimate.of(0.5, even, np.array([1.5])).high == pytest.approx(1.5)
    assert Estimate.of(0.0, even).low == 0.0


def calibrated(probability: list[float]) -> Calibrated:
    """With these probabilities, whatever the signals say."""
    p = np.array(probability)
    evidence = evidence_of(np.zeros((len(p) + 20, 1)), len(p), np.arange(20) % 2 == 0, None)
    counted = Rectifier.draw(p, np.repeat([0.9, 0.1], 10), np.repeat([True, False], 10), 50, np.random.default_rng(0))
    return Calibrated(evidence, p, np.repeat(p[None], 3, axis=0), np.arange(len(p)), counted)


@pytest.mark.parametrize(
    ("precision", "count"),
    [(0.995, 4), (0.985, 1), (0.98, 2), (0.95, 3), (0.9, 3), (0.86, 4), (0.7, 5), (0.5, 5)],
)
def test_as_many_suspects_as_the_precision_allows(precision: float, count: int) -> None:
    """The means of the highest are 0.99, 0.98, 0.953, 0.865 and 0.712; where none reaches it, as many as are wrong."""
    found = calibrated([0.9, 0.1, 0.99, 0.6, 0.97][::-1]).for_precision(precision)
    means = {1: 0.99, 2: 0.98, 3: 2.86 / 3, 4: 3.46 / 4, 5: 3.56 / 5}
    assert len(found) == count
    assert found.precision.value == pytest.approx(means.get(count, 1.0))
    assert found.recall.value == pytest.approx(count * means.get(count, 0.0) / 3.56)


def twins(weights: Tensor) -> Evidence:
    """Forty source examples of label 0 and twenty of label 1 in one place, sixty of label 1 opposite, and ten probes of
    label 1 in the first place."""
    places = torch.tensor([[1.0, 0.0]] * 60 + [[-1.0, 0.0]] * 60 + [[1.0, 0.0]] * 10)
    labels = torch.tensor([0] * 40 + [1] * 80 + [1] * 10)
    source = Examples(places, labels)
    target = Examples(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]).repeat(10, 1), torch.tensor([0, 1]).repeat(10))
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
        model.bias.zero_()
    probes = PlantedProbes(120, labels[120:], torch.zeros(10, dtype=torch.int64))

    def outputs(inputs: Tensor) -> Tensor:
        with torch.no_grad():
            return model(inputs)

    return gather(model, outputs, source, target, probes, {"weight": weights})


def test_neither_probes_nor_examples_without_weight_vote() -> None:
    """The twenty wrong labels have weight 0; nothing but the ten probes would support label 1 in the first place."""
    weights = torch.cat([torch.ones(40), torch.zeros(20), torch.ones(70)])
    found = twins(weights)
    assert torch.equal(found.signals["neighbours"][120:], torch.zeros(10))
    assert torch.equal(found.signals["neighbours"][:40], torch.ones(40))
    assert torch.equal(found.signals["neighbours"][40:60], torch.zeros(20))
