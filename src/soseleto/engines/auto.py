"""The fastest exact engine for a model, chosen by trial and logged."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn

from soseleto.engines.autograd import AutogradEngine, double_backward, loop
from soseleto.engines.contract import (
    Coefficients,
    Direction,
    Engine,
    Passes,
    PerExampleLoss,
    SourcePass,
    SourceStep,
    Step,
)
from soseleto.engines.forward import Forward
from soseleto.engines.layerwise.engine import LayerwiseEngine
from soseleto.engines.tangents import CannotFollow
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
    """A new engine by its name; an engine object is returned unchanged."""
    if not isinstance(engine, str):
        return engine
    if engine not in MAKERS:
        raise UsageError(f"unknown engine {engine!r}{did_you_mean(engine, MAKERS)}: choose one of {', '.join(MAKERS)}.")
    return MAKERS[engine]()


class AutoEngine:
    """Tries the engines from the fastest on, and keeps the first that is exact.

    The choice is kept for the model and the loss (both referenced weakly) while the model's modules, their training
    flags and the trainable parameters stay the same. When one of these changes, the engines are tried again.
    ``name`` is the engine used last.
    """

    def __init__(self) -> None:
        self._choices: WeakKeyDictionary[nn.Module, list[_Choice]] = WeakKeyDictionary()
        self.name = "auto"

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        known = self._known(model, per_example_loss)
        if known is not None:
            try:
                return known.engine(model, per_example_loss, batch, direction)
            except (EngineError, CannotFollow):  # the batch takes another path through the model than the one tried
                self._choices[model].remove(known)
        engine = self.choose(
            model, per_example_loss, lambda candidate: candidate(model, per_example_loss, batch, direction)
        )
        return engine(model, per_example_loss, batch, direction)

    def passes(self, step: Step) -> Passes:
        def trial(candidate: Engine) -> object:
            return candidate.passes(
                replace(step, to_direction=lambda found: found, coefficients=_without_state(step.coefficients))
            )

        return self.choose(step.model, step.losses.source, trial).passes(step)

    def source_pass(self, step: SourceStep) -> SourcePass:
        def trial(candidate: Engine) -> object:
            return candidate.source_pass(replace(step, coefficients=_without_state(step.coefficients)))

        return self.choose(step.model, step.loss, trial).source_pass(step)

    def choose(self, model: nn.Module, loss: PerExampleLoss, trial: Callable[[Engine], object]) -> Engine:
        """The engine for this model and loss; trials restore the model's buffers and the random states."""
        known = self._known(model, loss)
        if known is not None:
            return known.engine
        reasons = []
        for name in FASTEST_FIRST:
            candidate = make_engine(name)
            try:
                with unchanged(model):
                    trial(candidate)
            except EngineError as error:
                reasons.append(str(error))
                continue
            self._keep(model, _Choice(_settings(model), _weak(loss), candidate))
            self.name = name
            _log_choice(name, reasons)
            return candidate
        raise EngineError("no engine can treat this model; " + " ".join(reasons))

    def _known(self, model: nn.Module, loss: PerExampleLoss) -> _Choice | None:
        choices = self._choices.get(model)
        if not choices:
            return None
        settings = _settings(model)
        for choice in choices:
            if choice.settings == settings and _is_same(choice.loss(), loss):
                self.name = choice.engine.name
                return choice
        return None

    def _keep(self, model: nn.Module, choice: _Choice) -> None:
        """Add a choice, and drop those whose loss no longer exists."""
        alive = [old for old in self._choices.get(model, []) if old.loss() is not None]
        self._choices[model] = [*alive, choice]


@dataclass(frozen=True, eq=False)
class _Choice:
    """An engine, and the conditions under which it was found to be exact."""

    settings: Hashable
    loss: Callable[[], PerExampleLoss | None]  # a weak reference: a loss may refer to the model
    engine: Engine


def _settings(model: nn.Module) -> Hashable:
    """Each module's class, training flag, and the names of its own trainable parameters."""

    def own(module: nn.Module) -> tuple[str, ...]:
        return tuple(name for name, p in module._parameters.items() if p is not None and p.requires_grad)

    return tuple((type(module), module.training, own(module)) for module in model.modules())


def _weak(loss: PerExampleLoss) -> Callable[[], PerExampleLoss | None]:
    try:
        return WeakMethod(loss) if isinstance(loss, MethodType) else ref(loss)
    except TypeError:  # an object without weak references
        return lambda: loss


def _is_same(one: PerExampleLoss | None, other: PerExampleLoss) -> bool:
    """Identity; a bound method is a new object at every access, and equal for the same object and function."""
    return one is other or (isinstance(one, MethodType) and one == other)


def _without_state(coefficients: Coefficients) -> Coefficients:
    """Coefficients for a trial: a function of the alignment may change the method's state, so it is replaced."""
    return torch.ones_like if callable(coefficients) else coefficients


def _log_choice(name: str, reasons: list[str]) -> None:
    if reasons:
        logger.warning("alignments by the slower %s engine, because %s", name, reasons[0])
    else:
        logger.info("alignments by the %s engine", name)
