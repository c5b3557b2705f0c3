"""A small network, batches for it, tasks of both modes, in float64, and an optimizer that acts at one of its steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.task.losses import NoisyLosses, TransferLosses
from soseleto.task.optimizers import sgd
from soseleto.task.task import LossGuard, Task

WIDTH, CLASSES, N = 4, 3, 12
MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def batch(n: int, seed: int, offset: int = 0) -> Batch:
    seeded = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, WIDTH, generator=seeded, dtype=torch.float64)
    return Batch(torch.arange(n) + offset, inputs, torch.randint(CLASSES, (n,), generator=seeded))


def batches(step: int, n: int = 8, t: int = 5, *, of: int = N) -> tuple[Batch, Batch]:
    """n of the source examples in random order, and t target examples."""
    seeded = torch.Generator().manual_seed(step)
    sides = []
    for places in (torch.randperm(of, generator=seeded)[:n], torch.arange(t)):
        x = torch.randn(len(places), WIDTH, generator=seeded, dtype=torch.float64)
        sides.append(Batch(places, x, torch.randint(CLASSES, (len(places),), generator=seeded)))
    return sides[0], sides[1]


def net(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def noisy_task(model: nn.Module | None = None, **changes: Any) -> Task:
    model = model or net()
    fields: dict[str, Any] = {
        "model": model, "losses": NoisyLosses(), "n_source": N, "steps": 10, "shared": frozenset(trainable(model)),
        "target_head": frozenset(), "make_optimizer": partial(sgd, lr=0.1, momentum=0.0),
        "guard": LossGuard(torch.device("cpu"), deferred=False),
    }  # fmt: skip
    return Task(**{**fields, **changes})


def transfer_task(target_head: nn.Module | None = None, **changes: Any) -> Task:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh())
        model = TrunkAndHeads(trunk, nn.Linear(6, CLASSES), target_head or nn.Linear(6, CLASSES)).double()
    return heads_task(model, **changes)


def heads_task(model: nn.Module, **changes: Any) -> Task:
    """The task of a trunk with two heads."""
    names = trainable(model)
    parts = {part: frozenset(n for n in names if n.startswith(f"{part}.")) for part in ("trunk", "target_head")}
    fields: dict[str, Any] = {"losses": TransferLosses(), "shared": parts["trunk"], "target_head": parts["target_head"]}
    return noisy_task(model, **{**fields, **changes})


def ask_at(step: int, then: Callable[[], None], kind: Any = MOMENTUM) -> Any:
    """An optimizer that calls ``then`` at the end of its given step."""

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made, taken = kind(list(parameters)), [0]

        def count(*_: object) -> None:
            taken[0] += 1
            if taken[0] == step:
                then()

        made.register_step_post_hook(count)
        return made

    return make
