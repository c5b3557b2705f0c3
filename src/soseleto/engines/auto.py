"""Engines by name; those that follow the whole model; and the fastest exact one, chosen by trial and logged.

``forward``, ``double_backward`` and ``loop`` are functions that return the batch's losses, still attached to their
graph, and the alignments. Each is used once it has been proved for the model at hand (``proof``), and proved again for
every new kind of graph that the model builds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from soseleto.engines.autograd import BaseEngine, Linearize, double_backward, gradient, loop
from soseleto.engines.forward import forward
from soseleto.engines.interface import (
    Direction,
    Engine,
    Passes,
    PerExampleLoss,
    SourcePass,
    SourceStep,
    Step,
    ToDirection,
    named_in,
    refuse_sharded,
    trainable,
)
from soseleto.engines.layerwise import LayerwiseEngine
from soseleto.engines.model_state import Restore, is_recording, settings, sharded_modules, uncompiled
from soseleto.engines.proof import Equation, Inexact, Kinds, ProofDue, Recorded, Schedule, coefficients, inexact, prove
from soseleto.errors import EngineError, UsageError, did_you_mean, first_line

logger = logging.getLogger("soseleto")
Result = TypeVar("Result")
ADVICE = "use engine='loop', or engine='auto', which picks the fastest exact one"
_ADVICE = re.compile(r"[;:] use engine=.*$")  # at the end of an engine's error


class ProvedEngine(BaseEngine):
    """The engine of one function; with ``proofs=False`` it is trusted, as ``loop`` is."""

    def __init__(self, name: str, linearize: Linearize, *, proofs: bool = True) -> None:
        self.name = name
        self.schedule = Schedule() if proofs else None
        self._function = linearize
        self._kinds: WeakKeyDictionary[nn.Module, Kinds] = WeakKeyDictionary()

    def source_pass(self, step: SourceStep) -> SourcePass:
        losses, alignment = self._linearize(step.model, step.loss, step.batch, step.direction)
        c = step.coefficients
        found = {} if c is None else gradient(losses, trainable(step.model), c.to(losses.dtype))
        return SourcePass(losses.detach(), alignment, found)

    def _linearize(
        self, model: nn.Module, loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        """Losses and alignments; a proof comes first if it is due or the graph is of a new kind."""
        refuse_sharded(bool(sharded_modules(model)), f"the {self.name} engine")
        named_in(direction, model)
        if self.schedule is None:
            return self._run(model, loss, batch, direction)[:2]
        kinds = self._kinds.setdefault(model, Kinds())
        if self.schedule.count() or not kinds:
            self._prove(kinds, model, loss, batch, direction)
        restore = Restore(model)
        losses, alignment, seen = self._run(model, loss, batch, direction)
        if kinds.is_new(*_kind(seen, losses, direction)):
            del losses, alignment
            restore()
            self._prove(kinds, model, loss, batch, direction)
            losses, alignment, _ = self._run(model, loss, batch, direction)
        elif self.schedule.needs_check:
            self.schedule.begin()
            c = coefficients(losses, examples=0, seed=self.schedule.calls)[0]
            g = gradient(losses, trainable(model), c.to(losses.dtype), retain_graph=True)
            equation = Equation.of(c, g, direction)
            with inexact(self.name, ADVICE):
                if equation.is_finite:  # guards report losses that are not finite
                    equation.require(alignment, seen.tolerance(losses))
            self.schedule.checked()
        return losses, alignment

    def _prove(self, kinds: Kinds, model: nn.Module, loss: PerExampleLoss, batch: Any, names: Iterable[str]) -> None:
        assert self.schedule is not None
        self.schedule.begin()
        kind: list[Any] = []  # of the graph that is built last

        def align(along: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            try:
                losses, alignment, seen = self._run(model, loss, batch, along)
            except (EngineError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, TypeError, AttributeError) as error:  # an ordinary pass has just succeeded
                raise Inexact(first_line(error)) from error
            if self.name == "forward" and Tensor.register_hook in seen.functions:
                raise Inexact("a hook acts on the gradient of an activation, which is not a part of forward mode")
            kind[:] = _kind(seen, losses, along)
            return losses, alignment

        with inexact(self.name, ADVICE):
            unproved = prove(align, model, loss, batch, names, seed=self.schedule.calls, first=not kinds)
        is_new = bool(kind) and kinds.is_new(*kind)
        if kind:
            kinds.add(*kind)
        self.schedule.proved(unproved, is_new=is_new)

    def _run(
        self, model: nn.Module, loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor, Recorded]:
        """Losses, alignments, and what the model called."""
        recorded = Recorded()

        def recording(model: nn.Module, batch: Any) -> Tensor:
            with recorded:
                return loss(model, batch)

        with torch.enable_grad(), uncompiled(model):
            return *self._function(model, recording, batch, direction), recorded


def _kind(seen: Recorded, losses: Tensor, direction: Direction) -> tuple[Any, ...]:
    return seen.functions, len(losses) > 1, tuple(direction)


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


class AutoEngine(BaseEngine):
    """Tries the engines from the fastest on, and keeps the first that is exact.

    names: the engines to choose from, in this order; with one name it keeps that engine's proofs for each model.

    The choice is kept for the model and the loss's code while the model's modules, their training flags and the
    trainable parameters stay the same. When one of these changes, the engines are tried again. An engine that fails a
    later proof is replaced by the next one from that step on. ``name`` is the engine used last, ``messages`` says which
    slower engines were taken and why.
    """

    def __init__(self, names: Sequence[str] = FASTEST_FIRST) -> None:
        self._names = names
        self._choices: WeakKeyDictionary[nn.Module, dict[Hashable, _Choice]] = WeakKeyDictionary()
        self.schedule: Schedule | None = None  # of the engine used last
        self.name = "auto"
        self.messages: list[str] = []

    def passes(self, step: Step) -> Passes:
        restore = Restore(step.model)
        once = replace(step, to_direction=_once(step.to_direction), restore=restore)
        return self._first_exact(step.model, step.losses.source, lambda engine: engine.passes(once), restore)

    def source_pass(self, step: SourceStep) -> SourcePass:
        return self._first_exact(step.model, step.loss, lambda engine: engine.source_pass(step), Restore(step.model))

    def _first_exact(
        self, model: nn.Module, loss: PerExampleLoss, run: Callable[[Engine], Result], restore: Callable[[], None]
    ) -> Result:
        """``run`` by the engine for this model and loss, or by the first slower one that does not fail."""
        choices = self._choices.setdefault(model, {})
        condition = settings(model), getattr(loss, "__code__", type(loss))
        if condition not in choices:
            choices[condition] = _Choice(make_engine(self._names[0]))
        choice = choices[condition]
        choice.calls += 1
        reasons: list[str] = []
        while True:
            engine = choice.engine
            try:
                result = run(engine)
            except Exception as error:  # a proof may fail at any step, when the model builds another graph
                if isinstance(error, EngineError) or not is_recording():  # whose failure would hide the error
                    restore()
                following = self._names[self._names.index(engine.name) + 1 :]
                if _is_final(error, is_last=not following):
                    raise
                failed = f"the {engine.name} engine failed ({type(error).__name__}: {first_line(error)})"
                reasons.append(str(error) if isinstance(error, EngineError) else failed)
                if not following:
                    several = "no engine can treat this model; " + " ".join(reasons)
                    raise EngineError(several if len(set(reasons)) > 1 else reasons[0]) from error
                choice.engine = make_engine(following[0])
                continue
            self.name, self.schedule = engine.name, getattr(engine, "schedule", None)
            if reasons or choice.calls == 1:
                self._log(engine.name, reasons, is_change=choice.calls > 1)
            return result

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


def _once(to_direction: ToDirection) -> ToDirection:
    """``to_direction``, called once for each parameter, also if an engine fails after it."""
    known: dict[str, Tensor | None] = {}  # None: not a part of the direction

    def of(found: dict[str, Tensor]) -> dict[str, Tensor]:
        if new := {name: g for name, g in found.items() if name not in known}:
            known.update({**dict.fromkeys(new), **to_direction(new)})
        return {name: g for name in found if (g := known[name]) is not None}

    return of
