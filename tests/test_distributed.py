"""Ranks: several processes train what one would, each with its own source examples, and none waits for a dead one."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from ranks import together
from soseleto.data import Augment
from soseleto.distributed import Reducer
from soseleto.methods import Mixed, Ordinary, TargetOnly

pytestmark = pytest.mark.skipif(os.name != "posix", reason="processes are started and killed as POSIX does")


class Reshaped(nn.Module):
    """Refuses batches without examples, as many models do."""

    def forward(self, x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], -1)


def points(n: int, seed: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 4, generator=seeded, dtype=torch.float64)
    return inputs, (inputs[:, :3] + 0.5 * torch.randn(n, 3, generator=seeded, dtype=torch.float64)).argmax(1)


def net(mode: str = "noisy") -> nn.Module:
    torch.manual_seed(0)
    trunk = [nn.Linear(4, 8), nn.Tanh(), Reshaped()]
    return nn.Sequential(*trunk, nn.Linear(8, 3)).double() if mode == "noisy" else nn.Sequential(*trunk).double()


def train(reducer: Reducer | None, **changes: Any) -> dict[str, Any]:
    """200 steps by default, 8 an epoch; the last batch of an epoch has 2 examples, the target's 3: some get none."""
    given: dict[str, Any] = {
        "source": points(58, 0), "target": points(20, 1), "test": points(9, 2), "epochs": 25, "batch_size": 8,
        "target_batch_size": 3, "lr": 0.05, "device": "cpu", "reducer": reducer,
    }  # fmt: skip
    model = net(changes.get("mode", "noisy"))
    result = soseleto.fit(model, **{**given, **changes})
    found = {f"model {name}": value for name, value in result.model.state_dict().items()}
    if result.learned is not None:
        found |= {"weights": result.weights, "scores": result.scores, "visits": result.learned.visits.double()}
    drop = ("seconds", "epoch", "epochs", "groups", "histogram")
    last = {name: value for name, value in result.history[-1].items() if name not in drop}
    return found | {name: torch.tensor(float(value)) for name, value in last.items()}


def require_close(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-6) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(value.double(), other[name].double(), rtol=tolerance, atol=tolerance, msg=name)


CASES: dict[str, dict[str, Any]] = {
    "noisy, layerwise": {"engine": "layerwise"},
    "noisy, forward": {"engine": "forward"},
    "noisy, double backward": {"engine": "double_backward"},
    "noisy, loop": {"engine": "loop"},
    "transfer, layerwise": {"mode": "transfer", "engine": "layerwise"},
    "transfer, forward": {"mode": "transfer", "engine": "forward"},
    "transfer, double backward": {"mode": "transfer", "engine": "double_backward"},
    "transfer, loop": {"mode": "transfer", "engine": "loop"},
    "weights first, paper's loss": {
        "method": soseleto.Soseleto(weights_first=True, normalize_weights=False, target_share=0.3, max_norm=1.0),
        "epochs": 3,
    },
    "frozen": {"method": soseleto.Soseleto(weight_step=None), "mode": "transfer", "epochs": 3},
    "ordinary": {"method": Ordinary(), "epochs": 3},
    "mixed": {"method": Mixed(), "epochs": 3},
    "target only": {"method": TargetOnly(), "epochs": 3},
}


def train_all(reducer: Reducer | None, cases: list[str]) -> dict[str, Any]:
    return {name: train(reducer, **CASES[name]) for name in cases}


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_train_what_one_process_does(ranks: int) -> None:
    alone = train_all(None, list(CASES))
    for answer in together(ranks, train_all, list(CASES)):
        assert isinstance(answer, dict), answer
        for name in CASES:
            require_close(alone[name], answer[name])
