"""Copies and groups stay on one side of every split: on labels by coin flip nothing may look like a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import soseleto
from soseleto.comparison.plan import fold_places, plan
from soseleto.data import Examples, Pair, Reading, read_pair
from soseleto.data.groups import kept_together

N, M, WIDTH = 200, 40, 6


def coins(seed: int) -> tuple[Examples, torch.Tensor, torch.Tensor]:
    """A source, and inputs and labels of further examples, all labels by chance, and both classes as frequent."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(N + M, WIDTH, generator=draw)
    labels = torch.cat([torch.randperm(count, generator=draw) % 2 for count in (N, M)])
    return Examples(inputs[:N], labels[:N]), inputs[N:], labels[N:]


def with_copies(seed: int) -> tuple[Any, Any, Any]:
    source, inputs, labels = coins(seed)
    return source, (inputs.repeat(4, 1), labels.repeat(4)), None


def with_groups(seed: int) -> tuple[Any, Any, Any]:
    """Every patient has a place of its own and a label, which the source knows too."""
    draw = torch.Generator().manual_seed(seed)
    places, labels = 3 * torch.randn(M, WIDTH, generator=draw), torch.randint(2, (M,), generator=draw)
    sides = []
    for count in (N, 4 * M):
        patient = torch.arange(count) % M
        inputs = places[patient] + 0.1 * torch.randn(count, WIDTH, generator=draw)
        sides.append(Examples(inputs, labels[patient], groups=patient))
    return *sides, None


def with_test(seed: int) -> tuple[Any, Any, Any]:
    """The source has most of the test set."""
    (source, inputs, labels), (_, tests, of_tests) = coins(seed), coins(seed + 100)
    inputs_of_source = torch.cat([source.inputs, *[tests[:30]] * 8])
    return (inputs_of_source, torch.cat([source.labels, *[of_tests[:30]] * 8])), (inputs, labels), (tests, of_tests)


@pytest.mark.parametrize("made", [with_copies, with_groups, with_test])
def test_nothing_looks_like_a_result_where_labels_are_coin_flips(made: Any) -> None:
    source, target, test = made(1)
    compared = soseleto.compare(lambda: _network(), source, target, test=test, epochs=2, lr=0.1, baselines=True)
    assert {row["method"] for row in compared.rows} >= {"soseleto", "ordinary", "mixed", "target_only", "scan"}
    for row in compared.rows:
        assert row["low"] <= 50 <= row["high"], row
    assert not soseleto.scan(source, target).suspects().precision.known


def _network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 2))


def test_a_group_is_in_one_fold_and_its_source_examples_are_left_out_of_that_training() -> None:
    source, target, _ = with_groups(0)
    source, target = kept_together(source, target)
    folds = fold_places(target, 3, seed=0)
    assert sorted(torch.cat(folds).tolist()) == list(range(4 * M))
    parts = plan(Pair(source, target, None), "noisy", folds=3, baselines=True, seed=0)
    for part in parts:
        judged = set(part.judged.groups.tolist())
        assert not judged & set(part.source.groups.tolist())
        assert not judged & set(part.target.groups.tolist())
    assert [part.name for part in parts if part.method == "ordinary"] == [f"fold-{n}/ordinary" for n in (1, 2, 3)]


def table(path: Path, **columns: Any) -> Path:
    draw = np.random.default_rng(len(columns["label"]))
    numbers = {name: draw.normal(size=len(columns["label"])) for name in "abcde"}
    pd.DataFrame({**numbers, **columns}).to_csv(path, index=False)
    return path


def test_tables_with_copies_groups_contradictions_and_the_test_set_in_the_source(tmp_path: Path) -> None:
    source = pd.read_csv(table(tmp_path / "s.csv", label=["x", "y"] * 30, who=["p1", "p2", None] * 20))
    target = pd.read_csv(table(tmp_path / "t.csv", label=["x", "y"] * 8, who=["p1", "q"] * 8))
    test = pd.read_csv(table(tmp_path / "e.csv", label=["x", "y"] * 5, who=["r"] * 9 + ["p2"]))
    numbers = list("abcde")
    target.loc[[4, 7], numbers] = target.loc[0, numbers].to_numpy()  # the copy in row 7 has the other label
    source.loc[[10, 12], numbers] = test.loc[3, numbers].to_numpy()
    pair = read_pair(source, target, test, mode="noisy", reading=Reading(group_column="who"))
    texts = {problem.kind: str(problem) for problem in pair.problems}
    assert texts["contradiction"] == ("target: 1 example is there twice, under different labels (0 as x and 7 as y).")
    left = {problem.text for problem in pair.dropped}
    assert "the source has copies of 1 test example (test 3 = source 10, test 3 = source 12): 2 source " in str(left)
    assert "20 source examples are of groups that the test has too" in str(left)
    assert {"10", "12", "1", "4"}.isdisjoint(pair.source.ids)
    assert "who" not in (pair.preparation.names if pair.preparation else ())
    groups = pair.target.groups.tolist()
    assert len(set(groups)) == 1  # all of p1, of q, and rows 0 and 7, which join these
    assert "kept together" in texts["groups"]
    with pytest.raises(soseleto.UsageError, match="no column 'whom' for group_column"):
        read_pair(source, target, mode="noisy", reading=Reading(group_column="whom"))


def test_ten_thousand_classes_have_no_first_answer() -> None:
    inputs, labels = torch.randn(5000, 3), torch.arange(5000) % 10_000
    labels[0] = 9_999
    with pytest.raises(soseleto.UsageError, match="10,000 examples of 10,000 classes are too many for a first answer"):
        soseleto.scan((inputs, labels), (inputs + 0.1, labels))
