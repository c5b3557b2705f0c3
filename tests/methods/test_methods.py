"""Every method through one contract, and against its paper's formula if it has one, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from experiments.methods import METHODS, Luo, MetaWeightNet, Reweight, Sukhbaatar, Xiao
from experiments.methods.label_noise import from_confusions
from experiments.methods.luo import prototype_entropy
from experiments.methods.matching import Attention, episode
from experiments.methods.sukhbaatar import noisy_losses
from experiments.methods.xiao import likelihoods
from small_tasks import CLASSES, N, batch, net, noisy_task, transfer_task
from soseleto.algorithm import Soseleto
from soseleto.data.batches import Batch
from soseleto.data.structure import label_margin
from soseleto.engines import trainable
from soseleto.errors import UsageError
from soseleto.methods import FineTuning, Mixed, Ordinary, Recording, Signals, TargetOnly
from soseleto.schedules import linear
from soseleto.task.task import Method, NonFiniteLoss, Task, after_step

STEPS = 10


def make_task(**changes: Any) -> Task:
    return noisy_task(**{"make_schedule": linear, **changes})


def wrapped() -> dict[str, Method]:
    return {"recording": Recording(Soseleto(), Signals(N))}


EVERY = [*METHODS, "recording"]
HEADS: dict[str, Callable[[], nn.Module]] = {  # of methods that compare features, in transfer mode only
    "matching_networks": lambda: Attention(7, 6, CLASSES),
    "luo": lambda: nn.Linear(6, CLASSES),
}


def made(name: str) -> Method:
    if name == "luo":
        return Luo(unlabelled=batch(20, 9).inputs, batch_size=5)
    return METHODS[name]() if name in METHODS else wrapped()[name]


def task_for(name: str) -> Task:
    return transfer_task(HEADS[name](), make_schedule=linear) if name in HEADS else make_task()


@pytest.mark.parametrize("name", EVERY)
def test_contract(name: str) -> None:
    method, task = made(name), task_for(name)
    assert method.name
    hooks, names = _hooks(task.model), list(task.model.state_dict())
    state = method.init(task)
    before = {k: p.detach().clone() for k, p in task.model.named_parameters()}
    for step in range(STEPS):
        numbers = method.step(state, batch(N, step), batch(7, 100 + step), monitor=step == STEPS - 1)
        after_step(state)
        state.schedule.step()
        assert numbers
        assert all(value.ndim == 0 and bool(value.isfinite()) and not value.requires_grad for value in numbers.values())
        assert all(p.grad is None for p in task.model.parameters())
    after = dict(task.model.named_parameters())
    assert all(bool(p.isfinite().all()) for p in after.values())
    assert task.shared <= {k for k, p in after.items() if not torch.equal(p, before[k])}
    assert state.optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-9)  # the schedule is the optimizer's
    if state.weights is not None:
        assert len(state.weights) == N
        assert bool(((state.weights.values >= 0) & (state.weights.values <= 1)).all())
        assert bool((state.weights.visits > 0).all())
    assert (_hooks(task.model), list(task.model.state_dict())) == (hooks, names)


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._backward_hooks) for m in model.modules())


@pytest.mark.parametrize("name", METHODS)
def test_nan_stops_before_it_reaches_the_parameters(name: str) -> None:
    task, method = task_for(name), made(name)
    state = method.init(task)
    bad = batch(7, 1)
    bad.inputs[2] = float("nan")
    source = batch(N, 0) if name not in ("ordinary", "fine_tuning") else bad
    with pytest.raises(NonFiniteLoss):
        method.step(state, source, bad)
    assert all(bool(p.isfinite().all()) for p in task.model.parameters())


@pytest.mark.parametrize("name", ["ordinary", "sukhbaatar", "xiao", "meta_weight_net", "recording"])
def test_methods_without_a_target_head_raise_in_transfer_mode(name: str) -> None:
    with pytest.raises(UsageError, match="mode='noisy'"):
        made(name).init(transfer_task())


@pytest.mark.parametrize("name", HEADS)
def test_methods_that_compare_features_raise_in_noisy_mode(name: str) -> None:
    with pytest.raises(UsageError, match="mode='transfer'"):
        made(name).init(make_task())


def test_phases_are_captured_separately() -> None:
    for method in (Sukhbaatar(pretrain=0.2), Xiao(pretrain=0.2), FineTuning(pretrain=0.2)):
        task = make_task()
        state, kinds = method.init(task), []
        for step in range(4):
            kinds.append(state.kind)
            method.step(state, batch(N, step), batch(7, step))
            after_step(state)
        assert kinds == [True, True, False, False]
        state.advance(2)  # as after two replays
        assert state.steps == 6


def one_step(method: Method, source: Batch, target: Batch) -> dict[str, Tensor]:
    """The change of every parameter in one plain gradient step, over the learning rate."""
    task = make_task(make_schedule=None)
    before = {k: p.detach().clone() for k, p in task.model.named_parameters()}
    method.step(method.init(task), source, target)
    return {k: (before[k] - p.detach()) / 0.1 for k, p in task.model.named_parameters()}


def plain_gradient(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    return dict(zip(trainable(model), torch.autograd.grad(loss, list(model.parameters())), strict=True))


def same(one: dict[str, Tensor], other: dict[str, Tensor], tolerance: float = 1e-9, smallest: float = 1e-12) -> bool:
    return all(torch.allclose(one[k], other[k], rtol=tolerance, atol=smallest) for k in other)


def test_plain_methods_take_the_gradient_they_say() -> None:
    source, target, model = batch(N, 0), batch(7, 1), net()
    l_s, l_t = (
        F.cross_entropy(model(source.inputs), source.labels),
        F.cross_entropy(model(target.inputs), target.labels),
    )
    of_source, of_target = plain_gradient(l_s, model), plain_gradient(l_t, model)

    def mix(share: float) -> dict[str, Tensor]:
        return {k: (1 - share) * of_source[k] + share * of_target[k] for k in of_source}

    assert same(one_step(Ordinary(), source, target), of_source)
    assert same(one_step(TargetOnly(), source, target), of_target)
    assert same(one_step(Mixed(), source, target), mix(7 / (N + 7)))
    assert same(one_step(Mixed(target_share=0.5), source, target), mix(0.5))


@pytest.mark.parametrize("engine", ["loop", "double_backward", "forward", "layerwise", "auto"])
def test_reweight_is_one_virtual_step_by_double_backward(engine: str) -> None:
    """Ren et al., Algorithm 1 literally: ε = 0, a virtual step with a graph, ∂L_t/∂ε, clip, normalise, step."""
    source, target, model = batch(N, 0), batch(7, 1), net()
    losses = F.cross_entropy(model(source.inputs), source.labels, reduction="none")
    epsilon = torch.zeros(N, dtype=torch.float64, requires_grad=True)
    moves = torch.autograd.grad((epsilon * losses).sum(), list(model.parameters()), create_graph=True)
    virtual = {k: p - 0.1 * move for (k, p), move in zip(model.named_parameters(), moves, strict=True)}
    l_t = F.cross_entropy(functional_call(model, virtual, (target.inputs,)), target.labels)
    (of_epsilon,) = torch.autograd.grad(l_t, epsilon, retain_graph=True)
    clipped = (-of_epsilon).clamp_min(0.0)
    w = clipped / clipped.sum()
    assert 0 < int((w == 0).sum()) < N
    assert same(one_step(Reweight(engine=engine), source, target), plain_gradient((w * losses).sum(), model))


@pytest.mark.parametrize("engine", ["loop", "layerwise"])
@pytest.mark.parametrize("normalize", [False, True])
def test_meta_weight_net_gradient_by_central_differences(normalize: bool, engine: str) -> None:
    method, task = MetaWeightNet(hidden=5, normalize_weights=normalize, engine=engine), make_task()
    source, target = batch(N, 0), batch(7, 1)
    torch.manual_seed(0)
    state = method.init(task)
    losses = task.losses.source(task.model, source)
    c = method.coefficients(state.weigh(losses))
    direction, _ = state.after(plain_gradient_of(losses, c.detach(), task.model), target)
    found = method.meta_gradient(state, c, state.engine(task.model, task.losses.source, source, direction)[1])

    def target_loss() -> float:
        """L_t after a real step with the current weights."""
        c = method.coefficients(state.weigh(losses)).detach()
        moves = plain_gradient_of(losses, c, task.model)
        moved = {k: p - 0.1 * moves[k] for k, p in task.model.named_parameters()}
        return float(F.cross_entropy(functional_call(task.model, moved, (target.inputs,)), target.labels))

    step, worst = 1e-4, 0.0
    for parameter, g in zip(state.net.parameters(), found, strict=True):
        numeric = torch.zeros_like(g)
        for at in range(parameter.numel()):
            with torch.no_grad():
                parameter.view(-1)[at] += step
                up = target_loss()
                parameter.view(-1)[at] -= 2 * step
                down = target_loss()
                parameter.view(-1)[at] += step
            numeric.view(-1)[at] = (up - down) / (2 * step)
        worst = max(worst, float((g - numeric).norm() / numeric.norm().clamp_min(1e-3)))
    assert worst < 1e-6


def plain_gradient_of(losses: Tensor, c: Tensor, model: nn.Module) -> dict[str, Tensor]:
    found = torch.autograd.grad(losses, list(model.parameters()), grad_outputs=c, retain_graph=True)
    return dict(zip(trainable(model), found, strict=True))


def test_sukhbaatar_layer_by_hand() -> None:
    p = torch.tensor([[0.7, 0.2, 0.1]], dtype=torch.float64)
    q = torch.tensor([[0.8, 0.1, 0.3], [0.1, 0.9, 0.0], [0.1, 0.0, 0.7]], dtype=torch.float64)
    losses, right = noisy_losses(q, p.log(), torch.tensor([0]))
    observed = 0.8 * 0.7 + 0.1 * 0.2 + 0.3 * 0.1  # p(ỹ = 0)
    assert float(losses[0]) == pytest.approx(-torch.tensor(observed, dtype=torch.float64).log().item(), rel=1e-12)
    assert float(right[0]) == pytest.approx(0.8 * 0.7 / observed, rel=1e-12)


def test_sukhbaatar_finds_the_noise_from_confusions() -> None:
    q = torch.tensor([[0.7, 0.0, 0.1], [0.3, 0.8, 0.0], [0.0, 0.2, 0.9]], dtype=torch.float64)  # not symmetric
    clean = torch.tensor([[8.0, 1.0, 1.0], [1.0, 6.0, 2.0], [1.0, 3.0, 7.0]], dtype=torch.float64)
    assert torch.allclose(from_confusions(5 * clean, clean @ q.T), q, atol=0.01)


def test_xiao_posterior_by_hand() -> None:
    method, task = Xiao(), make_task()
    state = method.init(task)
    c = torch.tensor([[0.0, 0.5, 1.0], [1.0, 0.0, 0.0], [0.0, 0.5, 0.0]], dtype=torch.float64)
    state.counts = c.clone()
    p_y, p_z = torch.tensor([[0.5, 0.3, 0.2]]).double(), torch.tensor([[0.6, 0.3, 0.1]]).double()
    labels, kinds = state.posterior(p_y.log(), p_z.log(), torch.tensor([0]))
    joint = torch.tensor(  # rows: clean, random, confusing; columns: y
        [[0.6 * 0.5, 0, 0], [0, 0.3 * 0.3 / 2, 0.3 * 0.2 / 2], [0, 0.1 * 0.3 * 0.5, 0.1 * 0.2 * 1.0]]
    ).double()
    joint /= joint.sum()
    assert torch.allclose(labels[0], joint.sum(0), atol=1e-5)
    assert torch.allclose(kinds[0], joint.sum(1), atol=1e-5)
    new = torch.zeros(3, 3).double()
    new[0] = joint[2]  # label 0, by class
    assert torch.allclose(state.counts, 0.99 * c + 0.01 * new, atol=1e-5)
    assert torch.allclose(likelihoods(c, torch.tensor([1])).sum(), torch.tensor(1.0 + 1.0 + 1.0).double())


def test_recording_follows_loss_and_margin_without_an_extra_forward() -> None:
    signals = Signals(N)
    task, source, target = make_task(), batch(N, 0), batch(7, 1)
    method = Recording(Soseleto(), signals)
    state = method.init(task)
    expected_loss, expected_margin = torch.zeros(N).double(), torch.zeros(N).double()
    for _ in range(3):
        with torch.no_grad():
            scores = task.model(source.inputs)
        expected_loss += F.cross_entropy(scores, source.labels, reduction="none") / 3
        expected_margin += label_margin(scores, source.labels) / 3
        method.step(state, source, target)
    assert torch.allclose(signals.loss.double(), expected_loss, atol=1e-5)
    assert torch.allclose(signals.margin.double(), expected_margin, atol=1e-5)


def test_recording_changes_nothing() -> None:
    source, target = batch(N, 0), batch(7, 1)
    assert same(one_step(Recording(Mixed(), Signals(N)), source, target), one_step(Mixed(), source, target), 0.0)
    signals = Signals(N)
    one_step(Recording(TargetOnly(), signals), source, target)
    assert (signals.visits == 1).all()  # by a pass of its own, since only the target was run


def test_fine_tuning_goes_from_the_source_to_the_target() -> None:
    task, source, target = transfer_task(), batch(N, 0), batch(7, 1)
    method = FineTuning(pretrain=0.5)
    state = method.init(task)
    first, second = task.shared | {"source_head.weight", "source_head.bias"}, task.shared | task.target_head
    for step in range(STEPS):
        before = {k: p.detach().clone() for k, p in task.model.named_parameters()}
        method.step(state, source, target)
        moved = {k for k, p in task.model.named_parameters() if not torch.equal(p, before[k])}
        assert moved == (first if step < STEPS // 2 else second)


def test_an_episode_by_hand() -> None:
    features = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    found = episode(features, torch.tensor([0, 0, 0]), scale=2.0)
    assert torch.allclose(found, torch.zeros(3).double(), atol=1e-12)  # every other example has the label
    found = episode(features, torch.tensor([0, 0, 1]), scale=2.0)
    e = torch.tensor(2.0, dtype=torch.float64).exp()
    assert torch.allclose(found[:2], -(e / (e + 1)).log(), atol=1e-12)


def test_luo_entropy_by_hand() -> None:
    """Two classes, one with two labelled examples: a softmax over two prototypes, whatever the class counts."""
    labelled = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    features = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    found = prototype_entropy(features, labelled, torch.tensor([0, 0, 1]), scale=2.0)
    p = torch.tensor([2.0, 0.0], dtype=torch.float64).softmax(0)
    expected = (math.log(2.0) - (p * p.log()).sum()) / 2
    assert float(found) == pytest.approx(float(expected), rel=1e-9)
