"""Folds, intervals and temperatures: what a comparison rests on."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from soseleto.comparison import accuracy as comparison
from soseleto.comparison.plan import fold_places, plan
from soseleto.data import Examples, Pair
from soseleto.errors import DataError
from soseleto.prediction import fit_temperature


def target(n: int = 20, classes: int = 4) -> Examples:
    return Examples(torch.arange(n, dtype=torch.float32)[:, None], torch.arange(n) % classes)


def test_folds_hold_every_example_once_and_every_class_evenly() -> None:
    labels = torch.tensor([0] * 9 + [1] * 6 + [2] * 2)
    for seed in range(5):
        folds = fold_places(Examples(torch.zeros(17, 1), labels), 3, seed=seed)
        assert torch.equal(torch.cat(folds).sort().values, torch.arange(17))
        for c in range(3):
            counts = [int((labels[fold] == c).sum()) for fold in folds]
            assert max(counts) - min(counts) <= 1
    again = fold_places(Examples(torch.zeros(17, 1), labels), 3, seed=2)
    assert any(not torch.equal(a, b) for a, b in zip(folds, again, strict=True))


def test_no_part_is_judged_on_what_it_trained_with() -> None:
    parts = plan(Pair(target(), target(), None), "noisy", folds=3, baselines=True, seed=0)
    assert [part.name for part in parts] == [
        "fold-1/soseleto", "fold-2/soseleto", "fold-3/soseleto", "ordinary",
        "fold-1/mixed", "fold-2/mixed", "fold-3/mixed",
        "fold-1/target_only", "fold-2/target_only", "fold-3/target_only",
    ]  # fmt: skip
    for part in parts:
        if part.method != "ordinary":  # which never looks at the target
            assert not set(part.target.ids or ()) & set(part.judged.ids or ())
            assert len(part.target) + len(part.judged) == 20
    for method in ("soseleto", "mixed", "target_only"):
        judged = [name for part in parts if part.method == method for name in part.judged.ids or ()]
        assert sorted(judged, key=int) == [str(i) for i in range(20)]


def test_a_test_set_adds_whole_baselines_to_the_folds() -> None:
    pair, names = Pair(target(), target(), target(8)), ["ordinary", "mixed", "target_only"]
    parts = plan(pair, "noisy", folds=0, baselines=True, seed=0)
    assert [part.name for part in parts] == names
    assert all(part.judged is pair.test for part in parts)
    parts = plan(pair, "noisy", folds=2, baselines=True, seed=0)
    assert [part.name for part in parts if part.judged is pair.test] == names
    without = plan(Pair(target(), target(), None), "noisy", folds=2, baselines=True, seed=0)
    assert [p.name for p in parts if p.judged is not pair.test] == [p.name for p in without]
    assert plan(Pair(target(), target(), None), "noisy", folds=0, baselines=True, seed=0) == []


def test_rows_pool_the_folds() -> None:
    right, wrong = torch.eye(2)[[0, 1, 1]], torch.eye(2)[[1]]
    judged = [
        comparison.Judged("soseleto", right, torch.tensor([0, 1, 1]), torch.tensor([0, 1, 3])),
        comparison.Judged("soseleto", wrong, torch.tensor([0]), torch.tensor([2])),
        comparison.Judged("ordinary", torch.eye(2)[[1] * 4], torch.zeros(4, dtype=torch.int64), torch.arange(4)),
    ]
    ours, theirs = comparison.rows(judged)
    assert (ours["accuracy"], ours["examples"], theirs["accuracy"]) == (75.0, 4, 0.0)
    assert ours["low"] < 75 < ours["high"]
    lines = comparison.table({"judged_on": "target", "folds": 2, "rows": [ours, theirs]})
    assert "75.0 %" in lines[1]
    assert "(2 folds)" in lines[0]


def judged(method: str, right: list[int], places: list[int]) -> comparison.Judged:
    """Outputs that are right (1) or wrong (0) about examples of class 0."""
    return comparison.Judged(
        method, torch.eye(2)[[1 - r for r in right]], torch.zeros(len(right), dtype=torch.int64), torch.tensor(places)
    )


def test_differences_are_paired_by_example() -> None:
    ours = [judged("soseleto", [1, 0], [2, 0]), judged("soseleto", [1, 1], [3, 1])]  # wrong about example 0
    rival = [judged("mixed", [1, 1, 1, 0], [0, 1, 2, 3])]  # wrong about example 3
    found = comparison.differences([*ours, *rival])["mixed"]
    assert found.value == 0.0
    discordant = 2 * 2 / 6  # p + r of Bonett and Price
    assert found.error == pytest.approx(100 * (discordant / 6) ** 0.5)
    assert found.high == pytest.approx(1.96 * found.error)
    assert comparison.differences(rival) == {}
    agreeing = judged("mixed", [0, 1, 1, 1], [0, 1, 2, 3])  # wrong about the same example: no pair differs
    assert comparison.differences([*ours, agreeing])["mixed"].error == pytest.approx(100 * (2 / 6 / 6) ** 0.5)


def test_a_baseline_is_kept_only_if_it_is_better_beyond_chance() -> None:
    places = list(range(60))

    def right(method: str, count: int) -> comparison.Judged:
        return judged(method, [1] * count + [0] * (60 - count), places)

    ours = right("soseleto", 40)
    assert comparison.winner([ours]) == "soseleto"
    assert comparison.winner([ours, right("ordinary", 41), right("mixed", 20)]) == "soseleto"
    assert comparison.winner([ours, right("ordinary", 46), right("mixed", 50)]) == "mixed"
    assert comparison.winner([ours, right("scan_mixed", 60)]) == "soseleto"  # shown and not kept
    # a first answer needs no evidence: training must be better beyond chance
    assert comparison.winner([ours, right("scan", 39)]) == "scan"
    assert comparison.winner([ours, right("scan", 34)]) == "soseleto"
    assert comparison.winner([ours, right("scan", 39), right("mixed", 50)]) == "mixed"
    # where the source does harm, the target alone need only be better
    assert comparison.winner([ours, right("target_only", 41), right("mixed", 39)]) == "soseleto"
    assert comparison.winner([ours, right("target_only", 41), right("mixed", 20)]) == "target_only"
    assert comparison.winner([ours, right("target_only", 40), right("mixed", 20)]) == "soseleto"


def test_the_temperature_is_the_one_the_labels_were_drawn_with() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(20_000, 5, generator=draw)
    labels = torch.multinomial((logits / 2.5).softmax(1), 1, generator=draw)[:, 0]
    found = fit_temperature(logits, labels)
    assert found == pytest.approx(2.5, rel=0.05)
    exact = min(torch.linspace(2, 3, 101), key=lambda t: float(F.cross_entropy(logits / t, labels)))
    assert found == pytest.approx(float(exact), abs=0.011)


def test_what_cannot_be_calibrated_is_said() -> None:
    with pytest.raises(DataError, match=r"give \(N, classes\) outputs"):
        fit_temperature(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(DataError, match="NaN"):
        fit_temperature(torch.full((2, 2), float("nan")), torch.tensor([0, 1]))
