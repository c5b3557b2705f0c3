"""Detection of wrong labels: AUROC, precision and curves against counting every pair and every order of ties."""

from __future__ import annotations

from itertools import pairwise, permutations

import pytest
import torch
from torch import Tensor

from experiments.detection import (
    FRACTIONS,
    auroc,
    average_precision,
    compare,
    precision_at_errors,
    wrong_among_kept,
)
from soseleto.errors import DataError


def drawn(n: int, seed: int, levels: int) -> tuple[Tensor, Tensor]:
    """Trust on few levels, so that many are tied, and some wrong labels."""
    seeded = torch.Generator().manual_seed(seed)
    trust = torch.randint(levels, (n,), generator=seeded).double() / levels
    wrong = torch.rand(n, generator=seeded) < 0.4
    wrong[0], wrong[1] = True, False
    return trust, wrong


@pytest.mark.parametrize("levels", [2, 5, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_auroc_is_the_share_of_pairs_in_order(levels: int, seed: int) -> None:
    trust, wrong = drawn(60, seed, levels)
    right, bad = trust[~wrong, None], trust[None, wrong]
    pairs = (right > bad).double() + 0.5 * (right == bad).double()
    assert auroc(trust, wrong) == pytest.approx(float(pairs.mean()), abs=1e-12)


@pytest.mark.parametrize("seed", range(4))
def test_ties_stand_for_every_order(seed: int) -> None:
    trust, wrong = drawn(6, seed, 3)
    k = int(wrong.sum())
    precisions, halves, averages = [], [], []
    for order in permutations(range(6)):
        if all(trust[a] <= trust[b] for a, b in pairwise(order)):
            ranked = wrong[list(order)].double()
            precisions.append(float(ranked[:k].mean()))
            halves.append(float(ranked[3:].mean()))
            averages.append(float((ranked * ranked.cumsum(0) / torch.arange(1, 7)).sum() / k))
    assert precision_at_errors(trust, wrong) == pytest.approx(sum(precisions) / len(precisions))
    assert average_precision(trust, wrong) == pytest.approx(sum(averages) / len(averages), abs=1e-12)
    assert wrong_among_kept(trust, wrong, [0.5])[0] == pytest.approx(sum(halves) / len(halves))


def test_a_perfect_and_a_useless_signal() -> None:
    wrong = torch.arange(100) < 30
    perfect, useless = (~wrong).float(), torch.zeros(100)
    found = compare({"perfect": perfect, "useless": useless}, wrong)
    assert found == {
        "perfect": {"auroc": 1.0, "precision": 1.0},
        "useless": {"auroc": 0.5, "precision": pytest.approx(0.3)},
    }
    kept = wrong_among_kept(perfect, wrong)
    assert len(kept) == len(FRACTIONS) == 20
    assert kept[FRACTIONS.index(0.7)] == 0.0
    assert kept[-1] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("trust", "wrong", "message"),
    [
        (torch.zeros(3), torch.zeros(2, dtype=torch.bool), "for each example"),
        (torch.zeros(2), torch.zeros(2), "boolean"),
        (torch.tensor([0.0, float("nan")]), torch.tensor([True, False]), "NaN"),
        (torch.zeros(2), torch.tensor([True, True]), "right and wrong"),
    ],
)
def test_what_cannot_be_ranked_raises(trust: Tensor, wrong: Tensor, message: str) -> None:
    with pytest.raises(DataError, match=message):
        auroc(trust, wrong)
