"""The mistakes that the data suggest: their share, which class is taken for which, and probes drawn from them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import soseleto
from soseleto.data import Examples
from soseleto.suspects import mistakes, probes
from soseleto.suspects.calibration import softmax
from soseleto.suspects.mistakes import held_out, temperature

CLASSES = 4


def blobs(n: int, seed: int, *, apart: float = 2.5) -> tuple[np.ndarray, np.ndarray]:
    """Points around the corners of a square, and their corner."""
    draw = np.random.default_rng(seed)
    truth = draw.integers(0, CLASSES, n)
    corners = apart * np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    return corners[truth] + draw.normal(size=(n, 2)), truth


def next_class(truth: np.ndarray, share: float, seed: int) -> np.ndarray:
    """Each label is the next class with this probability."""
    return (truth + (np.random.default_rng(seed).random(len(truth)) < share)) % CLASSES


def estimated(labels: np.ndarray, points: np.ndarray, **more: float) -> tuple[mistakes.Mistakes, np.ndarray]:
    trusted, truth = blobs(300, 1, **more)
    return mistakes.estimate([points], labels, [trusted], truth, CLASSES, np.random.default_rng(0)), truth


@pytest.fixture(scope="module")
def pairs() -> tuple[mistakes.Mistakes, np.ndarray]:
    points, truth = blobs(1500, 0)
    return estimated(next_class(truth, 0.3, 2), points)


def test_the_share_and_the_classes_of_mistakes_are_found(pairs: tuple[mistakes.Mistakes, np.ndarray]) -> None:
    found, truth = pairs
    low, high = found.share
    assert low < 0.3 < high
    assert high - low < 0.15
    assert found.rates.mean() == pytest.approx(0.3, abs=0.05)
    np.testing.assert_allclose(found.labels.sum(axis=1), 1.0)
    place = np.arange(len(truth))
    assert found.labels[place, truth].max() < 1e-9  # a wrong label is not the right one
    assert found.labels[place, (truth + 1) % CLASSES].mean() > 0.85


def test_mistakes_on_hard_examples_are_planted_on_hard_ones() -> None:
    points, truth = blobs(1500, 0)
    corners = 2.5 * np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
    distances = ((points[:, None] - corners) ** 2).sum(2)
    margin = np.sort(distances, axis=1)[:, 1] - np.sort(distances, axis=1)[:, 0]
    hard = margin < np.quantile(margin, 0.3)
    labels = np.where(hard & (np.random.default_rng(5).random(1500) < 0.7), (truth + 2) % CLASSES, truth)
    found, _ = estimated(labels, points)
    trusted, _ = blobs(300, 1)
    far = np.sort(((trusted[:, None] - corners) ** 2).sum(2), axis=1)
    easy = far[:, 1] - far[:, 0] > np.quantile(margin, 0.6)
    assert found.rates[~easy].mean() > 3 * found.rates[easy].mean()


def test_predictions_are_of_examples_that_were_not_learned_from() -> None:
    """With labels that say nothing, a prediction that had seen its example would agree with its label."""
    points, _ = blobs(400, 3)
    labels = np.random.default_rng(0).integers(0, CLASSES, 400)
    _, known = held_out([points[:10]], [points], labels, CLASSES, np.random.default_rng(0))
    assert (known.argmax(1) == labels).mean() < 0.35
    found, _ = held_out([points], [points], labels, CLASSES, np.random.default_rng(0))
    assert (found.argmax(1) == labels).mean() > 0.35  # the same examples as a source have been seen by most predictors


def test_the_temperature_is_the_maximum_of_the_likelihood() -> None:
    draw = np.random.default_rng(0)
    scores = draw.normal(size=(200, 3))
    labels = np.array([draw.choice(3, p=row) for row in softmax(2.0 * scores + [0.5, 0.0, -0.5])])
    weights = draw.exponential(size=200)
    factor, constants = temperature(scores, labels, weights)
    value = torch.tensor([factor, *constants], dtype=torch.float64, requires_grad=True)
    z = value[0] * torch.from_numpy(scores) + value[1:]
    loss = (torch.from_numpy(weights) * F.cross_entropy(z, torch.from_numpy(labels), reduction="none")).sum()
    (loss + value[1:].square().sum() / 2).backward()
    assert value.grad is not None
    assert float(value.grad.abs().max()) < 1e-4


def planted(pairs: tuple[mistakes.Mistakes, np.ndarray]) -> tuple[Examples, Examples, probes.Planted]:
    found, truth = pairs
    points, labels = blobs(500, 0)
    source = Examples(torch.from_numpy(points).float(), torch.from_numpy(labels))
    target = Examples(torch.from_numpy(blobs(300, 1)[0]).float(), torch.from_numpy(truth))
    return source, target, probes.plant(source, target, 0.3, seed=0, mistakes=found)


def test_wrong_probes_take_the_estimated_labels(pairs: tuple[mistakes.Mistakes, np.ndarray]) -> None:
    source, target, made = planted(pairs)
    wrong = made.probes.wrong
    assert int(wrong.sum()) == 45
    assert len(made.probes) == 90
    assert ((made.probes.labels - made.probes.truth) % CLASSES)[wrong].eq(1).float().mean() > 0.8
    assert set(made.target.labels.tolist()) == set(range(CLASSES))
    assert made.probes.share == pairs[0].share
    again = probes.plant_again(source, target, made.probes.describe())
    assert again is not None
    assert torch.equal(again.source.labels, made.source.labels)
    assert torch.equal(again.source.inputs, made.source.inputs)
    assert torch.equal(again.target.inputs, made.target.inputs)
    assert probes.plant_again(source, target.subset(range(50)), made.probes.describe()) is None


def test_a_resumed_run_has_the_same_probes(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the estimate would come out otherwise, as on another machine."""
    points, truth = (torch.from_numpy(part) for part in blobs(300, 0))
    source = (points[:200].float(), torch.from_numpy(next_class(truth[:200].numpy(), 0.3, 1)))
    target = (points[200:].float(), truth[200:])

    def fit(out: str, **more: object) -> soseleto.Result:
        torch.manual_seed(0)
        model = soseleto.models.mlp(2, CLASSES, hidden=8)
        return soseleto.fit(model, source, target, epochs=2, probes="auto", out=tmp_path / out, device="cpu", **more)

    def stop(event: str, record: dict[str, object]) -> None:
        if event == "epoch":
            raise KeyboardInterrupt

    whole = fit("whole")
    assert whole.suspects().basis == "assumes estimated mistakes"
    with pytest.raises(KeyboardInterrupt):
        fit("stopped", progress=stop, checkpoints=soseleto.Checkpoints(steps=1))

    def elsewhere(*args: object) -> mistakes.Mistakes:
        raise AssertionError("estimated again")

    monkeypatch.setattr(mistakes, "estimate", elsewhere)
    resumed = fit("stopped")
    assert resumed.config["planted"] == whole.config["planted"]
    assert torch.equal(resumed.weights, whole.weights)
    assert torch.equal(resumed.suspects().probability, whole.suspects().probability)
