"""The strong recipe: each of its equations against a slow loop in float64, a whole step, and a run that resumes."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import two_views
from experiments.methods.strong_pair import StrongPair
from soseleto.data.batches import ExampleRandom
from soseleto.errors import TrainingError, UsageError
from soseleto.methods import Recording, Signals, Strong
from soseleto.methods.teacher import Judge, Teacher, mixed, quantiles
from soseleto.schedules import linear
from soseleto.training.fit import fit
from tiny_pictures import trained
from two_views import EYE, STEPS, WIDTH, B, C, T, batch, close, descend, follow, net

task = partial(two_views.task, make_schedule=linear)


def normalised(values: list[float]) -> list[float]:
    return [value / sum(values) for value in values]


# Judgement


@pytest.mark.parametrize("by_class", [0.0, 0.25, 1.0])
def test_posterior_and_what_it_learns_against_a_loop(by_class: float) -> None:
    seeded = torch.Generator().manual_seed(0)
    judge = Judge(C, 0.5, True, by_class)
    state = {
        name: value if name == "seen" else value.double() for name, value in judge.init(torch.device("cpu")).items()
    }
    seen: set[int] = set()  # the classes of trusted examples so far; the others are not balanced
    joint, answers, trusted = (state[name].tolist() for name in ("joint", "answers", "trusted"))
    for _ in range(3):
        scores = torch.randn(B, C, generator=seeded, dtype=torch.float64)
        labels = torch.randint(C, (B,), generator=seeded)
        trusted_labels = torch.randint(C, (T,), generator=seeded)
        q = judge.answer(scores, trusted_labels, state)
        r = judge.posterior(q, labels, state)

        plain = [normalised([math.exp(value) for value in row]) for row in scores.tolist()]
        answers = [0.99 * answers[c] + 0.01 * sum(row[c] for row in plain) / B for c in range(C)]
        trusted = [0.99 * trusted[c] + 0.01 * trusted_labels.tolist().count(c) / T for c in range(C)]
        seen |= set(trusted_labels.tolist())
        given = sum(answers[c] for c in seen) / sum(trusted[c] for c in seen)
        share = sum(joint[c][c] for c in range(C))
        told = joint
        joint = [[0.99 * value for value in row] for row in told]
        for i, y in enumerate(labels.tolist()):
            balanced = [plain[i][c] * (given * trusted[c] / answers[c] if c in seen else 1.0) for c in range(C)]
            sharp = normalised([value**2 for value in balanced])
            assert q[i].tolist() == pytest.approx(sharp, rel=1e-6)
            own = [0.99 * told[c][y] / sum(told[c]) + 0.01 / C for c in range(C)]
            same = [share if c == y else (1 - share) / (C - 1) for c in range(C)]
            expected = normalised([sharp[c] * (by_class * own[c] + (1 - by_class) * same[c]) for c in range(C)])
            if not by_class:
                w = share * sharp[y] / (share * sharp[y] + (1 - share) * (1 - sharp[y]) / (C - 1))
                alone = [w if c == y else (1 - w) * sharp[c] / (1 - sharp[y]) for c in range(C)]
                assert expected == pytest.approx(alone)  # the form of one share
            assert r[i].tolist() == pytest.approx(expected, rel=1e-6)
            for c in range(C):
                joint[c][y] += 0.01 * expected[c] / B
        assert torch.allclose(state["joint"], torch.tensor(joint, dtype=torch.float64), rtol=1e-6, atol=0)


def test_a_class_without_a_trusted_example_is_not_erased() -> None:
    seeded = torch.Generator().manual_seed(2)
    judge = Judge(C, 1.0, True, 0.5)
    state = judge.init(torch.device("cpu"))
    for _ in range(2000):
        truth = torch.randint(C, (64,), generator=seeded)
        q = judge.answer(4.0 * torch.eye(C)[truth], torch.randint(C - 1, (16,), generator=seeded), state)
        w = judge.posterior(q, truth, state).gather(1, truth[:, None]).squeeze(1)
    assert float(state["trusted"][C - 1]) < 1e-8  # which was its factor
    even = judge.init(torch.device("cpu"))
    q = judge.answer(torch.zeros(B, C), torch.zeros(T, dtype=torch.int64), even)
    assert torch.allclose(q, torch.full((B, C), 1 / C))  # from the first step on it keeps its share of the answers
    assert float(w[truth == C - 1].mean()) > 0.95
    assert float(w[truth != C - 1].mean()) > 0.95


class WithoutFlat(nn.Module):
    """Gives what is not finite for an image of hardly any different values, also in its views."""

    def forward(self, x: Tensor) -> Tensor:
        different = torch.tensor([len(image.unique()) > 3 for image in x])
        return x / different.view(-1, 1, 1, 1)


def test_the_example_that_is_not_finite_is_named() -> None:
    x = torch.randint(256, (40, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    y = (x[:, 0, 0, 0] > 127).long()
    bad = x.clone()
    bad[7] = 128
    for method in (Strong(), StrongPair()):
        model = nn.Sequential(WithoutFlat(), nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 2))
        with pytest.raises(TrainingError, match=r"1 source example \(id 7\)"):
            fit(model, (bad, y), (x[:16], y[:16]), method=method, epochs=1, device="cpu")


# Teacher


def test_the_teacher_is_the_running_mean_of_network_and_buffers() -> None:
    model = net()
    teacher, taken = Teacher(model, 0.3), torch.zeros((), dtype=torch.int64)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for step in range(8):
        model(torch.randn(4, WIDTH, dtype=torch.float64))  # moves the buffers
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p))
        teacher.follow(taken)
        taken += 1
        decay = min(0.3, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            mean = expected[name]
            expected[name] = decay * mean + (1 - decay) * value if value.is_floating_point() else value.clone()
    for name, value in teacher.model.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-9)
    assert not any(module.training for module in teacher.model.modules())
    assert model.training
    teacher.replace(model)
    for name, value in model.state_dict().items():
        assert torch.equal(value, teacher.model.state_dict()[name])


# Mixing


def test_quantiles_of_beta() -> None:
    u = torch.linspace(0.0, 0.999, 200)
    torch.testing.assert_close(quantiles(u, 1.0), u, rtol=0, atol=1e-4)
    torch.testing.assert_close(quantiles(u, 0.5), (u * math.pi / 2).sin().square(), rtol=0, atol=1e-4)
    drawn = torch.distributions.Beta(4.0, 4.0).sample((100_000,)).quantile(u)
    torch.testing.assert_close(quantiles(u, 4.0)[5:-5], drawn[5:-5], rtol=0, atol=0.02)


def test_mixup_against_a_loop() -> None:
    x, y = torch.randn(B, 3, dtype=torch.float64), torch.rand(B, C, dtype=torch.float64)
    found, classes = mixed(x, y, ExampleRandom.of(3, torch.arange(B)), mixup=0.7, cutmix=0.0)
    order, u, *_ = ExampleRandom.of(3, torch.arange(B)).uniform(5)
    for i, j in enumerate(sorted(range(B), key=lambda row: float(order[row]))):
        share = float(quantiles(u[i], 0.7))
        torch.testing.assert_close(found[i], share * x[i] + (1 - share) * x[j])
        torch.testing.assert_close(classes[i], share * y[i] + (1 - share) * y[j])
    assert mixed(x, y, ExampleRandom.of(3, torch.arange(B)), mixup=0.0, cutmix=0.0)[0] is x


def test_cutmix_pastes_a_rectangle_and_counts_its_area() -> None:
    n = 40
    x = torch.arange(float(n)).view(n, 1, 1, 1).expand(n, 2, 8, 8)
    found, classes = mixed(x, torch.eye(n), ExampleRandom.of(0, torch.arange(n)), mixup=1.0, cutmix=1.0)
    for i in range(n):
        pasted = found[i, 0] != i
        assert torch.equal(pasted, found[i, 1] != i)
        assert float(classes[i, i]) == pytest.approx(1 - float(pasted.float().mean()), abs=1e-6)
        assert int(pasted.sum()) == int(pasted.any(0).sum()) * int(pasted.any(1).sum())
        assert float(classes[i].sum()) == pytest.approx(1)


# A step


@pytest.mark.parametrize(
    "method",
    [
        Strong(ramp=0.5, judging=0.7),
        Strong(answers=False, mixup=0.0, ramp=0.0),
        Strong(labels="ignored", balance=False),
        Strong(labels="believed", teacher=0.0, target_share=0.7),
    ],
    ids=repr,
)
def test_a_step_against_a_loop(method: Strong) -> None:
    model, slow = net(), net()
    torch.manual_seed(0)
    state = method.init(task(model))
    judge = Judge(C, method.judging, method.balance, method.by_class)
    beliefs, teacher = judge.init(torch.device("cpu")), copy.deepcopy(slow).eval()
    weights: list[Tensor] = []
    for step in range(3):
        source, target = batch(B, step), batch(T, 100 + step)
        method.step(state, source, target)

        with torch.no_grad():
            q = judge.answer(teacher(source.inputs[0]), target.labels, beliefs)
            r = judge.posterior(q, source.labels, beliefs)
        g = 1.0 if not method.ramp else min(1.0, step / max(1.0, method.ramp * STEPS))
        given = []
        for i, y in enumerate(source.labels.tolist()):
            label = EYE[y]
            believed = r[i] if method.answers else r[i, y] * label
            doubted = (1 - g) * label + g * believed
            given.append({"believed": label, "ignored": g * q[i], "doubted": doubted}[method.labels])
        given += list(EYE[target.labels])
        inputs = torch.cat([source.inputs[1], target.inputs[1]])
        draws = ExampleRandom.of(state.key, torch.arange(B + T), torch.full((B + T,), step))
        inputs, classes = mixed(inputs, torch.stack(given), draws, mixup=method.mixup, cutmix=0.0)
        p = slow(inputs).softmax(1)
        losses = [-sum(classes[i, c] * p[i, c].log() for c in range(C)) for i in range(B + T)]
        a = T / (B + T) if method.target_share is None else method.target_share
        descend(slow, (1 - a) * sum(losses[:B]) / B + a * sum(losses[B:]) / T)
        follow(teacher, slow, min(method.teacher, (1 + step) / (10 + step)))
        weights.append(r.gather(1, source.labels[:, None]).squeeze(1).float())
        assert torch.allclose(state.weights.values, weights[-1])
        counts = [math.comb(t + 7, 8) for t in range(1, step + 2)]  # t(t + 1)···(t + 7), but for a factor
        expected = sum(count * w for count, w in zip(counts, weights, strict=True)) / sum(counts)
        assert torch.allclose(state.weights.scores, expected)
    close(model, slow)


def test_signals_are_those_of_the_teacher_on_weak_views() -> None:
    signals, source = Signals(B), batch(B, 0)
    recording = Recording(Strong(), signals)
    state = recording.init(task(net()))
    recording.step(state, source, batch(T, 1))
    with torch.no_grad():
        scores = net().eval()(source.inputs[0])  # the first teacher is the initial network
    torch.testing.assert_close(signals.loss, F.cross_entropy(scores, source.labels, reduction="none").float())


# The recipe


def test_bad_settings_and_a_model_with_too_many_outputs_are_one_sentence() -> None:
    with pytest.raises(UsageError, match="labels must be one of"):
        Strong(labels="trusted")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="judging must be above 0"):
        Strong(judging=0.0)
    with pytest.raises(UsageError, match=r"teacher must lie in \[0, 1\]"):
        Strong(teacher=1.5)
    with pytest.raises(UsageError, match="the model has 4 outputs, but the source has 3 classes"):
        trained(nn.Sequential(nn.Flatten(), nn.Linear(81, 4)), method=Strong())
