"""Audits: exact intervals of precision, recall and share of wrong labels from a random sample, whenever one stops."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from scipy import stats

from soseleto.suspects import audit
from soseleto.suspects.audit import Checked, Decided, Figures, Stratum, allocate, draw, figures, split
from soseleto.suspects.estimate import Estimate
from soseleto.suspects.finite_population import Evidence, against_any, against_fewer, against_more, fisher_bound, total

Z = 1.959964


def answered(stratum: Stratum, wrong: np.ndarray, checks: int) -> Checked:
    """The first ``checks`` of the sample's order, answered by the truth."""
    answers = tuple(bool(one) for one in wrong[stratum.order[:checks]])
    right = len(answers) - sum(answers)
    return Checked(stratum.suspects, stratum.size, stratum.planned, stratum.expected, answers, sum(answers), right)


def of_one(size: int, checked: int, wrong: int, *, planned: int = 0, expected: float = 0.5, fixed: bool) -> Estimate:
    """The interval of the precision of ``size`` suspects."""
    answers = (True,) * wrong + (False,) * (checked - wrong)
    one = Checked(True, size, planned or size, expected, answers, wrong, checked - wrong)
    found = figures([one], fixed=fixed).precision
    assert found is not None
    return found


# Evidence


@pytest.mark.parametrize(
    ("size", "checked", "wrong"), [(50, 10, 3), (50, 10, 0), (50, 10, 10), (30, 30, 7), (30, 0, 0)]
)
def test_the_p_values_are_hypergeometric(size: int, checked: int, wrong: int) -> None:
    for evidence, tail in (
        (against_fewer(size, checked, wrong), lambda w: stats.hypergeom.sf(wrong - 1, size, w, checked)),
        (against_more(size, checked, wrong), lambda w: stats.hypergeom.cdf(wrong, size, w, checked)),
    ):
        possible = np.arange(wrong, size - (checked - wrong) + 1)
        assert (evidence.first, len(evidence.against)) == (wrong, len(possible))
        assert np.exp(-evidence.against) == pytest.approx(tail(possible))


def test_the_prior_posterior_ratio_is_a_supermartingale_at_the_true_number() -> None:
    """Its mean over all samples is 1 while every count is possible, and at most 1 afterwards."""
    size, wrong = 12, 5
    for checked in range(size + 1):
        mean = 0.0
        for k in range(max(0, checked - (size - wrong)), min(checked, wrong) + 1):
            ratio = against_any(size, checked, k, 0.8)
            mean += stats.hypergeom.pmf(k, size, wrong, checked) * math.exp(ratio.against[wrong - ratio.first])
        assert mean == pytest.approx(1.0) if checked <= wrong else mean <= 1.0 + 1e-9


def test_fishers_bound_is_a_quantile_of_chi_squared() -> None:
    for strata in (1, 2, 3):
        assert fisher_bound(strata, 0.02) == pytest.approx(stats.chi2.ppf(0.98, 2 * strata) / 2)


def test_the_total_is_the_least_over_all_splits() -> None:
    parts = [against_any(9, 4, 1, 0.2), against_any(7, 3, 3, 0.9), against_any(5, 0, 0, 0.5)]
    least: dict[int, float] = {}
    for i, a in enumerate(parts[0].against):
        for j, b in enumerate(parts[1].against):
            for k, c in enumerate(parts[2].against):
                at = sum(part.first for part in parts) + i + j + k
                least[at] = min(least.get(at, math.inf), a + b + c)
    found = total(parts)
    assert {found.first + i: value for i, value in enumerate(found.against)} == pytest.approx(least)


def test_the_ends_below_a_bound() -> None:
    evidence = Evidence(10, np.array([5.0, 2.0, 0.0, 1.0, 3.0]))
    assert evidence.below(2.5) == (11, 13)
    assert evidence.below(-1.0) is None
    assert evidence.largest(np.array([2.5, 9.0, 0.0])).tolist() == [13, 14, -1]
    assert evidence.smallest(np.array([2.5, 9.0, 0.0])).tolist() == [11, 10, -1]


# Coverage


@cache
def any_time(size: int, checked: int, wrong: int) -> tuple[float, float]:
    found = of_one(size, checked, wrong, fixed=False)
    return found.low, found.high


@cache
def wilson(size: int, checked: int, wrong: int) -> tuple[float, float]:
    p, z = wrong / checked, Z
    middle, half = p + z * z / (2 * checked), z * math.sqrt(p * (1 - p) / checked + z * z / (4 * checked * checked))
    return (middle - half) / (1 + z * z / checked), (middle + half) / (1 + z * z / checked)


def misses(interval: object, rate: float, *, size: int = 150, most: int = 60, repeats: int = 400) -> float:
    """How often an interval excludes the truth at some time: what stopping at the worst moment would report."""
    random = np.random.default_rng(7)
    truth = round(rate * size)
    bad = 0
    for _ in range(repeats):
        wrong = np.cumsum(random.permutation(size)[:most] < truth)
        for checked in range(5, most + 1):
            low, high = interval(size, checked, int(wrong[checked - 1]))  # type: ignore[operator]
            if not low <= truth / size <= high:
                bad += 1
                break
    return bad / repeats


@pytest.mark.parametrize("rate", [0.94, 0.4])
def test_intervals_hold_whenever_one_stops_and_wilsons_do_not(rate: float) -> None:
    allowed = 0.05 + 3 * math.sqrt(0.05 * 0.95 / 400)
    assert misses(any_time, rate) <= allowed
    assert misses(wilson, rate) > 2 * allowed


def test_intervals_of_a_fixed_size_have_the_exact_coverage() -> None:
    """Summed over all samples of 60 of 200, at every true number: at least 96 %, as 1 % is kept for earlier stops."""
    for truth in (1, 7, 40, 100, 190):
        possible = np.arange(max(0, 60 - (200 - truth)), min(60, truth) + 1)
        held = [of_one(200, 60, int(k), planned=60, expected=0.9, fixed=True) for k in possible]
        inside = np.array([one.low <= truth / 200 <= one.high for one in held])
        assert float(stats.hypergeom.pmf(possible, 200, truth, 60)[inside].sum()) >= 0.95


def population(random: np.random.Generator, share: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities, which are suspects, and which labels are wrong: ``share`` of what they promise."""
    probability = np.concatenate([random.uniform(0.6, 1.0, 60), np.where(np.arange(340) < 60, 0.5, 0.01)])
    return probability, np.arange(400) < 60, random.random(400) < share * probability


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
        strata = draw(probability, is_suspect, np.zeros(400, bool), checks=30, seed=repeat)
        seen = [
            figures([answered(one, wrong, round(part * one.planned)) for one in strata], fixed=True)
            for part in (0.25, 0.5, 0.75, 1.0)
        ]
        assert seen[-1].complete
        for name, true in truth.items():
            bad[name] += any(not getattr(one, name).low <= true <= getattr(one, name).high for one in seen)
    assert max(bad.values()) / repeats <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


def test_60_checks_give_a_useful_interval() -> None:
    after_all = of_one(500, 60, 57, planned=60, expected=0.95, fixed=True)
    assert after_all.low > 0.85
    assert after_all.width < 0.14
    assert [round(100 * end) for end in (after_all.low, after_all.high)] == [86, 99]  # as in docs/how-to/audit.md
    open_end = of_one(500, 60, 57, expected=0.95, fixed=False)
    assert [round(100 * end) for end in (open_end.low, open_end.high)] == [83, 99]
    before = of_one(500, 59, 56, planned=60, expected=0.95, fixed=True)
    assert before.width > after_all.width  # stopping early costs width


def test_further_checks_do_not_move_a_size_that_was_fixed() -> None:
    """A size chosen after looking at the answers would not have the coverage: later checks count at any time only."""
    planned = of_one(500, 60, 40, planned=60, fixed=True)
    answers = (True,) * 40 + (False,) * 20 + (True,) * 60
    more = figures([Checked(True, 500, 60, 0.5, answers, 100, 20)], fixed=True).precision
    at_any_time = figures([Checked(True, 500, 500, 0.5, answers, 100, 20)], fixed=True).precision
    assert more is not None
    assert at_any_time is not None
    assert (more.low, more.high) == (max(planned.low, at_any_time.low), min(planned.high, at_any_time.high))
    assert planned.low < more.low < more.high == planned.high


def test_everything_checked_is_known_exactly() -> None:
    for fixed in (True, False):
        found = of_one(40, 40, 31, fixed=fixed)
        assert (found.value, found.low, found.high) == (31 / 40,) * 3


# What was decided before, and beside the sample


def test_decisions_from_before_are_counted_and_not_extrapolated() -> None:
    """The worst 100 of 200 suspects were reviewed and all wrong; 30 of the other 100 were sampled, 6 wrong."""
    stratum = Checked(True, 100, 30, 0.3, (True,) * 6 + (False,) * 24, 6, 24)
    found = figures([stratum], (Decided(100, 100), Decided()), fixed=True).precision
    alone = figures([stratum], fixed=True).precision
    assert found is not None
    assert alone is not None
    assert found.value == pytest.approx((100 + 20) / 200)
    assert found.low == pytest.approx(0.5 + alone.low / 2)
    assert found.high == pytest.approx(0.5 + alone.high / 2)
    undone = figures([stratum], (Decided(100, 90, undone=10), Decided()), fixed=True).precision
    assert undone is not None
    assert (undone.low, undone.high) == pytest.approx((found.low - 0.05, found.high))


def test_decisions_beside_the_sample_are_certain_bounds_only() -> None:
    sample = Checked(True, 100, 10, 0.5, (True,) * 5, 5, 0)
    more = Checked(True, 100, 10, 0.5, (True,) * 5, 45, 30)
    before, after = (figures([one], fixed=True).precision for one in (sample, more))
    assert before is not None
    assert after is not None
    assert (after.low, after.high) == (0.45, 0.7)
    assert before.low < 0.45


def test_without_suspects_only_the_share_is_known() -> None:
    found = figures([Checked(False, 100, 20, 0.1, (False,) * 20, 0, 20)], fixed=True)
    assert isinstance(found, Figures)
    assert found.precision is None
    assert found.recall is None
    assert 0.0 == found.wrong_share.low == found.wrong_share.value < found.wrong_share.high < 0.25


# The sample


def test_the_sample_is_random_without_replacement_and_repeatable() -> None:
    probability, is_suspect, _ = population(np.random.default_rng(0), 1.0)
    decided = np.zeros(400, bool)
    decided[:10] = True
    strata = draw(probability, is_suspect, decided, checks=30, seed=3)
    assert [one.suspects for one in strata] == [True, False, False]
    assert sum(one.planned for one in strata[1:]) == strata[0].planned == 30
    together = np.concatenate([one.order for one in strata])
    assert sorted(together.tolist()) == list(range(10, 400))
    again, other = (draw(probability, is_suspect, decided, checks=30, seed=seed) for seed in (3, 4))
    assert all(np.array_equal(a.order, b.order) for a, b in zip(strata, again, strict=True))
    assert not np.array_equal(strata[0].order, other[0].order)
    firsts = [draw(None, is_suspect, decided, checks=5, seed=seed)[0].order[0] for seed in range(300)]
    assert len(set(firsts)) > 45  # any of the 50 may come first


def test_doubtful_examples_are_checked_more_often() -> None:
    probability = np.where(np.arange(1000) < 150, 0.5, 0.01)
    doubtful, clear = split(np.arange(1000), probability)
    assert len(doubtful) == pytest.approx(150, abs=10)
    assert probability[clear].max() == pytest.approx(0.01)
    number, of_clear = allocate([len(doubtful), len(clear)], [0.5, 0.01], 60)
    assert number + of_clear == 60
    assert 2 * len(doubtful) / 1000 < number / 60 < 0.5
    assert len(split(np.arange(1000), np.full(1000, 0.2))) == 1  # no reason for two
    assert allocate([5, 900], [0.5, 0.01], 60) == [5, 55]
    assert allocate([30], [0.5], 60) == [30]


def test_stratifying_makes_the_recall_narrower() -> None:
    random = np.random.default_rng(1)
    probability = np.concatenate([np.full(500, 0.95), np.full(300, 0.5), np.full(1700, 0.01)])
    is_suspect, none = np.arange(2500) < 500, np.zeros(2500, bool)
    widths: dict[int, list[float]] = {2: [], 3: []}
    for seed in range(12):
        wrong = random.random(2500) < probability
        for given in (probability, None):
            strata = draw(given, is_suspect, none, checks=60, seed=seed)
            found = figures([answered(one, wrong, one.planned) for one in strata], fixed=True)
            assert found.recall is not None
            widths[len(strata)].append(found.recall.width)
    assert len(widths[2]) == len(widths[3]) == 12
    assert np.mean(widths[3]) < 0.97 * np.mean(widths[2])


def test_a_million_examples_take_no_time_and_little_memory() -> None:
    one = Checked(False, 1_000_000, 60, 0.02, (False,) * 60, 0, 60)
    found = figures([one], fixed=True)
    assert found.wrong_share.high == pytest.approx(1 - 0.02 ** (1 / 60), abs=1e-3)
    assert audit.CHECKS == 60
