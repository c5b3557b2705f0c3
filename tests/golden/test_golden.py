"""Golden runs: what ``fit`` gave before Algorithm 1 was composed of pieces, commit 525b719, is what it gives now.

``runs.safetensors`` holds weights, scores, visits, parameters and history of every run below. Data and initial
parameters are multiples of 1/16 and 1/32, so that they are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from soseleto import Compute, Heads, Result, Soseleto, fit
from soseleto.pieces import (
    chain,
    hold_when_vanished,
    label_doubt,
    last_batch,
    mean,
    per_error,
    pooled_by_class,
    running_mean,
    scale_by_rms,
    target_share,
)

FILE = Path(__file__).with_name("runs.safetensors")
PAPER: dict[str, Any] = {
    "initial_weight": 0.5,
    "direction": last_batch(),
    "alignment": hold_when_vanished(),
    "source_loss": mean(),
}
METHODS = {
    "default": Soseleto(),
    "paper": Soseleto(weight_step=0.3, **PAPER),
    "weights_first": Soseleto(weights_first=True),
    "notebook": Soseleto(weight_step=0.3, weights_first=True, **PAPER),
    "raw_step": Soseleto(weight_step=0.5, alignment=hold_when_vanished(), direction=running_mean(0.9)),
    "mean_loss": Soseleto(source_loss=mean()),
    "per_error": Soseleto(alignment=chain(per_error(), scale_by_rms(), hold_when_vanished())),
    "pool_classes": Soseleto(scores=pooled_by_class()),
    "doubt_labels": Soseleto(source_loss=label_doubt()),
    "doubt_labels_mean": Soseleto(source_loss=label_doubt(normalize=False), gradients=target_share(0.2)),
    "target_share": Soseleto(gradients=target_share(0.3)),
    "aligned": Soseleto(direction=running_mean(layers=("2.",))),
    "vanished": Soseleto(alignment=chain(scale_by_rms(), hold_when_vanished(1.0))),
    "large_step": Soseleto(weight_step=0.6),
    "frozen": Soseleto(weight_step=None),
    "frozen_half": Soseleto(weight_step=None, initial_weight=0.5, gradients=target_share(0.3)),
}
MORE: dict[str, Callable[[], Result]] = {
    "adamw": lambda: train(mlp(), lr=None, optimizer=lambda p: torch.optim.AdamW(p, lr=0.02)),
    "micro_batches": lambda: train(mlp(), compute=Compute(micro_batch_size=5)),
    "weights_first_micro_batches": lambda: train(
        mlp(), Soseleto(weights_first=True), compute=Compute(micro_batch_size=5)
    ),
    "batch_norm": lambda: train(with_parameters(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))),
    "transfer": lambda: transfer(Soseleto()),
    "float64": lambda: train(mlp().double(), double=True),
    "bfloat16": lambda: train(mlp(), compute=Compute(dtype=torch.bfloat16)),
}


def sixteenths(*shape: int, seed: int, unit: float = 16.0) -> Tensor:
    return torch.randint(-16, 17, shape, generator=torch.Generator().manual_seed(seed)).float() / unit


def with_parameters(*layers: nn.Module) -> nn.Sequential:
    model = nn.Sequential(*layers)
    with torch.no_grad():
        for seed, p in enumerate(model.parameters()):
            p.copy_(sixteenths(*p.shape, seed=100 + seed, unit=32.0))
    return model


def mlp() -> nn.Sequential:
    return with_parameters(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def data(n: int, seed: int, *, noisy: bool, double: bool = False) -> tuple[Tensor, Tensor]:
    x = sixteenths(n, 4, seed=seed)
    y = (x[:, :3] + 0.5 * x[:, 1:]).argmax(1)
    wrong = torch.randint(10, (n,), generator=torch.Generator().manual_seed(seed + 1)) < 3
    y = torch.where(wrong, (y + 1) % 3, y) if noisy else y
    return x.double() if double else x, y


def train(model: nn.Module, method: Soseleto | None = None, *, double: bool = False, **changes: Any) -> Result:
    given: dict[str, Any] = {"epochs": 6, "batch_size": 16, "target_batch_size": 6, "lr": 0.1, "device": "cpu"}
    given = {name: value for name, value in {**given, **changes}.items() if value is not None}
    source, target = data(44, 1, noisy=True, double=double), data(12, 5, noisy=False, double=double)
    return fit(model, source, target, method=method or Soseleto(), **given)


def transfer(method: Soseleto) -> Result:
    trunk = with_parameters(nn.Linear(4, 6), nn.ReLU())
    heads = Heads(source=with_parameters(nn.Linear(6, 3))[0], target=with_parameters(nn.Linear(6, 3))[0])
    return train(trunk, method, mode="transfer", heads=heads)


def kept(result: Result) -> dict[str, Tensor]:
    found = {"weights": result.weights, "scores": result.scores, "visits": result.learned.visits.cpu()}
    found |= {f"model/{name}": value.cpu() for name, value in result.model.state_dict().items()}
    for name in ("source_loss", "target_loss", "held", "condition", "predicted_change", "actual_change"):
        if name in result.history[-1]:
            values = [record[name] for record in result.history]
            found[f"history/{name}"] = torch.tensor(values, dtype=torch.float64)
    return found


def tolerance(run: str) -> dict[str, float]:
    """Processors sum in another order, which is seen in the last digits; some only emulate bfloat16."""
    return {"rtol": 5e-2, "atol": 2e-2} if run == "bfloat16" else {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The number of threads decides the order of sums."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("run", [*METHODS, *MORE])
def test_a_golden_run_is_what_it_was(run: str) -> None:
    golden = {
        name.removeprefix(f"{run}/"): value for name, value in load_file(FILE).items() if name.startswith(f"{run}/")
    }
    found = kept(train(mlp(), METHODS[run]) if run in METHODS else MORE[run]())
    assert found.keys() == golden.keys()
    for name, value in golden.items():
        torch.testing.assert_close(found[name], value, **tolerance(run), msg=lambda text, n=name: f"{n}: {text}")


def test_every_kept_run_is_tested() -> None:
    assert {name.partition("/")[0] for name in load_file(FILE)} == {*METHODS, *MORE}
