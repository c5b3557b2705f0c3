"""Batches with two views of every example, a small network with BatchNorm, and one step of descent, in float64."""

from functools import partial

import torch
from torch import Tensor, nn

from small_tasks import noisy_task
from soseleto.data.batches import Batch

C, B, T, WIDTH, STEPS = 4, 6, 3, 5, 10
EYE = torch.eye(C, dtype=torch.float64)
task = partial(noisy_task, n_source=B, steps=STEPS, classes=C)


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, C)).double()


def batch(n: int, seed: int, views: int = 2) -> Batch:
    seeded = torch.Generator().manual_seed(seed)
    inputs = tuple(torch.randn(n, WIDTH, generator=seeded, dtype=torch.float64) for _ in range(views))
    return Batch(torch.arange(n), inputs, torch.randint(C, (n,), generator=seeded))


def descend(model: nn.Module, loss: Tensor) -> None:
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def follow(mean: nn.Module, model: nn.Module, decay: float) -> None:
    """A teacher's running mean of parameters and buffers."""
    for old, new in zip(mean.state_dict().values(), model.state_dict().values(), strict=True):
        old.copy_(decay * old + (1 - decay) * new if new.is_floating_point() else new)


def close(mine: nn.Module, expected: nn.Module) -> None:
    for a, b in zip(mine.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def entropy(y: Tensor, p: Tensor) -> Tensor:
    return -sum(y[c] * p[c].log() for c in range(len(y)))
