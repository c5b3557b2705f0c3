"""BatchNorm with ranks and micro-batches: statistics per part, and the same model on every rank."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soseleto
from parallel.test_ranks import points, terminate
from ranks import together
from small_tasks import ask_at
from soseleto.data import TargetCycle
from soseleto.data.batches import Batch
from soseleto.engines import make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.interface import Step
from soseleto.errors import UsageError
from soseleto.parallel.micro_batches import PER_PART, Sharing
from soseleto.parallel.reducer import Reducer
from soseleto.task.losses import NoisyLosses
from soseleto.task.optimizers import sgd

LOSSES = NoisyLosses()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch(n: int, seed: int) -> Batch:
    return Batch(torch.arange(n), *points(n, seed))


@pytest.mark.parametrize("engine", ["auto", "double_backward"])
def test_micro_batches_are_evaluated_one_by_one(engine: str) -> None:
    """Seven examples, three at a time: parts of 3, 2 and 2."""
    model, source, target = net(), batch(7, 0), batch(5, 1)
    oracle = copy.deepcopy(model)
    c = torch.linspace(0.1, 0.4, 7, dtype=torch.float64)
    step = Step(model, LOSSES, source, target, to_direction=lambda g: g, coefficients=c)
    found = Sharing(micro_batch_size=3).passes(make_engine(engine), step)
    of_target = [gradient(LOSSES.target(oracle, part).sum() / 5, trainable(oracle)) for part in target.split([3, 2])]
    direction = {name: sum(g[name] for g in of_target) for name in of_target[0]}
    right, wanted = [], {name: torch.zeros_like(p) for name, p in trainable(oracle).items()}
    for part, mine in zip(source.split([3, 2, 2]), c.split([3, 2, 2]), strict=True):
        right.append(soseleto.alignment(copy.deepcopy(oracle), LOSSES.source, part, direction, "loop")[1])  # type: ignore[arg-type]
        for name, g in gradient(LOSSES.source(oracle, part), trainable(oracle), mine).items():
            wanted[name] += g
    torch.testing.assert_close(found.alignment, torch.cat(right), rtol=1e-9, atol=1e-12)
    for name, g in wanted.items():
        torch.testing.assert_close(found.source_gradient[name], g, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(found.target_gradient[name], direction[name], rtol=1e-9, atol=1e-12)
    for name, buffer in oracle.named_buffers():  # every part's forward pass counts once
        torch.testing.assert_close(dict(model.named_buffers())[name], buffer, rtol=1e-12, atol=1e-12)


def train(reducer: Reducer | None, **changes: Any) -> Any:
    compute = soseleto.Compute(reducer=reducer, micro_batch_size=changes.pop("micro_batch_size", None))
    given = {"epochs": 1, "batch_size": 8, "target_batch_size": 4, "device": "cpu", "compute": compute}
    given["method"] = soseleto.Soseleto()
    given |= {} if "optimizer" in changes else {"optimizer": partial(sgd, lr=0.1, momentum=0.0)}
    return soseleto.fit(net(), points(changes.pop("n", 8), 0), points(4, 1), **{**given, **changes})


def state(reducer: Reducer | None, **changes: Any) -> dict[str, Any]:
    result = train(reducer, **changes)
    return {**result.model.state_dict(), "messages": result.messages, "scores": result.scores}


def select(reducer: Reducer) -> dict[str, Tensor]:
    model = net()
    selection = soseleto.Selection(model, n_source=8, loss=cross_entropy, reducer=reducer)
    x, y = (t[reducer.rank :: 2] for t in points(8, 0))
    selection.backward((x, y), (x.flip(1), y), index=torch.arange(8)[reducer.rank :: 2])
    return dict(model.named_buffers())


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def everything(reducer: Reducer) -> dict[str, Any]:
    return {"step": state(reducer), "selection": select(reducer)}


@pytest.fixture(scope="module")
def answers() -> list[Any]:
    found = together(2, everything)
    assert all(isinstance(answer, dict) for answer in found), found
    return found


def test_ranks_hold_the_same_model(answers: list[Any]) -> None:
    assert PER_PART in answers[0]["step"]["messages"]
    assert float(answers[0]["selection"]["1.running_mean"].norm()) > 0
    for training, found in answers[0].items():
        for name, value in found.items():
            assert name == "messages" or torch.equal(value, answers[1][training][name]), f"{training}, {name}"


def test_two_ranks_take_one_step_as_their_parts_do(answers: list[Any]) -> None:
    found, ranks = answers[0]["step"], [net(), net()]
    x, y = points(8, 0)
    tx, ty = points(4, 1)
    order = TargetCycle(4, 4, 0)(0)
    wanted = {name: p.detach().clone() for name, p in trainable(ranks[0]).items()}
    for rank, one in enumerate(ranks):
        F.cross_entropy(one(tx[order[rank::2]]), ty[order[rank::2]])
        losses = F.cross_entropy(one(x[rank::2]), y[rank::2], reduction="sum") / 8
        for name, g in gradient(losses, trainable(one)).items():
            wanted[name] -= 0.1 * g
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=1e-6, atol=1e-7)
    for name, buffer in ranks[0].named_buffers():
        mean = (buffer + dict(ranks[1].named_buffers())[name]) / 2
        torch.testing.assert_close(found[name].double(), mean.double(), rtol=1e-6, atol=1e-8)


def test_a_resumed_run_of_micro_batches_is_bit_identical(tmp_path: Path) -> None:
    given: dict[str, Any] = {"micro_batch_size": 5, "epochs": 4, "batch_size": 12, "n": 24}
    whole = state(None, **given, optimizer=ask_at(0, terminate))
    with pytest.raises(soseleto.errors.Interrupted):
        state(None, **given, optimizer=ask_at(5, terminate), out=tmp_path)
    found = state(None, **given, optimizer=ask_at(0, terminate), out=tmp_path)
    for name, value in whole.items():
        assert name == "messages" or torch.equal(value, found[name]), name


class Synchronised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x)


@pytest.mark.parametrize(
    ("model", "compute", "words"),
    [
        (Synchronised(), {"micro_batch_size": 4}, "SyncBatchNorm 'norm' is not supported"),
        (net(), {"micro_batch_size": 1}, "has a single example, for which BatchNorm has no statistics"),
    ],
)
def test_what_has_no_statistics_per_part_is_refused(model: nn.Module, compute: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        soseleto.fit(
            model, points(8, 0), points(4, 1), epochs=1, batch_size=8, lr=0.1, device="cpu",
            compute=soseleto.Compute(**compute),
        )  # fmt: skip
