"""preconditioned against the slow oracle: one gradient per example, and the movement that the optimizer makes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer

import small_tasks
import soseleto
from small_tasks import net, noisy_task
from soseleto import Selection, Soseleto
from soseleto.data.batches import Batch
from soseleto.errors import UsageError
from soseleto.pieces import chain, last_batch, preconditioned, running_mean
from soseleto.pieces.piece import ParameterStates, Step
from soseleto.schedules import warmup_cosine
from soseleto.task.task import peak_rate, take_step

N, DECAY, BETA, EPS = 20, 0.8, 0.9, 1e-3
network = partial(net, 1)
batches = partial(small_tasks.batches, n=9, of=N)
RATES = {"0": 0.02, "2": 0.05}  # of the two layers, each in a group of its own


def gradients(model: nn.Module, batch: Batch) -> list[list[Tensor]]:
    """Of every example, by parameter."""
    losses = F.cross_entropy(model(batch.inputs), batch.labels, reduction="none")
    return [list(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)) for loss in losses]


def directions(piece: preconditioned, gradient: dict[str, Tensor], model: nn.Module, optimizer: Optimizer) -> Any:
    """What ``piece`` makes of the gradient."""
    problem, (source, target) = noisy_task(model, n_source=N), batches(0)
    step = Step(problem, source, target, optimizer=ParameterStates(optimizer, model))
    return piece.update(gradient, piece.init(problem), step)


@pytest.mark.parametrize("engine", ["layerwise", "forward", "double_backward"])
def test_alignments_are_those_of_adams_step(engine: str) -> None:
    model = network()

    def in_groups(parameters: Any) -> Optimizer:
        groups = [{"params": list(model[int(name)].parameters()), "lr": lr} for name, lr in RATES.items()]
        return Adam(groups, betas=(0.7, BETA), eps=EPS)

    method = Soseleto(direction=preconditioned(running_mean(DECAY)), alignment=chain(), engine=engine)
    state = method.init(noisy_task(model, n_source=N, make_optimizer=in_groups, make_schedule=warmup_cosine))
    rates = [RATES[name.partition(".")[0]] for name, _ in model.named_parameters()]
    means = [torch.zeros_like(p) for p in model.parameters()]
    squares = [torch.zeros_like(p) for p in model.parameters()]
    for number in range(4):
        source, target = batches(number)
        for mean, g in zip(means, zip(*gradients(model, target), strict=True), strict=True):
            mean.mul_(DECAY).add_(torch.stack(g).mean(0), alpha=1 - DECAY)
        corrected = [mean / (1 - DECAY ** (number + 1)) for mean in means]
        if number == 0:
            direction = [g.sign() * lr for g, lr in zip(corrected, rates, strict=True)]
        else:
            roots = [(v / (1 - BETA**number)).sqrt() + EPS for v in squares]
            direction = [lr * g / root for g, root, lr in zip(corrected, roots, rates, strict=True)]
        of_examples = gradients(model, source)
        expected = [sum((g * d).sum() for g, d in zip(own, direction, strict=True)) for own in of_examples]

        found = method.evaluate(state, source, target)
        q = method.direction.correct(found.step.passes.alignment, state.pieces["direction"])
        torch.testing.assert_close(q, torch.stack(expected), rtol=1e-10, atol=1e-13)  # type: ignore[arg-type]
        for v, (name, _) in zip(squares, model.named_parameters(), strict=True):
            v.mul_(BETA).addcmul_(found.gradients[name], found.gradients[name], value=1 - BETA)
        take_step(state.task, state, found.gradients)
        state.schedule.step()  # the first rates count, whatever the schedule makes of them
        state.advance(1)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {  # without momentum, so that a step is −lr·P·g
    "Adam": lambda p: Adam(p, lr=0.1, betas=(0.0, 0.95)),
    "Adam, amsgrad": lambda p: Adam(p, lr=0.1, betas=(0.0, 0.5), amsgrad=True),
    "AdamW": lambda p: AdamW(p, lr=0.1, betas=(0.0, 0.95), weight_decay=0.0),
    "NAdam": lambda p: NAdam(p, lr=0.1, betas=(0.0, 0.95)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_direction_is_the_step_that_the_optimizer_takes(name: str) -> None:
    model = network()
    model.append(nn.Conv2d(2, 3, 3).double())  # of more than two dimensions
    optimizer = OPTIMIZERS[name](model.parameters())
    seeded = torch.Generator().manual_seed(3)
    for _ in range(3):
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=seeded, dtype=p.dtype)
        optimizer.step()
    moved = {name: before[name] - p.detach() for name, p in model.named_parameters()}
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    direction = directions(preconditioned(last_batch()), found, model, optimizer)
    for name_, step in moved.items():
        torch.testing.assert_close(direction[name_], step, rtol=1e-12, atol=1e-14)


def test_parameters_that_the_optimizer_does_not_step_are_left_out() -> None:
    model = network()
    optimizer = Adam(model[0].parameters(), lr=0.1)
    gradient = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    piece = preconditioned(last_batch())
    assert set(directions(piece, gradient, model, optimizer)) == {"0.weight", "0.bias"}
    optimizer.add_param_group({"params": list(model[2].parameters())})
    assert set(directions(piece, gradient, model, optimizer)) == set(gradient)


def test_what_cannot_be_followed_is_refused() -> None:
    method, x, y = Soseleto(direction=preconditioned()), torch.randn(9, 4), torch.arange(9) % 3
    with pytest.raises(UsageError, match="knows the optimizers Adam, AdamW and NAdam, got SGD"):
        soseleto.fit(network().float(), (x, y), (x, y), epochs=1, method=method, optimizer=lambda p: SGD(p, lr=0.1))
    loss = lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none")  # noqa: E731
    selection = Selection(network().float(), n_source=N, loss=loss, method=method)
    with pytest.raises(UsageError, match="optimizer=optimizer"):
        selection.backward((x, y), (x, y), index=torch.arange(9))


def test_a_rate_on_a_device_is_not_waited_for() -> None:
    on_device = torch.empty((), device="meta")  # its number cannot be read, as while a CUDA graph is recorded
    assert peak_rate({"lr": on_device}) is on_device
    assert peak_rate({"lr": 0.1, "initial_lr": 0.2, "max_lr": 0.3}) == 0.3
