"""Audits: intervals of precision, recall and share of wrong labels from a random sample, whenever one stops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from soseleto.suspects.audit import Checked, Stratum, draw, evidence, figures, schedule, total
from soseleto.suspects.rates import Estimate


def stratum(size: int, checked: int, wrong: int, expected: float = 0.5, *, suspects: bool = True) -> Checked:
    answers = (True,) * wrong + (False,) * (checked - wrong)
    return Checked(suspects, size, expected, answers, wrong, checked - wrong)


def answered(sample: Stratum, wrong: np.ndarray, checks: int) -> Checked:
    """The first ``checks`` of the sample's order, answered by the truth."""
    answers = tuple(bool(answer) for answer in wrong[sample.order[:checks]])
    right = len(answers) - sum(answers)
    return Checked(sample.suspects, sample.size, sample.expected, answers, sum(answers), right)


def precision(one: Checked) -> Estimate:
    return figures([one])["precision"]


# Evidence


def test_the_prior_posterior_ratio_is_a_supermartingale_at_the_true_number() -> None:
    """Its mean over all samples is 1 while every count is possible, and at most 1 afterwards."""
    size, wrong = 12, 5
    for checked in range(size + 1):
        mean = 0.0
        for k in range(max(0, checked - (size - wrong)), min(checked, wrong) + 1):
            ratio = evidence(stratum(size, checked, k, 0.8))
            mean += stats.hypergeom.pmf(k, size, wrong, checked) * math.exp(ratio.against[wrong - ratio.first])
        assert mean == pytest.approx(1.0) if checked <= wrong else mean <= 1.0 + 1e-9


def test_the_total_is_the_least_over_all_splits() -> None:
    strata = [stratum(9, 4, 1, 0.2), stratum(7, 3, 3, 0.9), stratum(5, 0, 0)]
    parts = [evidence(one) for one in strata]
    least: dict[int, float] = {}
    for i, a in enumerate(parts[0].against):
        for j, b in enumerate(parts[1].against):
            for k, c in enumerate(parts[2].against):
                at = sum(part.first for part in parts) + i + j + k
                least[at] = min(least.get(at, math.inf), a + b + c)
    merged = total(strata)
    assert {merged.first + i: value for i, value in enumerate(merged.against)} == pytest.approx(least)


# Coverage


def test_all_figures_hold_at_the_worst_moment_to_stop() -> None:
    random = np.random.default_rng(0)
    bad = dict.fromkeys(("precision", "recall", "wrong_share"), 0)
    repeats = 60
    for repeat in range(repeats):
        probability, is_suspect, wrong = population(random, (0.5, 1.0)[repeat % 2])
        truth = {
            "precision": wrong[is_suspect].mean(),
            "recall": wrong[is_suspect].sum() / wrong.sum(),
            "wrong_share": wrong.mean(),
        }
        strata = draw(probability, is_suspect, seed=repeat)
        seen = [figures([answered(one, wrong, round(part * 30)) for one in strata]) for part in (0.25, 0.5, 1.0)]
        for name, true in truth.items():
            bad[name] += any(not one[name].low <= true <= one[name].high for one in seen)
    assert max(bad.values()) / repeats <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


def test_60_checks_give_a_useful_interval() -> None:
    estimate = precision(stratum(500, 60, 57, expected=0.95))
    assert [round(100 * end) for end in (estimate.low, estimate.high)] == [83, 99]  # as in docs/how-to/audit.md
    known = precision(stratum(40, 40, 31))
    assert (known.value, known.low, known.high) == (31 / 40,) * 3  # everything was checked


def test_decisions_beside_the_sample_are_certain_bounds_only() -> None:
    after = precision(Checked(True, 100, 0.5, (True,) * 5, 45, 30))
    assert (after.low, after.high) == (0.45, 0.7)
    assert precision(stratum(100, 5, 5)).low < 0.45


def test_without_suspects_only_the_share_is_known() -> None:
    estimates = figures([stratum(100, 20, 0, 0.1, suspects=False)])
    assert list(estimates) == ["wrong_share"]
    share = estimates["wrong_share"]
    assert 0.0 == share.low == share.value < share.high < 0.25
    assert figures([stratum(1_000_000, 60, 0, 0.02, suspects=False)])["wrong_share"].high < 0.1


# The sample


def population(random: np.random.Generator, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities, which are suspects, and which labels are wrong: ``share`` of what they promise."""
    probability = np.concatenate([random.uniform(0.6, 1.0, 60), np.where(np.arange(340) < 60, 0.5, 0.01)])
    return probability, np.arange(400) < 60, random.random(400) < share * probability


def test_the_sample_is_random_without_replacement_and_repeatable() -> None:
    probability, is_suspect, _ = population(np.random.default_rng(0), 1.0)
    suspects, others = draw(probability, is_suspect, seed=3)
    assert sorted(np.concatenate([suspects.order, others.order]).tolist()) == list(range(400))
    rows = schedule([suspects, others], 30)
    assert len(rows) == 60
    assert is_suspect[rows].tolist() == [True, False] * 30
    assert np.array_equal(draw(probability, is_suspect, seed=3)[0].order, suspects.order)
    firsts = [draw(None, is_suspect, seed=seed)[0].order[0] for seed in range(300)]
    assert len(set(firsts)) > 50  # any of the 60 may come first
