"""Algorithm 1: against finite differences, its parts by autograd, and against ordinary training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from experiments.measures import auroc
from small_tasks import CLASSES, WIDTH, N, batch, net, noisy_task, transfer_task
from soseleto.algorithm import Soseleto, SoseletoState
from soseleto.data.batches import Batch
from soseleto.engines import alignment, trainable
from soseleto.engines.autograd import gradient
from soseleto.errors import UsageError
from soseleto.parallel.micro_batches import Sharing
from soseleto.pieces import (
    chain,
    hold_when_vanished,
    label_doubt,
    last_batch,
    mean,
    normalized,
    per_error,
    pooled_by_class,
    running_mean,
    scale_by_rms,
    target_share,
)
from soseleto.pieces.piece import Alignment, Step
from soseleto.schedules import linear
from soseleto.task.losses import NoisyLosses
from soseleto.task.optimizers import sgd
from soseleto.task.task import LossGuard, NonFiniteLoss, Task

PAPER: dict[str, Any] = {
    "direction": last_batch(), "alignment": chain(), "source_loss": mean(), "initial_weight": 0.5,
}  # fmt: skip
ENGINES = ["loop", "double_backward", "forward", "layerwise", "auto"]


@pytest.mark.parametrize("make", [noisy_task, transfer_task], ids=["noisy", "transfer"])
@pytest.mark.parametrize("engine", ENGINES)
def test_weight_step_is_the_descent_direction_of_the_target_loss(make: Callable[[], Task], engine: str) -> None:
    """−∂/∂α_j L_t(θ − λQα) at λ → 0 over λ, by central differences in α, equals the alignment the weights step by."""
    task = make()
    source, target, lam = batch(N, 1), batch(7, 2), 1e-3
    parameters = {k: v.detach() for k, v in task.model.named_parameters()}
    losses = task.losses.source(task.model, source)
    shared = sorted(task.shared)
    columns = [
        torch.autograd.grad(loss, [task.model.get_parameter(k) for k in shared], retain_graph=True) for loss in losses
    ]

    def target_loss(alpha: Tensor) -> Tensor:
        moved = dict(parameters)
        for place, name in enumerate(shared):
            moved[name] = parameters[name] - lam * sum(a * c[place] for a, c in zip(alpha, columns, strict=True))
        with torch.no_grad():
            called = {f"model.{k}": v for k, v in moved.items()}
            return functional_call(_Target(task), called, (target,))

    slopes = []
    for j in range(N):
        # The second-order term of L_t is even in α, so differences around α = 0 are exact to O(λ³ε²).
        e = torch.zeros(N, dtype=torch.float64)
        e[j] = 1.0
        slopes.append((target_loss(e) - target_loss(-e)) / 2)
    right = -torch.stack(slopes) / lam

    method = Soseleto(weight_step=1e-3, engine=engine, **PAPER)
    state = method.init(task)
    method.step(state, source, target)
    moved = (state.weights.values.double() - 0.5) / 1e-3
    assert float((state.weights.scores.double() - right).norm() / right.norm()) < 1e-6
    assert float((moved - right).norm() / right.norm()) < 1e-3  # float32 weights near 0.5 keep four digits of a step


class _Target(nn.Module):
    def __init__(self, task: Task) -> None:
        super().__init__()
        self.model, self.losses = task.model, task.losses

    def forward(self, target: Batch) -> Tensor:
        return self.losses.target(self.model, target).mean()


@pytest.mark.parametrize("source_loss", [mean(), normalized()], ids=repr)
@pytest.mark.parametrize("share", [0.0, 0.25])
@pytest.mark.parametrize("weight_step", [0.1, None])
@pytest.mark.parametrize("make", [noisy_task, transfer_task], ids=["noisy", "transfer"])
def test_each_part_is_trained_by_its_own_loss_and_theta_by_a_share_of_the_targets(
    make: Callable[[], Task], weight_step: float | None, share: float, source_loss: Any
) -> None:
    task, source, target = make(), batch(6, 1), batch(5, 2)
    start = {name: p.detach().clone() for name, p in task.model.named_parameters()}
    parameters = list(task.model.parameters())
    gradients = target_share(share) if share else chain()
    method = Soseleto(weight_step=weight_step, gradients=gradients, **{**PAPER, "source_loss": source_loss})
    state = method.init(task)
    state.weights.values.copy_(torch.linspace(0.1, 1.0, N))
    w = state.weights.values[source.index].double()
    w = w / (len(w) if source_loss == mean() else w.sum())
    sums = [(w * task.losses.source(task.model, source)).sum(), task.losses.target(task.model, target).mean()]
    found = [dict(zip(start, torch.autograd.grad(one, parameters, allow_unused=True), strict=True)) for one in sums]
    method.step(state, source, target)
    for name, now in task.model.named_parameters():
        of_source, of_target = (each[name] for each in found)
        if name in task.target_head:
            step = of_target
        elif name in task.shared:
            step = (1 - share) * of_source + share * of_target
        else:
            step = of_source
        assert torch.allclose(now, start[name] - 0.1 * step, rtol=1e-6), name


@pytest.mark.parametrize("source_loss", [mean(), normalized()])
def test_weights_all_one_and_frozen_is_ordinary_training_bit_for_bit(source_loss: Any) -> None:
    ours, plain = net().float(), net().float()
    method = Soseleto(weight_step=None, initial_weight=1.0, source_loss=source_loss)
    state = method.init(noisy_task(ours, make_optimizer=partial(sgd, lr=0.1, weight_decay=1e-3), make_schedule=linear))
    optimizer = partial(sgd, lr=0.1, weight_decay=1e-3)(plain.parameters())
    schedule = linear(optimizer, 10)
    for m in range(5):
        b = batch(8, m)  # a power of two: Σα/α is then exact whichever way it is divided
        b = Batch(b.index, b.inputs.float(), b.labels)
        method.step(state, b, b)
        state.schedule.step()
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(b.inputs), b.labels).backward()
        optimizer.step()
        schedule.step()
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_weight_step_follows_the_learning_rate_down() -> None:
    """Half-way down the schedule the same alignments move weights half as far."""
    method = Soseleto(weight_step=0.01, **PAPER, engine="loop")
    state = method.init(noisy_task(net(), make_optimizer=partial(sgd, lr=1e-12), make_schedule=linear))
    moves = []
    for _ in range(2):
        before = state.weights.values.clone()
        method.step(state, batch(N, 0), batch(5, 1))
        moves.append(state.weights.values - before)
        for _ in range(5):
            state.schedule.step()  # type: ignore[union-attr]
    assert torch.allclose(moves[1], 0.5 * moves[0], rtol=1e-3, atol=1e-7)


def test_the_unit_is_the_root_mean_square_of_all_alignments_so_far() -> None:
    method = Soseleto(direction=last_batch(), alignment=scale_by_rms(), engine="loop")
    state = method.init(noisy_task(net(), make_optimizer=partial(sgd, lr=1e-12)))
    task, seen, expected = state.task, torch.zeros(0), torch.zeros(N)
    for m in range(3):
        source, target = batch(N, m), batch(5, m + 50)
        direction = gradient(task.losses.target(task.model, target).mean(), trainable(task.model))
        q = alignment(task.model, task.losses.source, source, direction, engine="loop")[1]
        seen = torch.cat([seen, q])
        expected = expected + q / seen.square().mean().sqrt() / 3
        method.step(state, source, target)
    assert torch.allclose(state.weights.scores.double(), expected, rtol=1e-5)


@pytest.mark.parametrize("engine", ["loop", "layerwise"])
def test_alignments_with_a_running_mean_are_corrected_for_its_start(engine: str) -> None:
    """After m batches g is Σ decayᵐ⁻ⁱ(1 − decay)gᵢ, and q = Qᵀg/(1 − decayᵐ)."""
    decay = 0.8
    method = Soseleto(weight_step=1e-9, alignment=chain(), direction=running_mean(decay), engine=engine)
    state = method.init(noisy_task(net(), make_optimizer=partial(sgd, lr=1e-12)))
    task, found, expected = state.task, [], torch.zeros(N)
    for m in range(1, 4):
        source, target = batch(N, m), batch(5, m + 50)
        found.append(gradient(task.losses.target(task.model, target).mean(), trainable(task.model)))
        weights = [decay ** (m - i) * (1 - decay) / (1 - decay**m) for i in range(1, m + 1)]
        mean_of = {k: sum(w * g[k] for w, g in zip(weights, found, strict=True)) for k in found[0]}
        expected = expected + alignment(task.model, task.losses.source, source, mean_of, engine="loop")[1] / 3
        method.step(state, source, target)
    assert torch.allclose(state.weights.scores.double(), expected, rtol=1e-5)


def vanish(state: SoseletoState, method: Soseleto, model: nn.Linear) -> dict[str, Tensor]:
    numbers = method.step(state, batch(N, 0), batch(4, 1))
    perfect = Batch(torch.arange(3), 100.0 * torch.eye(3, WIDTH, dtype=torch.float64), torch.arange(3))
    with torch.no_grad():
        model.weight.copy_(10 * torch.eye(3, WIDTH))
        model.bias.zero_()
    for _ in range(80):  # the running mean needs a while to believe it
        numbers = method.step(state, batch(N, 0), perfect, monitor=True)
    return numbers


def test_weights_are_held_when_the_target_loss_has_vanished() -> None:
    model = nn.Linear(WIDTH, CLASSES).double()
    method = Soseleto(weight_step=0.1)
    state = method.init(noisy_task(model, make_optimizer=partial(sgd, lr=1e-9)))
    numbers = vanish(state, method, model)
    assert float(numbers["held"]) == 1.0
    held, scores = state.weights.values.clone(), state.weights.scores.clone()
    method.step(state, batch(N, 3), Batch(torch.arange(3), 100 * torch.eye(3, WIDTH).double(), torch.arange(3)))
    assert torch.equal(state.weights.values, held)
    aligned = (state.weights.scores - scores) * state.weights.visits + scores  # of this step: scores are not held
    assert float(aligned.abs().max()) > 1e-2


def test_on_a_gpu_a_bad_loss_is_kept_until_it_is_asked_for() -> None:
    guard = LossGuard(torch.device("cpu"))
    index = torch.tensor([4, 7])
    guard("source", torch.ones(2), index)
    guard.check()
    guard("source", torch.tensor([1.0, float("nan")]), index)
    guard("source", torch.ones(2), index)
    with pytest.raises(NonFiniteLoss) as caught:
        guard.check()
    assert (caught.value.side, caught.value.index) == ("source", [7])


def test_monitor_tells_the_paper_condition_and_the_change_of_the_target_loss() -> None:
    model = net()
    method = Soseleto(weight_step=0.3, **PAPER, engine="loop")
    state = method.init(noisy_task(model, make_optimizer=partial(sgd, lr=1e-4, momentum=0.0)))
    source, target = batch(N, 0), batch(5, 1)
    numbers = method.step(state, source, target, monitor=True)
    q = state.weights.scores.double()
    # λ_α λ_p ‖Qᵀ∂L_t/∂θ‖ / √nˢ with nˢ = L: weight_step·L is λ_α λ_p and Q carries 1/L.
    assert float(numbers["condition"]) == pytest.approx(0.3 * float(q.norm()) / math.sqrt(N), rel=1e-5)
    assert float(numbers["predicted_change"]) == pytest.approx(float(numbers["actual_change"]), rel=1e-2)
    assert float(numbers["predicted_change"]) == pytest.approx(-1e-4 * float((0.5 * q).mean()), rel=1e-5)


@pytest.mark.parametrize(
    ("side", "settings"),
    [("source", {}), ("target", {}), ("source", {"weight_step": None})],  # frozen weights need no target batch
)
def test_non_finite_losses_stop_before_the_parameters_move(side: str, settings: dict[str, Any]) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    method = Soseleto(**settings, engine="loop")
    state = method.init(noisy_task(model))
    batches = {"source": batch(N, 0), "target": batch(5, 1)}
    batches[side].inputs[3] = float("nan")
    with pytest.raises(NonFiniteLoss) as caught:
        method.step(state, batches["source"], batches["target"])
    assert (caught.value.side, caught.value.index) == (side, [3])
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.all(state.weights.values == 1.0)


@pytest.mark.parametrize(("index", "words"), [([0, 1, 1], "occurs twice"), ([0, 1, N], "out of range")])
def test_bad_source_indices_stop_before_anything_moves(index: list[int], words: str) -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    method = Soseleto()
    state = method.init(noisy_task(model))
    source = Batch(torch.tensor(index), batch(3, 0).inputs, batch(3, 0).labels)
    with pytest.raises(UsageError, match=words):
        method.step(state, source, batch(5, 1))
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Soseleto(weight_step=0.0), "weight_step must be above 0"),
        (lambda: Soseleto(weight_step=float("nan")), "weight_step must be above 0"),
        (lambda: running_mean(1.0), r"decay of running_mean must lie in \[0, 1\), got 1.0"),
        (lambda: target_share(1.0), r"share of target_share must lie in \(0, 1\), got 1.0"),
        (lambda: hold_when_vanished(0.0), "share of hold_when_vanished must be above 0"),
        (lambda: Soseleto(alignment=target_share(0.3)), r"alignment=target_share\(share=0.3\) is not possible"),
        (lambda: Soseleto(direction=mean()), r"direction=mean\(\) is not possible"),  # type: ignore[arg-type]
        (lambda: Soseleto(gradients=0.3), "gradients=0.3 is not possible"),  # type: ignore[arg-type]
        (lambda: chain(per_error(), target_share(0.5)), "belong to different arguments"),
        (lambda: Soseleto(direction=running_mean(layers=("no.",))).init(transfer_task()), "match none of"),
    ],
)
def test_bad_settings(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()


def pooled(labels: Tensor, visits: list[Tensor]) -> Tensor:
    """Estimates after all visits, in batches of 50."""
    task = noisy_task(net(), n_source=len(labels), classes=int(labels.max()) + 1)
    state, found = pooled_by_class().init(task), torch.zeros(len(labels))
    for u in visits:
        for index in torch.randperm(len(labels), generator=torch.Generator().manual_seed(0)).split(50):
            step = Step(task, Batch(index, torch.zeros(len(index)), labels[index]), batch(1, 0))
            found[index] = pooled_by_class().update(Alignment(u[index]), state, step)
    return found


def test_pooling_finds_useless_classes_in_noise() -> None:
    """Five visits, ten times noisier than the difference between the classes: single means are hopeless."""
    labels = torch.arange(2000) % 4
    seeded = torch.Generator().manual_seed(0)
    visits = [(labels < 2).float() * 0.1 + torch.randn(len(labels), generator=seeded) for _ in range(5)]
    assert auroc(torch.stack(visits).mean(0), labels >= 2) < 0.65
    assert auroc(pooled(labels, visits), labels >= 2) > 0.99


def test_alignments_per_error_are_divided_by_one_minus_the_probability_of_the_label() -> None:
    source, target = batch(8, 0), batch(5, 1)
    scores = []
    for divided in (chain(), per_error()):
        task = transfer_task()
        with torch.no_grad():
            right = task.model.source_head(task.model.trunk(source.inputs)).softmax(1)  # type: ignore[union-attr, operator]
        error = 1.0 - right.gather(1, source.labels[:, None]).flatten()
        method = Soseleto(alignment=divided, direction=last_batch())
        state = method.init(task)
        method.step(state, source, target)
        scores.append(state.weights.scores[:8].double())
    assert torch.allclose(scores[1], scores[0] / (1e-4 + error.double()), rtol=1e-5)
    assert not torch.allclose(scores[1], scores[0], rtol=0.1)


@pytest.mark.parametrize("sharing", [Sharing(), Sharing(micro_batch_size=5)], ids=["whole", "micro-batches"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_doubted_label_counts_by_what_the_network_leaves_of_it(
    engine: str, normalize: bool, sharing: Sharing
) -> None:
    """θ follows a noise layer Q = αI + (1 − α)/K of every example's own, and α the alignment of the plain loss."""
    model, source, target = net(), batch(N, 1), batch(7, 2)
    alpha = torch.linspace(0.1, 1.0, N, dtype=torch.float64).float().double()
    before = copy.deepcopy(model)
    answers = before(source.inputs).softmax(1)
    right = answers[torch.arange(N), source.labels]
    noisy = alpha * right + (1.0 - alpha) / CLASSES
    w = (alpha * right / noisy).detach()
    wanted = gradient(-noisy.log().mean() / (w.mean() if normalize else 1.0), trainable(before))
    plain = NoisyLosses()
    direction = gradient(plain.target(before, target).mean(), trainable(before))
    q = alignment(before, plain.source, source, direction, engine="loop")[1]

    settings: dict[str, Any] = {**PAPER, "source_loss": label_doubt(normalize), "weight_step": 0.05, "engine": engine}
    method = Soseleto(**settings)
    state = method.init(noisy_task(model, classes=CLASSES, sharing=sharing))
    state.weights.values.copy_(alpha)
    method.step(state, source, target)
    for name, old in trainable(before).items():
        assert torch.allclose(model.get_parameter(name), old - 0.1 * wanted[name], rtol=1e-8, atol=1e-9)
    assert torch.allclose(state.weights.values.double(), (alpha + 0.05 * q).clamp(0.0, 1.0), atol=1e-6)
