"""Detection of wrong labels against counting every pair and every order of ties; cleanlab's rankings."""

from __future__ import annotations

from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from torch import Tensor

from experiments import cleanlab, measures
from experiments.measures import FRACTIONS, auroc, compare, precision_at_errors, wrong_among_kept
from soseleto.data import Examples
from soseleto.errors import DataError


def drawn(n: int, seed: int, levels: int) -> tuple[Tensor, Tensor]:
    """Trust on few levels, so that many are tied, and some wrong labels."""
    seeded = torch.Generator().manual_seed(seed)
    trust = torch.randint(levels, (n,), generator=seeded).double() / levels
    wrong = torch.rand(n, generator=seeded) < 0.4
    wrong[0], wrong[1] = True, False
    return trust, wrong


@pytest.mark.parametrize("seed", range(3))
def test_ties_stand_for_every_order(seed: int) -> None:
    trust, wrong = drawn(6, seed, 3)
    k = int(wrong.sum())
    precisions, halves = [], []
    for order in permutations(range(6)):
        if all(trust[a] <= trust[b] for a, b in pairwise(order)):
            ranked = wrong[list(order)].double()
            precisions.append(float(ranked[:k].mean()))
            halves.append(float(ranked[3:].mean()))
    assert precision_at_errors(trust, wrong) == pytest.approx(sum(precisions) / len(precisions))
    assert wrong_among_kept(trust, wrong, [0.5])[0] == pytest.approx(sum(halves) / len(halves))


def test_a_perfect_and_a_useless_signal() -> None:
    wrong = torch.arange(100) < 30
    perfect, useless = (~wrong).float(), torch.zeros(100)
    assert compare({"perfect": perfect, "useless": useless}, wrong) == {
        "perfect": {"auroc": 1.0, "precision": 1.0},
        "useless": {"auroc": 0.5, "precision": pytest.approx(0.3)},
    }
    kept = wrong_among_kept(perfect, wrong)
    assert kept[FRACTIONS.index(0.7)] == 0.0
    assert kept[-1] == pytest.approx(0.3)
    with pytest.raises(DataError, match="NaN"):
        auroc(torch.tensor([0.0, float("nan")]), torch.tensor([True, False]))


class Listed:
    """Suspects with given probabilities."""

    basis = "random mistakes"
    precision = type("Estimate", (), {"low": 0.5, "high": 1.0})

    def __init__(self, probability: list[float], threshold: float) -> None:
        self.probability = torch.tensor(probability)
        self.is_suspect = self.probability >= threshold

    def __len__(self) -> int:
        return int(self.is_suspect.sum())


def test_only_labels_whose_truth_is_known_count() -> None:
    labels, truth = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([1, 0, 0, 1, -1])
    suspects: Any = Listed([0.9, 0.7, 0.2, 0.2, 1.0], 0.6)
    row = measures.suspects(suspects, labels, truth, 0.9)
    assert (row["asked"], row["count"], row["interval"]) == (90, 3, [50.0, 100.0])
    assert row["precision"] == {"claimed": 80.0, "truth": 50.0}
    assert row["recall"] == {"claimed": 80.0, "truth": 100.0}
    assert row["wrong_share"] == {"claimed": 50.0, "truth": 25.0}
    none = measures.suspects(Listed([0.1] * 5, 0.6), labels, truth, 0.9)  # type: ignore[arg-type]
    assert (none["precision"], none["interval"]) == ({"claimed": None, "truth": None}, [None, None])
    listed = torch.tensor([True, True, False, False, True])
    assert measures.issues(listed, labels, truth) == {"count": 3, "precision": 50.0, "recall": 100.0}
    trust = torch.tensor([0.1, 0.9, 0.8, 1.0, 0.0])
    assert measures.detection(labels, truth, {"weight": trust})["detection"]["weight"]["auroc"] == 1.0
    assert measures.detection(labels, labels, {"weight": trust}) == {}


def test_every_example_is_judged_by_a_model_that_has_not_seen_it() -> None:
    source = Examples(torch.arange(103.0)[:, None], torch.arange(103) % 4)

    def predict(training: Examples, inputs: Tensor, fold: int) -> Tensor:
        known = {float(x) for x in training.inputs}
        assert not known & {float(x) for x in inputs}
        assert len(known) + len(inputs) == 103
        return inputs.expand(-1, 4)

    found = cleanlab.out_of_sample(source, 4, 0, predict)
    assert torch.equal(found[:, :1], source.inputs)  # in the source's own order
    assert [cleanlab.fold_epochs(60, folds) for folds in (2, 4, 5)] == [60, 20, 15]
