"""Compare the engines on a user's model and batch: errors relative to ``loop``, and times."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.engines.auto import FASTEST_FIRST, make_engine
from soseleto.engines.autograd import gradient
from soseleto.engines.interface import Engine, PerExampleLoss, SourceStep, as_loss_vector, trainable
from soseleto.engines.model_state import unchanged
from soseleto.errors import EngineError


@dataclass(frozen=True)
class EngineReport:
    """One engine on one batch.

    engine: its name; for ``auto`` the engine that it takes.
    error: ‖q − q_loop‖/‖q_loop‖; None if the engine declines the model.
    seconds, ratio: the time of alignments and weighted gradient, also divided by that of forward and backward alone.
    message: why it declines, with the module's name; for ``auto`` why it takes no faster engine.
    """

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

    Times are those of the source's part of a training step, alignments and weighted gradient, compared with one forward
    and backward pass of the same batch. Random layers draw the same numbers in every engine. The model is not changed.
    ``engines`` may also contain ``"auto"``.
    """
    with unchanged(model):
        direction = gradient(as_loss_vector(per_example_loss(model, batch)).mean(), trainable(model))
    with unchanged(model):
        torch.manual_seed(0)
        reference = make_engine("loop")(model, per_example_loss, batch, direction)[1].double()
    c = torch.full_like(reference, 1.0 / len(reference))
    step = SourceStep(model, per_example_loss, batch, direction, c)
    ordinary = _measure(step, lambda: _ordinary(step), repeats)
    return [_report(name, step, reference, ordinary, repeats) for name in engines]


def _ordinary(step: SourceStep) -> Tensor:
    losses = step.loss(step.model, step.batch)
    gradient(losses.mean(), trainable(step.model))
    return losses


@dataclass(frozen=True)
class _Measured:
    result: Tensor
    seconds: float


def _report(name: str, step: SourceStep, reference: Tensor, ordinary: _Measured, repeats: int) -> EngineReport:
    engine = make_engine(name)
    try:
        found = _measure(step, _aligned(engine, step), 1 if name == "loop" else repeats)
    except EngineError as error:
        return EngineReport(name, None, None, None, str(error))
    difference = (found.result.double() - reference).norm() / reference.norm().clamp_min(1e-300)
    return EngineReport(
        engine.name,
        float(difference),
        found.seconds,
        found.seconds / ordinary.seconds,
        "; ".join(getattr(engine, "messages", ())),
    )


def _aligned(engine: Engine, step: SourceStep) -> Callable[[], Tensor]:
    return lambda: engine.source_pass(step).alignment


def _measure(step: SourceStep, run: Callable[[], Tensor], repeats: int) -> _Measured:
    """The result and the shortest time of ``repeats`` runs (after a warm-up run if there are several)."""
    times = []
    result = None
    for _ in range(repeats + (repeats > 1)):
        with unchanged(step.model):
            torch.manual_seed(0)  # the same dropout for every engine; ``unchanged`` restores the user's state
            start = time.perf_counter()
            result = run()
            if result.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    assert result is not None
    return _Measured(result, min(times[1:] or times))
