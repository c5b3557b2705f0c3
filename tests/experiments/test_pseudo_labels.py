"""``fit_unlabelled``: it learns from examples without labels, and keeps what it guessed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from experiments.pseudo_labels import Unlabelled, fit_unlabelled, surest
from soseleto import Inputs, fit
from soseleto.data import Augment, Examples
from soseleto.errors import UsageError

CENTRES = torch.tensor([[0.0, 0.0], [3.0, 3.0], [-3.0, 3.0]])


def blobs(n: int, seed: int, *, spread: float = 1.3) -> Examples:
    seeded = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % len(CENTRES)
    return Examples(CENTRES[labels] + spread * torch.randn(n, 2, generator=seeded), labels)


def trunk() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU())


SOURCE = Examples(blobs(200, 1).inputs, torch.arange(200) % 2)  # labels that say nothing about the target's classes
MANY = blobs(600, 3).inputs
GIVEN: dict[str, Any] = {"mode": "transfer", "epochs": 4, "batch_size": 20, "lr": 0.05}


@pytest.mark.long
def test_unlabelled_examples_help() -> None:
    """Over three draws of a single example a class."""
    gains, test = [], blobs(600, 4)
    for seed in (2, 7, 8):
        without = fit(trunk(), SOURCE, blobs(3, seed), **GIVEN)
        rounds = Unlabelled(inputs=MANY, rounds=3, epochs=3, batch_size=50)
        result, guesses = fit_unlabelled(trunk(), SOURCE, blobs(3, seed), rounds, **GIVEN)
        gains.append(result.evaluate(test)["accuracy"] - without.evaluate(test)["accuracy"])
    assert sum(gains) / 3 > 1.5
    assert float((guesses.labels == torch.arange(600) % 3).double().mean()) > 0.8
    assert guesses.weights.shape == guesses.scores.shape == (600,)
    assert result.weights.shape == (200,)  # the source's own
    assert {record.get("round") for record in result.history} == {None, 1, 2, 3}


def test_noisy_mode_and_several_views() -> None:
    source, model = blobs(90, 5), nn.Sequential(trunk(), nn.Linear(16, 3))
    rounds = Unlabelled(inputs=blobs(300, 6).inputs, rounds=2, views=2)
    result, guesses = fit_unlabelled(
        model, source, blobs(3, 2), rounds, epochs=2, batch_size=30, inputs=Inputs(standardize=True)
    )
    assert guesses.labels.shape == (300,)
    assert result.model is model


def test_the_surest_of_every_class() -> None:
    labels, sure = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0.5, 0.9, 0.7, 0.6, 0.8])
    assert surest(labels, sure, 0.5).tolist() == [1, 2, 4]


def test_shares_grow_to_the_whole() -> None:
    rounds = Unlabelled(inputs=MANY, rounds=3, first_share=0.4)
    assert [round(rounds.share(number), 2) for number in (1, 2, 3)] == [0.4, 0.7, 1.0]


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"first_share": 0.0}, {"views": 0}])
def test_bad_settings_raise(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(bad))):
        Unlabelled(**{"inputs": MANY, **bad})


def test_views_are_augmented() -> None:
    images = Examples(torch.rand(30, 1, 6, 6), torch.arange(30) % 2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 2))
    rounds = Unlabelled(inputs=images.inputs, rounds=1, views=2, batch_size=10)
    given: dict[str, Any] = {"epochs": 1, "batch_size": 10, "inputs": Inputs(augment=Augment(crop=1))}
    assert fit_unlabelled(model, images, images.subset(range(6)), rounds, **given)[1].labels.shape == (30,)
