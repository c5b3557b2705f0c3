"""FixMatch, DivideMix and ProMix: the equations against slow loops in float64, whole steps, and runs that resume.

The equations of ProMix are in test_promix.py.
"""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import soseleto
from experiments.methods.divide_mix import mixed_alike, right_probability
from experiments.methods.promix import NetworksWithHeads
from experiments.methods.two_networks import Networks
from experiments.settings import DivideMix, FixMatch, ProMix, StrongPair
from soseleto.data import Augment, Views
from soseleto.data.batches import ExampleRandom
from soseleto.errors import UsageError
from soseleto.methods import Strong
from soseleto.methods.teacher import quantiles
from soseleto.task.task import LossGuard, Method
from soseleto.training.options import Checkpoints, Inputs
from soseleto.weights import Weights
from tiny_pictures import Stop, pictures, small_net, stopping, trained, wrong
from two_views import EYE, B, C, T, batch, close, descend, entropy, follow, net, task

# FixMatch


@pytest.mark.parametrize("views", [2, 3])
def test_a_step_of_fixmatch_against_a_loop(views: int) -> None:
    model, slow = net(), net()
    method = FixMatch(threshold=0.35, unlabelled=0.7, teacher=0.5)
    state, mean = method.init(task(model)), copy.deepcopy(slow)
    some = []
    for step in range(3):
        source, target = batch(B, step, views), batch(T, 100 + step, views)
        numbers = method.step(state, source, target)

        p = slow(torch.cat([target.inputs[0], *source.inputs])).softmax(1)
        of_target = sum(entropy(EYE[y], p[i]) for i, y in enumerate(target.labels)) / T
        of_source, weights = torch.zeros((), dtype=torch.float64), []
        for i in range(B):
            q = p[T + i].detach()
            weights.append(float(q[source.labels[i]]))
            some.append(float(q.max()) >= 0.35)
            for view in range(1, views):
                if some[-1]:
                    of_source = of_source + entropy(EYE[q.argmax()], p[T + view * B + i]) / (views - 1) / B
        descend(slow, of_target + 0.7 * of_source)
        follow(mean, slow, min(0.5, (1 + step) / (10 + step)))
        assert state.weights.values.tolist() == pytest.approx(weights, rel=1e-6)
        assert float(numbers["source_loss"]) == pytest.approx(float(of_source.detach()))
        assert float(numbers["target_loss"]) == pytest.approx(float(of_target.detach()))
        assert float(numbers["confident_share"]) == pytest.approx(sum(some[-B:]) / B)
    assert 0 < sum(some) < len(some)
    close(model, slow)
    close(state.teacher.model, mean)


# The mixture


def slow_mixture(losses: list[float]) -> list[float]:
    """Ten iterations of expectation-maximisation from the clusters of k-means, one number at a time."""
    low, high = min(losses), max(losses)
    x = [(loss - low) / (high - low) for loss in losses]
    centres = [0.0, 1.0]
    for _ in range(10):
        nearer = [int(abs(value - centres[1]) < abs(value - centres[0])) for value in x]
        centres = [float(np.mean([value for value, c in zip(x, nearer, strict=True) if c == k])) for k in (0, 1)]
    r = [[float(c == k) for k in (0, 1)] for c in nearer]
    for _ in range(10):
        share = [float(np.mean([row[k] for row in r])) for k in (0, 1)]
        mean = [float(np.average(x, weights=[row[k] for row in r])) for k in (0, 1)]
        variance = [
            float(np.average([(value - mean[k]) ** 2 for value in x], weights=[row[k] for row in r])) + 5e-4
            for k in (0, 1)
        ]
        for i, value in enumerate(x):
            density = [
                share[k]
                * math.exp(-((value - mean[k]) ** 2) / (2 * variance[k]))
                / math.sqrt(2 * math.pi * variance[k])
                for k in (0, 1)
            ]
            r[i] = [one / sum(density) for one in density]
    return [row[int(mean[1] < mean[0])] for row in r]


def test_the_mixture_against_a_slow_one() -> None:
    seeded = torch.Generator().manual_seed(0)
    small = 0.3 * torch.randn(60, generator=seeded, dtype=torch.float64).abs()
    large = 2.0 + torch.randn(40, generator=seeded, dtype=torch.float64)
    losses = torch.cat([small, large])
    found = right_probability(losses)
    assert found.dtype == torch.float64
    assert found.tolist() == pytest.approx(slow_mixture(losses.tolist()), rel=1e-9, abs=1e-12)
    assert float(found[:60].mean()) > 0.9
    assert float(found[60:].mean()) < 0.3


# What DivideMix trains on


def test_one_share_mixes_the_whole_batch() -> None:
    x, y = torch.randn(B, 3, dtype=torch.float64), torch.rand(B, C, dtype=torch.float64)
    shares = set()
    for key in range(8):
        found, classes = mixed_alike(x, y, ExampleRandom.of(key, torch.arange(B)), 4.0)
        order, u = ExampleRandom.of(key, torch.arange(B)).uniform(2)
        share = float(quantiles(u[0], 4.0))
        share = max(share, 1 - share)
        for i, j in enumerate(sorted(range(B), key=lambda row: float(order[row]))):
            torch.testing.assert_close(found[i], share * x[i] + (1 - share) * x[j], rtol=1e-6, atol=1e-6)
            torch.testing.assert_close(classes[i], share * y[i] + (1 - share) * y[j], rtol=1e-6, atol=1e-6)
        shares.add(float(quantiles(u[0], 4.0)) < 0.5)
    assert shares == {False, True}  # both sides of the maximum


def slow_loss(p: Tensor, y: Tensor, labelled: list[bool], factor: float) -> Tensor:
    believed = [entropy(y[i], p[i]) for i in range(len(p)) if labelled[i]]
    others = [((p[i] - y[i]) ** 2).sum() / C for i in range(len(p)) if not labelled[i]]
    uneven = sum(1 / C * ((1 / C) / p[:, c].mean()).log() for c in range(C))
    return sum(believed) / max(1, len(believed)) + factor * sum(others) / max(1, len(others)) + uneven


def test_steps_of_divide_mix_against_a_loop() -> None:
    method = DivideMix(warm_up=0.2, ramp=0.4)
    model, losses = net(), torch.zeros(2, B, dtype=torch.float64)
    state = method.init(task(model))
    slow = [copy.deepcopy(network) for network in state.networks.both]
    right = torch.ones(2, B, dtype=torch.float64)
    for step in range(5):
        source, target = batch(B, step), batch(T, 100 + step)
        method.step(state, source, target, monitor=step % 2 == 1)

        p = torch.zeros(2, B, C, dtype=torch.float64)
        for k in range(2):
            slow[k].eval()
            for view in range(2):
                with torch.no_grad():
                    answer = slow[k](source.inputs[view]).softmax(1)
                p[k] += answer / 2
                if view == 0:
                    losses[k] = 0.0
                losses[k] -= answer.log().gather(1, source.labels[:, None]).squeeze(1) / 2
            slow[k].train()
        torch.testing.assert_close(state.losses, losses)
        for k in range(2):
            if step < 2:
                scores = slow[k](torch.cat([source.inputs[k], target.inputs[k]]))
                loss = F.cross_entropy(scores, torch.cat([source.labels, target.labels]))
            else:
                w, given = right[1 - k], []
                for i in range(B):
                    believed = w[i] * EYE[source.labels[i]] + (1 - w[i]) * p[k, i]
                    values = believed if w[i] > 0.5 else (p[0, i] + p[1, i]) / 2
                    given.append(values**2 / (values**2).sum())
                y = torch.stack([*given, *given, *EYE[target.labels], *EYE[target.labels]])
                rows = torch.arange(2 * (B + T))
                draws = ExampleRandom.of(state.key, rows, torch.full_like(rows, step), torch.full_like(rows, k))
                x, y = mixed_alike(torch.cat([*source.inputs, *target.inputs]), y, draws, 4.0)
                labelled = [bool(one > 0.5) for one in w] * 2 + [True] * 2 * T
                loss = slow_loss(slow[k](x).softmax(1), y, labelled, 25.0 * min(1.0, (step - 2) / 4))
            descend(slow[k], loss)
        torch.testing.assert_close(state.weights.values, right.mean(0).float())
        if step % 2 == 1:
            right = torch.stack([right_probability(one) for one in losses]).float().double()  # as it is kept
    assert 0 < int((right > 0.5).sum()) < 2 * B
    for mine, expected in zip(state.networks.both, slow, strict=True):
        close(mine, expected)


# Trainings, of the strong recipe too


@pytest.mark.parametrize(
    ("method", "epochs", "apart", "share", "between"),
    [
        (Strong(teacher=0.9, judging=0.5), 10, 0.5, "clean_share", (0.5, 0.7)),  # an underconfident teacher
        (FixMatch(teacher=0.9, threshold=0.8), 6, 0.4, "confident_share", (0.3, 1.0)),
        (DivideMix(warm_up=0.3), 6, 0.6, "clean_share", (0.4, 0.8)),
        (ProMix(warm_up=0.3), 6, 0.4, "clean_share", (0.4, 0.8)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_wrong_labels_are_found(
    method: Method, epochs: int, apart: float, share: str, between: tuple[float, float]
) -> None:
    """The model answers by the teacher, or by both networks."""
    model, flip = small_net(), wrong(pictures(120, 0)[1])[1]
    result = trained(model, method, epochs, lr=0.05)
    assert getattr(result.model, "first", result.model) is model
    assert isinstance(result.model, Networks | NetworksWithHeads) is isinstance(method, DivideMix | ProMix)
    assert result.evaluate(pictures(200, 2))["accuracy"] > 95
    assert float(result.weights[flip].mean()) + apart < float(result.weights[~flip].mean())
    assert between[0] < result.history[-1][share] <= between[1]


RESUMED = [
    Strong(), StrongPair(), FixMatch(threshold=0.5), DivideMix(warm_up=0.3),
    ProMix(warm_up=0.3, agree_after=0.5, confidence=0.4),
]  # fmt: skip


@pytest.mark.parametrize("method", RESUMED, ids=lambda one: one.name)
def test_a_run_resumes_bit_for_bit(method: Method, tmp_path: Path) -> None:
    whole, again = small_net(), small_net()
    expected = trained(whole, method, 3, optimizer=stopping(0), out=tmp_path / "whole")
    kept = {"out": tmp_path / "run", "checkpoints": Checkpoints(steps=3, seconds=None)}
    with pytest.raises(Stop):
        trained(small_net(), method, 3, optimizer=stopping(8), **kept)
    found = trained(again, method, 3, optimizer=stopping(0), **kept)
    assert "resumed after step 6" in found.messages
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, expected.model.state_dict()[name]), name
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.scores, expected.scores)


class NeverWaiting(TorchDispatchMode):
    """Raises where a step would wait for a GPU: numbers read by Python, shapes that depend on values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not any(word in str(func) for word in ("_local_scalar_dense", "nonzero", "masked_select")), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "method",
    [FixMatch(), DivideMix(warm_up=0.0), DivideMix(), ProMix(warm_up=0.0, agree_after=0.0), ProMix(warm_up=1.0)],
    ids=["fixmatch", "mixed", "warm-up", "promix", "promix warm-up"],
)
def test_no_step_waits_for_the_device(method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "check", lambda self, index: None)  # done on the CPU alone
    state = method.init(task(net(), guard=LossGuard(torch.device("cpu"))))
    method.step(state, batch(B, 0), batch(T, 1))  # tables are made, the optimizer's state
    with NeverWaiting():
        method.step(state, batch(B, 2), batch(T, 3))


@pytest.mark.parametrize(
    ("method", "options", "said"),
    [
        (FixMatch(), {"inputs": Inputs(augment=Augment(flip=True))}, "FixMatch needs two views of every image"),
        (DivideMix(), {"inputs": Inputs(augment=Views())}, r"takes two views of every image, got 3"),
        (FixMatch(), {"loss": partial(soseleto.cross_entropy)}, "the method 'fixmatch' is for class labels"),
        (Strong(), {"loss": partial(soseleto.cross_entropy)}, "the method 'strong' is for class labels"),
    ],
)
def test_what_does_not_fit_is_one_sentence(method: Method, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trained(small_net(), method, **options)
