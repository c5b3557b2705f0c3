"""Compare the engines on a user's model and batch: errors relative to ``loop``, and times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.engines.auto import FASTEST_FIRST, make_engine
from soseleto.engines.autograd import gradient
from soseleto.engines.contract import Engine, PerExampleLoss, as_loss_vector, trainable
from soseleto.engines.unchanged import unchanged
from soseleto.errors import EngineError


@dataclass(frozen=True)
class EngineReport:
    """One engine on one batch: ``error`` is ‖q − q_loop‖/‖q_loop‖, ``ratio`` its time over that of an ordinary step."""

    engine: str
    error: float | None
    seconds: float | None
    ratio: float | None
    message: str = ""


def check_gradients(
    model: nn.Module,
    per_example_loss: PerExampleLoss,
    batch: Any,
    *,
    engines: Sequence[str] = FASTEST_FIRST,
    repeats: int = 3,
) -> list[EngineReport]:
    """Each engine's alignments of ``batch`` compared with those of ``loop``, along the batch's own mean gradient.

    Times are compared with one forward and backward pass of the same batch. Random layers draw the same numbers in
    every engine. The model is not changed.
    """
    with unchanged(model):
        direction = gradient(as_loss_vector(per_example_loss(model, batch)).mean(), trainable(model))
    reference, _ = _timed(model, lambda: make_engine("loop")(model, per_example_loss, batch, direction)[1], 1)
    ordinary = _ordinary_seconds(model, per_example_loss, batch, repeats)
    reports = []
    for name in engines:
        engine = make_engine(name)
        try:
            q, seconds = _timed(model, _call(engine, model, per_example_loss, batch, direction), repeats)
        except EngineError as error:
            reports.append(EngineReport(name, None, None, None, str(error)))
            continue
        difference = (q.double() - reference.double()).norm() / reference.double().norm().clamp_min(1e-300)
        reports.append(EngineReport(name, float(difference), seconds, seconds / ordinary))
    return reports


def _call(engine: Engine, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Any) -> Any:
    return lambda: engine(model, per_example_loss, batch, direction)[1]


def _ordinary_seconds(model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, repeats: int) -> float:
    def step() -> Tensor:
        losses = per_example_loss(model, batch)
        gradient(losses.mean(), trainable(model))
        return losses

    return _timed(model, step, repeats)[1]


def _timed(model: nn.Module, run: Any, repeats: int) -> tuple[Tensor, float]:
    """The result, and the shortest time of ``repeats`` runs (after one warm-up run if there is more than one)."""
    times = []
    result = None
    for _ in range(repeats + (repeats > 1)):
        with unchanged(model):
            torch.manual_seed(0)  # the same dropout for every engine; ``unchanged`` restores the user's state
            start = time.perf_counter()
            result = run()
            if result.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    assert result is not None
    return result, min(times[1:] or times)
