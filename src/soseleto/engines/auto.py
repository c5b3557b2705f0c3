"""The fastest exact engine for the model at hand, found by trying, and said aloud."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from soseleto.engines.autograd import AutogradEngine, double_backward, loop
from soseleto.engines.contract import (
    Coefficients,
    Direction,
    Engine,
    Losses,
    Passes,
    PerExampleLoss,
    SourcePass,
    ToDirection,
)
from soseleto.engines.forward import Forward
from soseleto.engines.layerwise.engine import LayerwiseEngine
from soseleto.engines.unchanged import unchanged
from soseleto.errors import EngineError, UsageError, did_you_mean

logger = logging.getLogger("soseleto")

MAKERS: dict[str, Callable[[], Engine]] = {
    "auto": lambda: AutoEngine(),
    "layerwise": LayerwiseEngine,
    "forward": lambda: AutogradEngine("forward", Forward()),
    "double_backward": lambda: AutogradEngine("double_backward", double_backward),
    "loop": lambda: AutogradEngine("loop", loop),
}
FASTEST_FIRST = ("layerwise", "forward", "double_backward", "loop")


def make_engine(engine: str | Engine) -> Engine:
    """An engine by its name; an engine is returned as it is."""
    if not isinstance(engine, str):
        return engine
    if engine not in MAKERS:
        raise UsageError(f"unknown engine {engine!r}{did_you_mean(engine, MAKERS)}: choose one of {', '.join(MAKERS)}.")
    return MAKERS[engine]()


class AutoEngine:
    """Tries the engines from the fastest on, once for each model, and stays with the first that is exact."""

    def __init__(self) -> None:
        self._chosen: WeakKeyDictionary[nn.Module, Engine] = WeakKeyDictionary()
        self.name = "auto"

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        engine = self.choose(model, lambda candidate: candidate(model, per_example_loss, batch, direction))
        return engine(model, per_example_loss, batch, direction)

    def passes(
        self,
        model: nn.Module,
        losses: Losses,
        source: Any,
        target: Any,
        *,
        to_direction: ToDirection,
        coefficients: Coefficients,
    ) -> Passes:
        def trial(candidate: Engine) -> object:
            neutral = torch.ones_like if callable(coefficients) else coefficients
            return candidate.passes(
                model, losses, source, target, to_direction=lambda found: found, coefficients=neutral
            )

        engine = self.choose(model, trial)
        return engine.passes(model, losses, source, target, to_direction=to_direction, coefficients=coefficients)

    def source_pass(
        self,
        model: nn.Module,
        per_example_loss: PerExampleLoss,
        batch: Any,
        direction: Direction,
        coefficients: Coefficients,
    ) -> SourcePass:
        neutral = torch.ones_like if callable(coefficients) else coefficients
        engine = self.choose(
            model, lambda candidate: candidate.source_pass(model, per_example_loss, batch, direction, neutral)
        )
        return engine.source_pass(model, per_example_loss, batch, direction, coefficients)

    def choose(self, model: nn.Module, trial: Callable[[Engine], object]) -> Engine:
        """The engine for this model; trials leave buffers and random states as they were."""
        if model in self._chosen:
            return self._chosen[model]
        reasons = []
        for name in FASTEST_FIRST:
            candidate = make_engine(name)
            try:
                with unchanged(model):
                    trial(candidate)
            except EngineError as error:
                reasons.append(str(error))
                continue
            self._chosen[model] = candidate
            self.name = name
            _say(name, reasons)
            return candidate
        raise EngineError("no engine can treat this model; " + " ".join(reasons))


def _say(name: str, reasons: list[str]) -> None:
    if reasons:
        logger.warning("alignments by the slower %s engine, because %s", name, reasons[0])
    else:
        logger.info("alignments by the %s engine", name)
