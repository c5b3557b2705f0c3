"""Engines by name; those that follow the whole model; and the fastest exact one, chosen by trial and logged.

``forward``, ``double_backward`` and ``loop`` are functions that return the batch's losses, still attached to their
graph, and the alignments. Each is used once it has been proved for the model at hand (``proof``), and proved again for
every new kind of graph that the model builds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from soseleto.engines.autograd import Linearize, double_backward, gradient, loop, target_first
from soseleto.engines.forward import CannotFollow, forward
from soseleto.engines.interface import (
    Direction,
    Engine,
    Passes,
    PerExampleLoss,
    SourcePass,
    SourceStep,
    Step,
    named_in,
    no_reentrant_checkpoint,
    refuse_sharded,
    trainable,
)
from soseleto.engines.layerwise import LayerwiseEngine
from soseleto.engines.model_state import PerModel, Restore, is_recording, sharded_modules, uncompiled
from soseleto.engines.proof import Equation, Inexact, Kinds, ProofDue, Recorded, Schedule, coefficients, inexact, prove
from soseleto.errors import EngineError, UsageError, did_you_mean, first_line

logger = logging.getLogger("soseleto")
Result = TypeVar("Result")
ADVICE = "use engine='loop', or engine='auto', which picks the fastest exact one"
_ADVICE = re.compile(r"[;:] use engine=.*$")  # at the end of an engine's error


class ProvedEngine:
    """The engine of one function; with ``proofs=False`` it is trusted, as ``loop`` is."""

    def __init__(self, name: str, linearize: Linearize, *, proofs: bool = True) -> None:
        self.name = name
        self.schedule = Schedule() if proofs else None
        self._function = linearize
        self._proofs: PerModel[Kinds] = PerModel()

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        named_in(direction, model)
        losses, alignment = self._linearize(model, per_example_loss, batch, direction)
        return losses.detach(), alignment

    def passes(self, step: Step) -> Passes:
        return target_first(step, self.source_pass)

    def source_pass(self, step: SourceStep) -> SourcePass:
        named_in(step.direction, step.model)
        losses, alignment = self._linearize(step.model, step.loss, step.batch, step.direction)
        c = step.coefficients(alignment) if callable(step.coefficients) else step.coefficients
        return SourcePass(losses.detach(), alignment, gradient(losses, trainable(step.model), c.to(losses.dtype)))

    def _linearize(
        self, model: nn.Module, loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        """Losses and alignments; a proof comes first if it is due or the graph is of a new kind."""
        refuse_sharded(bool(sharded_modules(model)), f"the {self.name} engine")
        if self.schedule is None:
            return self._run(model, loss, batch, direction)[:2]
        condition = tuple(direction)
        proofs = self._proofs.get(model, loss, condition)
        if proofs is None:
            proofs = Kinds()
            self._proofs.keep(model, loss, proofs, condition)
        if self.schedule.count() or not proofs:
            self._prove(proofs, model, loss, batch, direction)
        restore = Restore(model)
        losses, alignment, seen = self._run(model, loss, batch, direction)
        if proofs.is_new(seen.functions, len(losses) > 1):
            del losses, alignment
            restore()
            self._prove(proofs, model, loss, batch, direction)
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

    def _prove(self, proofs: Kinds, model: nn.Module, loss: PerExampleLoss, batch: Any, names: Iterable[str]) -> None:
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
            kind[:] = seen.functions, len(losses) > 1
            return losses, alignment

        seed, first = self.schedule.calls, not proofs
        with inexact(self.name, ADVICE):
            unproved = prove(align, model, loss, batch, names, seed=seed, first=first)
        is_new = bool(kind) and proofs.is_new(*kind)
        if kind:
            proofs.add(*kind)
        self.schedule.proved(unproved, is_new=is_new)

    def _run(
        self, model: nn.Module, loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor, Recorded]:
        """Losses, alignments, and what the model called."""
        recorded = Recorded()

        def recording(model: nn.Module, batch: Any) -> Tensor:
            with recorded:
                return loss(model, batch)

        try:
            with torch.enable_grad(), uncompiled(model):
                return *self._function(model, recording, batch, direction), recorded
        except RuntimeError as error:
            if reentrant := no_reentrant_checkpoint(error):
                raise reentrant from error
            if self.name != "loop" and (isinstance(error, CannotFollow) or _no_rule(error)):
                raise EngineError(
                    f"the {self.name} engine has no rule for an operator of this model ({first_line(error)}): "
                    f"use engine={'double_backward' if self.name == 'forward' else 'loop'!r}."
                ) from error
            raise


def _no_rule(error: RuntimeError) -> bool:
    """Whether PyTorch's error says that an operator lacks a derivative."""
    signs = ("forward AD", "is not implemented", "not differentiable twice", "does not support", "once_diff")
    return isinstance(error, NotImplementedError) or any(sign in str(error) for sign in signs)


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
        self.schedule: Schedule | None = None  # of the engine used last
        self.name = "auto"
        self.messages: list[str] = []

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

    def _first_exact(self, model: nn.Module, loss: PerExampleLoss, run: Callable[[Engine], Result]) -> Result:
        """``run`` by the engine for this model and loss, or by the first slower one that does not fail."""
        choice = self._choices.get(model, loss)
        if choice is None:
            choice = _Choice(make_engine(self._names[0]))
            self._choices.keep(model, loss, choice)
        choice.calls += 1
        reasons: list[str] = []
        while True:
            engine, restore = choice.engine, Restore(model)
            try:
                result = run(engine)
            except Exception as error:  # a proof may fail at any step, when the model builds another graph
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
