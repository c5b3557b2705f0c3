"""The strong recipe: each of its equations against a slow loop in float64, a whole step, and a run that resumes."""

from __future__ import annotations

import copy
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soseleto
from experiments.methods import StrongPair
from experiments.methods.two_networks import Networks
from soseleto.data import Augment, Views
from soseleto.data.batches import Batch
from soseleto.data.randomness import ExampleRandom
from soseleto.data.views import UnlabelledViews
from soseleto.engines import trainable
from soseleto.errors import TrainingError, UsageError
from soseleto.methods import Mixed, Recording, Signals, Strong
from soseleto.methods.strong import StrongState
from soseleto.methods.teacher import Judge, Teacher, clean_share, mixed, quantiles
from soseleto.task.losses import NoisyLosses
from soseleto.task.task import Task, after_step
from soseleto.training.fit import fit
from soseleto.training.optimizers import linear, sgd
from soseleto.training.options import Checkpoints, Probes
from soseleto.training.settings import method_of, settings_of
from soseleto.training.usual import Usual
from tiny_pictures import Stop, pictures, small_net, stopping, wrong

C, B, T, WIDTH, STEPS = 4, 6, 3, 5, 10


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


def test_shares_of_right_labels_are_found() -> None:
    seeded = torch.Generator().manual_seed(1)
    truth = torch.randint(C, (64 * 300,), generator=seeded)
    flip = (truth == 2) & (torch.rand(len(truth), generator=seeded) < 0.4)
    labels = torch.where(flip, 0, truth)
    for by_class in (0.0, 0.5, 1.0):
        judge = Judge(C, 1.0, False, by_class)
        state = judge.init(torch.device("cpu"))
        for rows in torch.arange(len(truth)).split(64):
            scores = 9.0 * torch.eye(C)[truth[rows]]
            judge.posterior(judge.answer(scores, truth[rows], state), labels[rows], state)
        assert float(clean_share(state)) == pytest.approx(0.9, abs=0.04)
        assert float(state["joint"][2, 0]) == pytest.approx(0.1, abs=0.04)


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


def test_class_balanced_batches_are_not_taken_for_the_shares_of_the_target() -> None:
    beliefs: list[dict[str, Tensor]] = []

    class Watched(Strong):
        def step(self, state: StrongState, *batches: Batch, monitor: bool = False) -> dict[str, Tensor]:
            beliefs.append(state.beliefs)
            return super().step(state, *batches, monitor=monitor)

    x = torch.randn(400, 5, generator=torch.Generator().manual_seed(0))
    y = (torch.arange(400) % 10 == 0).long()
    for size, rare in ((10, 0.1), (soseleto.Balanced(10), 0.1)):
        model = nn.Linear(5, 2)
        soseleto.fit(
            model, (x, y), (x[:40], y[:40]), method=Watched(), recipe="strong", epochs=20, batch_size=20,
            target_batch_size=size, augment=soseleto.data.FeatureViews(drop=0.1),
        )  # fmt: skip
        assert float(beliefs[-1]["trusted"][1]) == pytest.approx(rare, abs=0.03)


def test_the_example_that_is_not_finite_is_named() -> None:
    x = torch.randn(40, 5, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    bad = x.clone()
    bad[7, 2] = math.nan
    for method in (Strong(), StrongPair()):
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 2))
        with pytest.raises(TrainingError, match=r"1 source example \(id 7\)"):
            fit(model, (bad, y), (x[:16], y[:16]), recipe="strong", method=method, epochs=1, device="cpu")


def test_a_label_between_two_classes_is_believed_less_where_its_mistake_is_known() -> None:
    judge = Judge(3, 1.0, False, True)
    state = judge.init(torch.device("cpu"))
    state["joint"].copy_(torch.tensor([[0.33, 0.0, 0.0], [0.13, 0.2, 0.0], [0.0, 0.0, 0.34]]))
    q = torch.tensor([[0.3, 0.7, 0.0], [0.3, 0.0, 0.7]])
    w = judge.posterior(q, torch.tensor([0, 0]), state)[:, 0]
    assert float(w[0]) < 0.6  # class 1 is often called 0, class 2 never
    assert float(w[1]) > 0.95


# Teacher


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, C)).double()


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


def stepped(method: Strong, shape: tuple[int, ...]) -> Tensor:
    """The weights of a linear model after one step on random inputs of this shape."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), C))
    views = tuple(torch.rand(B, *shape) for _ in range(2))
    given = Batch(torch.arange(B), views, torch.arange(B) % C)
    method.step(method.init(task(model)), given, given)
    return model[1].weight.detach()


def test_half_of_images_are_cut_by_default_and_no_rows() -> None:
    image, row = (3, 8, 8), (5,)
    assert torch.equal(stepped(Strong(), image), stepped(Strong(cutmix=0.5), image))
    assert not torch.equal(stepped(Strong(), image), stepped(Strong(cutmix=0.0), image))
    assert torch.equal(stepped(Strong(), row), stepped(Strong(cutmix=0.0), row))
    assert not torch.equal(stepped(Strong(), row), stepped(Strong(mixup=0.0), row))


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


def batch(n: int, seed: int) -> Batch:
    seeded = torch.Generator().manual_seed(seed)
    views = tuple(torch.randn(n, WIDTH, generator=seeded, dtype=torch.float64) for _ in range(2))
    return Batch(torch.arange(n), views, torch.randint(C, (n,), generator=seeded))


def task(model: nn.Module, **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "model": model, "losses": NoisyLosses(), "n_source": B, "steps": STEPS, "shared": frozenset(trainable(model)),
        "target_head": frozenset(), "make_optimizer": sgd(0.1, momentum=0.0), "make_schedule": linear, "classes": C,
    }  # fmt: skip
    return Task(**{**fields, **changes})


def slow_sharpened(p: Tensor, temperature: float) -> Tensor:
    return torch.tensor(normalised([value ** (1 / temperature) for value in p.tolist()]), dtype=torch.float64)


@pytest.mark.parametrize(
    "method",
    [
        Strong(ramp=0.5, judging=0.7),
        Strong(answers=False, mixup=0.0, ramp=0.0),
        Strong(labels="ignored", temperature=1.0, balance=False),
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
        sharp = partial(slow_sharpened, temperature=method.temperature)
        given = []
        for i, y in enumerate(source.labels.tolist()):
            label = torch.eye(C, dtype=torch.float64)[y]
            believed = sharp(r[i]) if method.answers else r[i, y] * label
            doubted = (1 - g) * label + g * believed
            given.append({"believed": label, "ignored": g * sharp(q[i]), "doubted": doubted}[method.labels])
        given += list(torch.eye(C, dtype=torch.float64)[target.labels])
        inputs = torch.cat([source.inputs[1], target.inputs[1]])
        draws = ExampleRandom.of(state.key, torch.arange(B + T), torch.full((B + T,), step))
        inputs, classes = mixed(inputs, torch.stack(given), draws, mixup=method.mixup, cutmix=0.0)
        p = slow(inputs).softmax(1)
        losses = [-sum(classes[i, c] * p[i, c].log() for c in range(C)) for i in range(B + T)]
        a = T / (B + T) if method.target_share is None else method.target_share
        slow.zero_grad()
        ((1 - a) * sum(losses[:B]) / B + a * sum(losses[B:]) / T).backward()
        with torch.no_grad():
            for parameter in slow.parameters():
                parameter -= 0.1 * parameter.grad
            decay = min(method.teacher, (1 + step) / (10 + step))
            for mean, value in zip(teacher.state_dict().values(), slow.state_dict().values(), strict=True):
                mean.copy_(decay * mean + (1 - decay) * value if value.is_floating_point() else value)
        weights.append(r.gather(1, source.labels[:, None]).squeeze(1).float())
        assert torch.allclose(state.weights.values, weights[-1])
        counts = [math.comb(t + 7, 8) for t in range(1, step + 2)]  # t(t + 1)···(t + 7), but for a factor
        expected = sum(count * w for count, w in zip(counts, weights, strict=True)) / sum(counts)
        assert torch.allclose(state.weights.scores, expected)
    for mine, expected in zip(model.state_dict().values(), slow.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-9)


def test_with_everything_off_it_is_the_mixed_baseline() -> None:
    strong, plain = net(), net()
    method = Strong(labels="believed", mixup=0.0)
    ours, theirs = method.init(task(strong)), Mixed().init(task(plain))
    for step in range(3):
        source, target = batch(B, step), batch(T, 100 + step)
        method.step(ours, source, target)
        views = (Batch(one.index, one.inputs[1], one.labels) for one in (source, target))
        Mixed().step(theirs, *views)
    for mine, expected in zip(strong.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, expected)


# A training


def trained(model: nn.Module, epochs: int = 2, **options: Any) -> soseleto.Result:
    x, y = pictures(120, 0)
    sizes = {"batch_size": 32, "target_batch_size": 8, "device": "cpu"}
    views = {"augment": Views(flip=False)} if options.get("recipe") == "strong" else {}
    return fit(model, (x, wrong(y)[0]), pictures(24, 1), epochs=epochs, **{**sizes, **views, **options})


def test_wrong_labels_are_doubted_and_the_model_is_the_teacher() -> None:
    model = small_net()
    method = Strong(teacher=0.9, judging=0.5)  # after 40 steps the teacher is underconfident
    result = trained(model, 10, recipe="strong", lr=0.05, test=pictures(200, 2), method=method)
    assert result.model is model
    assert result.history[-1]["test_accuracy"] > 95
    flip = wrong(pictures(120, 0)[1])[1]
    assert float(result.weights[flip].mean()) < 0.3
    assert float(result.weights[~flip].mean()) > 0.8
    assert result.history[-1]["clean_share"] == pytest.approx(1 - float(flip.float().mean()), abs=0.1)


@pytest.mark.parametrize("method", [Strong(cutmix=0.5), StrongPair()], ids=["one", "two"])
def test_a_run_resumes_bit_for_bit_with_its_teacher(method: Strong, tmp_path: Path) -> None:
    options: dict[str, Any] = {"recipe": "strong", "method": method, "epochs": 3}
    whole, again = small_net(), small_net()
    expected = trained(whole, optimizer=stopping(0), out=tmp_path / "whole", **options)
    kept = {"out": tmp_path / "run", "checkpoints": Checkpoints(steps=3, seconds=None), **options}
    with pytest.raises(Stop):
        trained(small_net(), optimizer=stopping(8), **kept)
    found = trained(again, optimizer=stopping(0), **kept)
    assert "resumed after step 6" in found.messages
    for name, value in again.state_dict().items():
        assert torch.equal(value, whole.state_dict()[name]), name
    assert torch.equal(found.weights, expected.weights)
    assert torch.equal(found.scores, expected.scores)


def test_signals_are_those_of_the_teacher_on_weak_views() -> None:
    signals, source = Signals(B), batch(B, 0)
    recording = Recording(Strong(), signals)
    state = recording.init(task(net()))
    recording.step(state, source, batch(T, 1))
    with torch.no_grad():
        scores = net().eval()(source.inputs[0])  # the first teacher is the initial network
    torch.testing.assert_close(signals.loss, F.cross_entropy(scores, source.labels, reduction="none").float())


def test_probes_calibrate_suspects() -> None:
    result = trained(small_net(), 4, recipe="strong", lr=0.05, method=Strong(teacher=0.9), probes=Probes(share=0.5))
    flip = wrong(pictures(120, 0)[1])[1]
    assert float(result.suspects().probability[flip].mean()) > float(result.suspects().probability[~flip].mean())


def test_probes_may_leave_fewer_target_examples_than_the_recipe_takes() -> None:
    x, y = pictures(120, 0)
    result = fit(small_net(), (x, wrong(y)[0]), pictures(60, 1), recipe="strong", epochs=1, probes="auto", device="cpu")
    assert result.evidence is not None
    assert len(result.evidence.probes.labels) == 18  # of 60; the 42 others are in every batch


def test_two_networks_judge_for_each_other() -> None:
    method, model = StrongPair(mixup=0.0, ramp=0.0), net()
    torch.manual_seed(0)
    state = method.init(task(model))
    before = [copy.deepcopy(one) for one in state.networks.both]
    assert not torch.equal(before[0][0].weight, before[1][0].weight)
    source, target = batch(B, 0), batch(T, 1)
    method.step(state, source, target)
    with torch.no_grad():
        judged = [copy.deepcopy(one).eval()(source.inputs[0]) for one in before]
    w = []
    for at, network in enumerate(state.networks.both):
        judge = Judge(C, method.judging, method.balance, method.by_class)
        beliefs = judge.init(torch.device("cpu"))
        r = judge.posterior(judge.answer(judged[1 - at], target.labels, beliefs), source.labels, beliefs)
        w.append(r.gather(1, source.labels[:, None]).squeeze(1))
        given = torch.cat([r, torch.eye(C, dtype=torch.float64)[target.labels]])
        slow = before[at].train()
        p = slow(torch.cat([source.inputs[1], target.inputs[1]])).softmax(1)
        (-(given * p.log()).sum() / (B + T)).backward()
        for new, old in zip(network.parameters(), slow.parameters(), strict=True):
            torch.testing.assert_close(new, old - 0.1 * old.grad)
        torch.testing.assert_close(list(network.buffers()), list(slow.buffers()))
    torch.testing.assert_close(state.weights.values, ((w[0] + w[1]) / 2).float())
    torch.testing.assert_close(state.judged, (judged[0] + judged[1]) / 2)


def test_a_pair_ends_as_both_teachers_and_answers_by_their_mean() -> None:
    result = trained(small_net(), 3, recipe="strong", lr=0.05, method=StrongPair(teacher=0.9))
    assert isinstance(result.model, Networks)
    x = pictures(20, 2)[0]
    both = [replace(result, model=one).outputs(x) for one in result.model.both]
    torch.testing.assert_close(result.outputs(x), (both[0] + both[1]) / 2)
    flip = wrong(pictures(120, 0)[1])[1]
    assert float(result.weights[~flip].mean()) > float(result.weights[flip].mean())


def test_the_model_ends_as_the_teacher() -> None:
    model, method = net(), Strong()
    state = method.init(task(model, steps=2))
    for step in range(2):
        assert state.answering is state.teacher.model
        method.step(state, batch(B, step), batch(T, 100 + step))
        after_step(state)
        same = [torch.equal(*pair) for pair in zip(model.parameters(), state.teacher.model.parameters(), strict=True)]
        assert all(same) == (step == 1)
    assert state.answering is model


def test_epochs_are_evaluated_by_the_teacher(monkeypatch: pytest.MonkeyPatch) -> None:
    first = nn.Sequential(nn.Flatten(), nn.Linear(81, 3))
    with torch.no_grad():
        first[1].weight.zero_()
        first[1].bias.copy_(torch.tensor([1.0, 0.0, 0.0]))
    monkeypatch.setattr(StrongState, "answering", first)
    test = pictures(90, 2)
    result = trained(small_net(), 1, recipe="strong", test=test)
    assert result.history[0]["test_accuracy"] == pytest.approx(100 * float((test[1] == 0).double().mean()))


# The recipe


def test_plain_is_the_default() -> None:
    default, plain = trained(small_net(), 1), trained(small_net(), 1, recipe="plain", lr=0.03)
    assert default.config["method"] == "soseleto"
    assert default.config["augment_source"] == "None"
    assert torch.equal(default.weights, plain.weights)
    strong = trained(small_net(), 1, recipe="strong", target_batch_size=None)
    assert strong.config["method"] == "strong"
    assert (strong.config["lr"], strong.config["weight_decay"]) == (0.1, 5e-4)
    assert strong.config["optimizer"] == "SGD, momentum 0.9, Nesterov"
    assert strong.config["target_batch_size"] == 24
    assert "strong" not in repr(soseleto.Soseleto.paper())


def test_settings_are_read_back() -> None:
    method = Strong(labels="ignored", mixup=1.0, cutmix=0.25, by_class=True)
    assert method_of(json.loads(json.dumps(settings_of(method)))) == method


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"recipe": "stong"}, r"unknown recipe 'stong' \(did you mean 'strong'\?\)"),
        ({"recipe": "strong", "mode": "transfer", "method": Strong()}, r"or give method=StrongTransfer\(...\)"),
        ({"recipe": "strong", "method": Mixed()}, "leave out method='mixed'"),
        ({"recipe": "strong", "augment": Augment(flip=True)}, "recipe='strong' augments by Views"),
        ({"method": Strong()}, "the method Strong needs two views"),
        ({"augment": Views()}, "the method 'soseleto' takes one view"),
        ({"recipe": "strong", "loss": partial(soseleto.cross_entropy)}, "the method 'strong' is for class labels"),
    ],
)
def test_what_does_not_fit_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trained(small_net(), **options)


def test_images_are_trained_for_a_hundred_epochs() -> None:
    few = {"epochs": None, "batch_size": 120, "recipe": "strong", "device": "cpu"}
    x, y = pictures(120, 0)
    sides = (x, wrong(y)[0]), pictures(24, 1)
    assert fit(small_net(), *sides, **few).config["epochs"] == 100
    rows = tuple((inputs.float().flatten(1), labels) for inputs, labels in sides)
    of_rows = nn.Linear(81, 3)
    assert fit(of_rows, *rows, **few).config["epochs"] == 30
    assert fit(small_net(), *sides, **{**few, "epochs": 1}).config["epochs"] == 1


def test_tables_are_refused() -> None:
    x, y = pictures(12, 0)
    with pytest.raises(UsageError, match=r"takes uint8 images .* got torch.float32 of shape \(1, 9, 9\)"):
        fit(small_net(), (x.float(), y), (x.float(), y), recipe="strong")


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"labels": "trusted"}, "labels must be one of"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"judging": -1.0}, "judging must be above 0"),
        ({"mixup": -1.0}, "mixup must be 0 or more"),
        ({"mixup": 0.0, "cutmix": 0.5}, "cutmix has no effect without mixup"),
        ({"unlabelled": [1, 2]}, r"unlabelled must be a tensor of inputs, got list: say torch.as_tensor\(inputs\)"),
        ({"unlabelled_batch": 0}, "unlabelled_batch must be a whole number of at least 1, got 0"),
        ({"unlabelled_batch": 2.5}, "unlabelled_batch must be a whole number of at least 1, got 2.5"),
        ({"teacher": 1.5}, r"teacher must lie in \[0, 1\]"),
    ],
)
def test_bad_settings_are_one_sentence(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Strong(**fields)


def test_one_class_and_a_usual_method_are_refused() -> None:
    x, y = pictures(12, 0)
    with pytest.raises(UsageError, match="strong needs two classes or more, and the source has one class: train it"):
        fit(nn.Sequential(nn.Flatten(), nn.Linear(81, 1)), (x, y * 0), (x, y * 0), recipe="strong", device="cpu")
    with pytest.raises(UsageError, match=r"leave out method=Usual\(...\), or the recipe"):
        trained(small_net(), recipe="strong", method=Usual())


def test_beliefs_of_an_earlier_version_are_continued() -> None:
    method = Strong(mixup=0.0)
    state = method.init(task(net()))
    saved = state.state()
    without = {name: value for name, value in saved["beliefs"].items() if name != "seen"}  # as it was saved before
    state.load_state({**saved, "beliefs": without})
    assert set(state.beliefs) == {"joint", "answers", "trusted", "seen"}


def test_a_model_with_too_many_outputs_is_refused() -> None:
    with pytest.raises(UsageError, match="the model has 4 outputs, but the source has 3 classes"):
        trained(nn.Sequential(nn.Flatten(), nn.Linear(81, 4)), recipe="strong")


@pytest.mark.parametrize("make", [soseleto.models.resnet18, soseleto.models.preact_resnet18])
def test_a_network_that_was_compiled_is_one_graph_and_trains_the_same(make: Any) -> None:
    graphs: list[Any] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    x, y = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8), torch.arange(64) % 4
    found = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = make(4, width=4)
        if compiled:
            model.compile(backend=count)
        result = soseleto.fit(model, (x, y), (x[:16], y[:16]), recipe="strong", epochs=1, batch_size=32, device="cpu")
        found.append(result.weights)
    assert torch.equal(*found)
    assert len(graphs) == 2  # in evaluation mode, before the training, and in training mode


# Inputs without labels


def test_inputs_without_labels_learn_the_teachers_answers() -> None:
    u, taken, key = 4, torch.tensor(2), 5
    more = torch.randn(7, WIDTH, dtype=torch.float64)
    stream = UnlabelledViews(more, lambda x, draws: (x, x + 0.1 * draws.uniform(1)[0][:, None]), lambda x: 2 * x)
    given = stream.shuffled(torch.device("cpu"))
    assert sorted(given.inputs[:, 0].tolist()) == sorted(more[:, 0].tolist())
    weak, strong = given.take(taken, u, key)
    assert torch.equal(weak, 2 * given.inputs[[1, 2, 3, 4]])  # 2·4 to 2·4 + 3, modulo 7
    assert not torch.equal(strong, given.take(taken, u, key + 1)[1])
    assert torch.equal(strong, given.take(taken, u, key)[1])

    method, model, slow = Strong(mixup=0.0, ramp=0.0, unlabelled=stream, unlabelled_batch=u), net(), net()
    state = method.init(task(model))
    state.key = key
    source, target = batch(B, 0), batch(T, 1)
    method.step(state, source, target)

    weak, strong = given.take(torch.tensor(0), u, key)
    judge = Judge(C, method.judging, method.balance, method.by_class)
    beliefs = judge.init(torch.device("cpu"))
    with torch.no_grad():
        q = judge.answer(net().eval()(torch.cat([source.inputs[0], weak])), target.labels, beliefs)
        r = judge.posterior(q[:B], source.labels, beliefs)
    classes = torch.cat([r, q[B:], torch.eye(C, dtype=torch.float64)[target.labels]])
    p = slow(torch.cat([source.inputs[1], strong, target.inputs[1]])).softmax(1)
    (-(classes * p.log()).sum() / (B + u + T)).backward()
    for new, old in zip(model.parameters(), slow.parameters(), strict=True):
        torch.testing.assert_close(new, old - 0.1 * old.grad)
    torch.testing.assert_close(state.weights.values, r.gather(1, source.labels[:, None]).squeeze(1).float())
    assert state.judged is not None
    assert len(state.judged) == B


def test_views_of_inputs_without_labels_draw_other_numbers_than_mixing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both follow from the key and the step; the places of inputs are row numbers of the mixed batch too."""
    of_views: list[Tensor] = []
    of_mixing: list[Tensor] = []

    def views(x: Tensor, draws: ExampleRandom) -> tuple[Tensor, Tensor]:
        of_views.append(draws.uniform(4).T)
        return x, x

    def mixing(inputs: Tensor, classes: Tensor, draws: ExampleRandom, **_: Any) -> tuple[Tensor, Tensor]:
        of_mixing.append(draws.uniform(4).T)
        return inputs, classes

    monkeypatch.setattr("soseleto.methods.strong.mixed", mixing)
    stream = UnlabelledViews(torch.randn(7, WIDTH, dtype=torch.float64), views, lambda x: x)
    method = Strong(unlabelled=stream, unlabelled_batch=4)
    state = method.init(task(net()))
    for _ in range(3):
        method.step(state, batch(B, 0), batch(T, 1))
    streams = torch.cat(of_views + of_mixing)
    assert len(streams) == 3 * (4 + B + 4 + T)
    assert len(streams.unique(dim=0)) == len(streams)


def test_fit_makes_the_views_of_inputs_without_labels(tmp_path: Path) -> None:
    images = pictures(50, 7)[0]
    for method in (Strong(unlabelled=images, unlabelled_batch=16), StrongPair(unlabelled=images, unlabelled_batch=16)):
        out = tmp_path / method.name
        options: dict[str, Any] = {"recipe": "strong", "method": method, "epochs": 3}
        whole, again = small_net(), small_net()
        expected = trained(whole, optimizer=stopping(0), **options)
        kept = {"out": out, "checkpoints": Checkpoints(steps=3, seconds=None), **options}
        with pytest.raises(Stop):
            trained(small_net(), optimizer=stopping(8), **kept)
        others = replace(method, unlabelled=pictures(50, 8)[0])
        with pytest.raises(UsageError, match="cannot be resumed, since the unlabelled data changed: give"):
            trained(small_net(), optimizer=stopping(0), **{**kept, "method": others})
        found = trained(again, optimizer=stopping(0), **kept)
        assert torch.equal(found.weights, expected.weights)
        assert len(found.weights) == 120
    without = trained(small_net(), 3, recipe="strong", method=Strong(), optimizer=stopping(0))
    assert not torch.equal(without.weights, expected.weights)


@pytest.mark.parametrize(
    ("inputs", "said"),
    [
        (torch.zeros(5, 1, 9, 9), "must be like the source's"),
        (torch.zeros(5, 1, 4, 4, dtype=torch.uint8), "must be like the source's"),
        (torch.zeros(0, 1, 9, 9, dtype=torch.uint8), "unlabelled has no inputs"),
    ],
)
def test_inputs_without_labels_are_like_the_sources(inputs: Tensor, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trained(small_net(), recipe="strong", method=Strong(unlabelled=inputs))
