"""Batches with two views of every example, a small network with BatchNorm, and one step of descent, in float64."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.task.losses import NoisyLosses
from soseleto.task.optimizers import sgd
from soseleto.task.task import Task

C, B, T, WIDTH, STEPS = 4, 6, 3, 5, 10
EYE = torch.eye(C, dtype=torch.float64)


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, C)).double()


def batch(n: int, seed: int, views: int = 2) -> Batch:
    seeded = torch.Generator().manual_seed(seed)
    inputs = tuple(torch.randn(n, WIDTH, generator=seeded, dtype=torch.float64) for _ in range(views))
    return Batch(torch.arange(n), inputs, torch.randint(C, (n,), generator=seeded))


def task(model: nn.Module, **changes: Any) -> Task:
    fields: dict[str, Any] = {
        "model": model, "losses": NoisyLosses(), "n_source": B, "steps": STEPS, "shared": frozenset(trainable(model)),
        "target_head": frozenset(), "make_optimizer": partial(sgd, lr=0.1, momentum=0.0), "classes": C,
    }  # fmt: skip
    return Task(**{**fields, **changes})


def descend(model: nn.Module, loss: Tensor) -> None:
    model.zero_grad()
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad


def close(mine: nn.Module, expected: nn.Module) -> None:
    for a, b in zip(mine.state_dict().values(), expected.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-9)


def entropy(y: Tensor, p: Tensor) -> Tensor:
    return -sum(y[c] * p[c].log() for c in range(len(y)))
