"""The fastest exact engine for a model, chosen by trial and logged."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from soseleto.engines.autograd import double_backward, loop
from soseleto.engines.contract import Direction, Engine, Passes, PerExampleLoss, SourcePass, SourceStep, Step
from soseleto.engines.forward import forward
from soseleto.engines.layerwise.engine import LayerwiseEngine
from soseleto.engines.proof import ProofDue, Schedule
from soseleto.engines.proved import PerModel, ProvedEngine
from soseleto.engines.unchanged import is_recording, unchanged_on_error
from soseleto.errors import EngineError, UsageError, did_you_mean, first_line

logger = logging.getLogger("soseleto")
Found = TypeVar("Found")
_ADVICE = re.compile(r"[;:] use engine=.*$")  # at the end of an engine's error

MAKERS: dict[str, Callable[[], Engine]] = {
    "auto": lambda: AutoEngine(),
    "layerwise": LayerwiseEngine,
    "forward": lambda: ProvedEngine("forward", forward),
    "double_backward": lambda: ProvedEngine("double_backward", double_backward),
    "loop": lambda: ProvedEngine("loop", loop, proofs=False),
}
FASTEST_FIRST = ("layerwise", "forward", "double_backward", "loop")


def make_engine(engine: str | Engine) -> Engine:
    """A new engine by its name; an engine object is returned unchanged."""
    if not isinstance(engine, str):
        return engine
    if engine not in MAKERS:
        raise UsageError(f"unknown engine {engine!r}{did_you_mean(engine, MAKERS)}: choose one of {', '.join(MAKERS)}.")
    return MAKERS[engine]()


class AutoEngine:
    """Tries the engines from the fastest on, and keeps the first that is exact.

    names: the engines to choose from, in this order; with one name it keeps that engine's proofs for each model.

    The choice is kept for the model and the loss (both referenced weakly) while the model's modules, their training
    flags and the trainable parameters stay the same. When one of these changes, the engines are tried again. An engine
    that fails a later proof is replaced by the next one from that step on. ``name`` is the engine used last,
    ``messages`` says which slower engines were taken and why.
    """

    def __init__(self, names: Sequence[str] = FASTEST_FIRST) -> None:
        self._names = names
        self._choices: PerModel[_Choice] = PerModel()
        self._schedule: Schedule | None = None  # of the engine used last
        self.name = "auto"
        self.messages: list[str] = []

    @property
    def schedule(self) -> Schedule | None:
        return self._schedule

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        return self._first_exact(
            model, per_example_loss, lambda engine: engine(model, per_example_loss, batch, direction)
        )

    def passes(self, step: Step) -> Passes:
        once = replace(step, to_direction=_Once(step.to_direction))
        return self._first_exact(step.model, step.losses.source, lambda engine: engine.passes(once))

    def source_pass(self, step: SourceStep) -> SourcePass:
        return self._first_exact(step.model, step.loss, lambda engine: engine.source_pass(step))

    def _first_exact(self, model: nn.Module, loss: PerExampleLoss, run: Callable[[Engine], Found]) -> Found:
        """``run`` by the engine for this model and loss, or by the first slower one that does not fail."""
        choice = self._choices.get(model, loss)
        if choice is None:
            choice = _Choice(make_engine(self._names[0]))
            self._choices.keep(model, loss, choice)
        choice.calls += 1
        reasons: list[str] = []
        while True:
            engine = choice.engine
            try:
                with unchanged_on_error(model):  # a proof may fail at any step, when the model builds another graph
                    found = run(engine)
            except Exception as error:
                following = self._names[self._names.index(engine.name) + 1 :]
                if _is_final(error, is_last=not following):
                    raise
                reasons.append(str(error) if isinstance(error, EngineError) else _unexpected(engine, error))
                if not following:
                    raise _none_left(reasons) from error
                choice.engine = make_engine(following[0])
                continue
            self.name, self._schedule = engine.name, getattr(engine, "schedule", None)
            if reasons or choice.calls == 1:
                self._log(engine.name, reasons, is_change=choice.calls > 1)
            return found

    def _log(self, name: str, reasons: list[str], *, is_change: bool) -> None:
        if not reasons:
            logger.info("alignments by the %s engine", name)
            return
        why = "; ".join(_ADVICE.sub("", reason) for reason in reasons)
        message = f"alignments by the slower {name} engine, because {why}"
        self.messages.append(message)
        logger.warning("from now on %s" if is_change else "%s", message)


@dataclass(eq=False)
class _Choice:
    """The engine for a model and a loss, and how often it was called for."""

    engine: Engine
    calls: int = 0


def _is_final(error: Exception, *, is_last: bool) -> bool:
    """Whether another engine would not help: a mistake of the user's, no memory, or an error of the model itself."""
    if isinstance(error, EngineError):
        return False
    no_memory = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in str(error)
    return is_last or no_memory or isinstance(error, (UsageError, ProofDue)) or is_recording()


def _unexpected(engine: Engine, error: Exception) -> str:
    return f"the {engine.name} engine failed ({type(error).__name__}: {first_line(error)})"


def _none_left(reasons: list[str]) -> EngineError:
    return EngineError(reasons[0] if len(set(reasons)) == 1 else "no engine can treat this model; " + " ".join(reasons))


class _Once:
    """A ``to_direction`` that is called once for each parameter, also if an engine fails after it."""

    def __init__(self, to_direction: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        self._to_direction = to_direction
        self._known: set[str] = set()
        self._found: dict[str, Tensor] = {}

    def __call__(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        new = {name: g for name, g in found.items() if name not in self._known}
        known = {name: self._found[name] for name in found if name in self._found}
        if not new:
            return known
        direction = self._to_direction(new)
        self._known |= new.keys()
        self._found |= direction
        return {**known, **direction}
