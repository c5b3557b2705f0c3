"""``fit_unlabelled``: it learns from examples without labels, keeps what it found, and can be resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experiments.pseudo_labels import Unlabelled, fit_unlabelled, surest
from soseleto import Checkpoints, fit
from soseleto.data import Augment, Examples
from soseleto.errors import UsageError
from soseleto.training.result import Result

CENTRES = torch.tensor([[0.0, 0.0], [3.0, 3.0], [-3.0, 3.0]])


def blobs(n: int, seed: int, *, spread: float = 1.3) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % len(CENTRES)
    return CENTRES[labels] + spread * torch.randn(n, 2, generator=seeded), labels


def trunk() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 16), nn.ReLU())


SOURCE = (blobs(200, 1)[0], torch.arange(200) % 2)  # labels that say nothing about the classes of the target
TARGET = blobs(3, 2)
MANY = blobs(600, 3)[0]
TEST = blobs(600, 4)


def run(
    unlabelled: Any = Unlabelled(inputs=MANY, rounds=3, epochs=3, batch_size=50),  # noqa: B008
    target: Any = TARGET,
    **changes: Any,
) -> Result:
    given: dict[str, Any] = {"mode": "transfer", "epochs": 4, "batch_size": 20, "lr": 0.05, "test": TEST, **changes}
    if unlabelled is None:
        return fit(trunk(), SOURCE, target, **given)
    return fit_unlabelled(trunk(), SOURCE, target, unlabelled, **given)


def test_unlabelled_examples_help() -> None:
    """Over three draws of a single example a class."""
    gains = []
    for seed in (2, 7, 8):
        without, with_them = run(target=blobs(3, seed), unlabelled=None), run(target=blobs(3, seed))
        gains.append(with_them.evaluate(TEST)["accuracy"] - without.evaluate(TEST)["accuracy"])
    assert without.unlabelled is None
    assert sum(gains) / 3 > 1.5
    guesses = with_them.unlabelled
    assert guesses is not None
    right = guesses.labels == torch.arange(600) % 3
    assert float(right.double().mean()) > 0.8
    assert guesses.weights.shape == guesses.scores.shape == (600,)
    assert with_them.weights.shape == (200,)  # the source's own
    assert {record.get("round") for record in with_them.history} == {None, 1, 2, 3}


def test_inputs_alone_take_the_defaults_and_noisy_mode_works_too() -> None:
    inputs, labels = blobs(90, 5)
    model = nn.Sequential(trunk(), nn.Linear(16, 3))
    result = fit_unlabelled(model, (inputs, labels), TARGET, blobs(300, 6)[0], epochs=2, batch_size=30, lr=0.01)
    assert result.unlabelled is not None
    assert result.unlabelled.labels.shape == (300,)
    assert result.model is model


def clean(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name != "seconds"}


def test_a_cut_training_goes_on_in_its_round(tmp_path: Path) -> None:
    whole = run()
    stopped = 0

    def stop_in_round_two(event: str, record: dict[str, Any]) -> None:
        nonlocal stopped
        stopped += event == "end"
        if stopped == 2 and event == "epoch":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out=tmp_path / "run", progress=stop_in_round_two, checkpoints=Checkpoints(steps=5))
    assert sorted(p.name for p in (tmp_path / "run").glob("round-?")) == ["round-1", "round-2"]
    again = run(out=tmp_path / "run")
    assert whole.unlabelled is not None
    assert again.unlabelled is not None
    assert torch.equal(again.unlabelled.labels, whole.unlabelled.labels)
    assert torch.equal(again.unlabelled.weights, whole.unlabelled.weights)
    assert torch.equal(again.weights, whole.weights)
    assert torch.equal(again.outputs(TEST[0]), whole.outputs(TEST[0]))
    assert [clean(record) for record in again.history] == [clean(record) for record in whole.history]
    assert set(whole.messages) <= set(again.messages)  # those of the rounds that had ended too
    with pytest.raises(UsageError, match="holds a run already"):
        run(out=tmp_path / "run")


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    run(out=tmp_path / "run", unlabelled=None)
    with pytest.raises(UsageError, match="epochs was 4 and is 5"):
        run(out=tmp_path / "run", epochs=5)
    with pytest.raises(UsageError, match="epochs was 4 and is 30"):
        run(out=tmp_path / "run", epochs=None)


def test_the_surest_of_every_class() -> None:
    labels, sure = torch.tensor([0, 0, 0, 0, 1, 1]), torch.tensor([0.9, 0.5, 0.8, 0.7, 0.6, 0.4])
    assert surest(labels, sure, 0.5).tolist() == [0, 2, 4]
    assert surest(labels, sure, 1.0).tolist() == [0, 1, 2, 3, 4, 5]


def test_shares_grow_to_the_whole() -> None:
    rounds = Unlabelled(inputs=MANY, rounds=3, first_share=0.4)
    assert [rounds.share(number) for number in (1, 2, 3)] == pytest.approx([0.4, 0.7, 1.0])
    assert Unlabelled(inputs=MANY, rounds=1).share(1) == 1.0


def test_rounds_standardise_as_the_source_did_and_may_look_at_several_views() -> None:
    """Dark source images, bright target ones: statistics of the unlabelled images would be others."""
    seeded = torch.Generator().manual_seed(0)
    images = torch.randint(0, 60, (40, 1, 6, 6), generator=seeded, dtype=torch.uint8)
    bright = images + 150
    labels = torch.arange(40) % 2
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 4))
    unlabelled = Unlabelled(inputs=Examples(bright, labels), rounds=1, epochs=1, batch_size=20, views=3)
    result = fit_unlabelled(
        model, (images, labels), (bright[:8], labels[:8]), unlabelled, mode="transfer", epochs=1, batch_size=20,
        lr=0.01, augment=(None, Augment(shift=0.1)),
    )  # fmt: skip
    assert float(result.prepare(images).mean()) == pytest.approx(0.0, abs=1e-3)


@pytest.mark.parametrize("bad", [{"rounds": 0}, {"first_share": 0.0}, {"views": 0}, {"inputs": torch.zeros(3)}])
def test_bad_settings_raise(bad: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        run(unlabelled=Unlabelled(**{"inputs": MANY, **bad}))
