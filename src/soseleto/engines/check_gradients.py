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

REPEATS = 3


@dataclass(frozen=True)
class EngineReport:
    """One engine on one batch.

    engine: its name; for ``auto`` the engine that it takes.
    error: ‖q − q_loop‖/‖q_loop‖; None if the engine declines the model.
    ratio: the time of alignments and weighted gradient over that of one forward and backward pass of the same batch.
    message: why it declines, with the module's name; for ``auto`` why it takes no faster engine.
    """

    engine: str
    error: float | None
    ratio: float | None
    message: str = ""


def check_gradients(
    model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, *, engines: Sequence[str] = FASTEST_FIRST
) -> list[EngineReport]:
    """Each engine's alignments of ``batch`` compared with those of ``loop``, along the batch's own mean gradient.

    Random layers draw the same numbers in every engine. The model is not changed. ``engines`` may also contain
    ``"auto"``.
    """

    def ordinary() -> dict[str, Tensor]:
        return gradient(as_loss_vector(per_example_loss(model, batch)).mean(), trainable(model))

    def report(name: str) -> EngineReport:
        engine = make_engine(name)
        try:
            q, seconds = _measured(model, lambda: engine.source_pass(step).alignment, 1 if name == "loop" else REPEATS)
        except EngineError as declined:
            return EngineReport(name, None, None, str(declined))
        error = float((q.double() - reference).norm() / reference.norm().clamp_min(1e-300))
        return EngineReport(engine.name, error, seconds / ordinary_seconds, "; ".join(getattr(engine, "messages", ())))

    direction, ordinary_seconds = _measured(model, ordinary, REPEATS)
    by_loop, _ = _measured(model, lambda: make_engine("loop")(model, per_example_loss, batch, direction)[1], 1)
    reference = by_loop.double()
    step = SourceStep(model, per_example_loss, batch, direction, torch.full_like(reference, 1.0 / len(reference)))
    return [report(name) for name in engines]


def _measured(model: nn.Module, run: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The result and the shortest time of ``repeats`` runs (after a warm-up run if there are several)."""
    times, result = [], None
    for _ in range(repeats + (repeats > 1)):
        with unchanged(model):
            torch.manual_seed(0)  # the same dropout for every engine; ``unchanged`` restores the user's state
            start = time.perf_counter()
            result = run()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
    return result, min(times[1:] or times)
