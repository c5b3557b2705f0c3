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
from soseleto.engines.interface import PerExampleLoss, SourceStep, as_loss_vector, trainable
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

    def ordinary() -> Tensor:
        losses = per_example_loss(model, batch)
        gradient(losses.mean(), trainable(model))
        return losses

    _, seconds = _measure(model, ordinary, repeats)
    return [_report(name, step, reference, seconds, repeats) for name in engines]


def _report(name: str, step: SourceStep, reference: Tensor, ordinary: float, repeats: int) -> EngineReport:
    engine = make_engine(name)
    try:
        q, seconds = _measure(step.model, lambda: engine.source_pass(step).alignment, 1 if name == "loop" else repeats)
    except EngineError as declined:
        return EngineReport(name, None, None, None, str(declined))
    error = float((q.double() - reference).norm() / reference.norm().clamp_min(1e-300))
    return EngineReport(engine.name, error, seconds, seconds / ordinary, "; ".join(getattr(engine, "messages", ())))


def _measure(model: nn.Module, run: Callable[[], Tensor], repeats: int) -> tuple[Tensor, float]:
    """The result and the shortest time of ``repeats`` runs (after a warm-up run if there are several)."""
    times, result = [], torch.empty(0)
    for _ in range(repeats + (repeats > 1)):
        with unchanged(model):
            torch.manual_seed(0)  # the same dropout for every engine; ``unchanged`` restores the user's state
            start = time.perf_counter()
            result = run()
            if result.is_cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return result, min(times[1:] or times)
