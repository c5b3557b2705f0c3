"""Engines made of one or more functions that follow the whole model: ``forward``, ``double_backward``, ``loop``.

Each function (a way) returns the batch's losses, still attached to their graph, and the alignments. A way is used once
it has been proved for the model at hand (``proof``), and again for every new kind of graph that the model builds; a way
that fails a later proof is replaced by the next one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakMethod, ref

import torch
from torch import Tensor, nn

from soseleto.engines.autograd import Linearize, gradient, target_first
from soseleto.engines.contract import (
    Direction,
    Passes,
    PerExampleLoss,
    SourcePass,
    SourceStep,
    Step,
    named_in,
    no_reentrant_checkpoint,
    refuse_sharded,
    trainable,
    uncompiled,
)
from soseleto.engines.forward import CannotFollow
from soseleto.engines.proof import Align, Inexact, Kinds, Schedule, prove
from soseleto.engines.recorded import Recorded
from soseleto.engines.shards import sharded_modules
from soseleto.engines.unchanged import Restore
from soseleto.errors import EngineError, first_line

logger = logging.getLogger("soseleto")
Value = TypeVar("Value")


class VerifiedEngine:
    """An engine from ways in order of speed; with ``proofs=False`` its one way is trusted, as that of ``loop``."""

    def __init__(self, name: str, *ways: Linearize, proofs: bool = True) -> None:
        self.name = name
        self.schedule = Schedule() if proofs else None
        self._ways = ways
        self._cases: PerModel[_Case] = PerModel()

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        named_in(direction, model)
        case = self._case(model, per_example_loss, batch, direction, with_gradient=False)
        losses, alignment = self._linearize(model, per_example_loss, batch, direction, case)
        return losses.detach(), alignment

    def passes(self, step: Step) -> Passes:
        # Proved before the target's pass, so that an engine that fails has not changed the method's direction yet.
        case = self._case(step.model, step.losses.source, step.source, None)
        return target_first(step, lambda source: self._source_pass(source, case))

    def source_pass(self, step: SourceStep) -> SourcePass:
        named_in(step.direction, step.model)
        return self._source_pass(step, self._case(step.model, step.loss, step.batch, step.direction))

    def _source_pass(self, step: SourceStep, case: _Case) -> SourcePass:
        losses, alignment = self._linearize(step.model, step.loss, step.batch, step.direction, case)
        c = step.coefficients(alignment) if callable(step.coefficients) else step.coefficients
        return SourcePass(losses.detach(), alignment, gradient(losses, trainable(step.model), c.to(losses.dtype)))

    @property
    def _calls(self) -> int:
        return 0 if self.schedule is None else self.schedule.calls

    def _linearize(
        self, model: nn.Module, loss: PerExampleLoss, batch: Any, direction: Direction, case: _Case
    ) -> tuple[Tensor, Tensor]:
        """Losses and alignments by the proved way; a new kind of graph is proved first."""
        is_checked = self.schedule is None
        while True:
            restore = None if is_checked else Restore(model)
            try:
                losses, alignment, calls = self._run(case.way, model, loss, batch, direction)
            except CannotFollow as error:  # this batch takes another path through the model than the proved one
                case.failed(first_line(error))
            else:
                if restore is None or not case.kinds.is_new(calls, len(losses) > 1, now=self._calls):
                    return losses, alignment
                is_checked = True
            if restore is not None:
                restore()
            self._prove(case, model, loss, batch, direction)

    def _case(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        batch: Any,
        direction: Direction | None,
        *,
        with_gradient: bool = True,
    ) -> _Case:
        """The way for this model and loss, proved where a proof is due; without ``direction`` for all parameters."""
        refuse_sharded(bool(sharded_modules(model)), f"the {self.name} engine")
        condition = (None if direction is None else tuple(direction), with_gradient)
        case = self._cases.get(model, loss, condition)
        is_due = self.schedule is not None and self.schedule.count()
        is_new = case is None
        if case is None:
            case = _Case(self.name, list(self._ways), with_gradient)
            self._cases.keep(model, loss, case, condition)
        if self.schedule is not None and (is_due or is_new):
            self._prove(case, model, loss, batch, trainable(model) if direction is None else direction)
        return case

    def _prove(self, case: _Case, model: nn.Module, loss: PerExampleLoss, batch: Any, names: Iterable[str]) -> None:
        """Drop ways until one is proved; raises where there is none."""
        assert self.schedule is not None
        self.schedule.begin()
        seed, first = self._calls, not case.is_proved
        while True:
            kinds: list[tuple[list[Hashable], bool]] = []
            align = self._align(case.way, model, loss, batch, kinds)
            try:
                unproved = prove(
                    align, model, loss, batch, names, seed=seed, first=first, with_gradient=case.with_gradient
                )
            except (RuntimeError, TypeError, AttributeError) as error:
                if _ends_the_search(error, is_last=len(case.ways) == 1):
                    raise
                case.failed(first_line(error))
                continue
            case.is_proved = True
            again = [case.kinds.add(*kind, now=self._calls, unproved=unproved) for kind in kinds[-1:]]
            self.schedule.proved(unproved, *again)
            return

    def _align(
        self,
        way: Linearize,
        model: nn.Module,
        loss: PerExampleLoss,
        batch: Any,
        kinds: list[tuple[list[Hashable], bool]],
    ) -> Align:
        """A way as a function of the direction, for a proof; the kinds of its graphs are added to ``kinds``."""

        def align(along: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            try:
                losses, alignment, seen = self._run(way, model, loss, batch, along)
            except (EngineError, CannotFollow, torch.OutOfMemoryError):
                raise
            except (RuntimeError, TypeError, AttributeError) as error:  # an ordinary pass has just succeeded
                raise Inexact(first_line(error)) from error
            kinds.append((seen, len(losses) > 1))
            return losses, alignment

        return align

    def _run(
        self, way: Linearize, model: nn.Module, loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor, list[Hashable]]:
        """Losses, alignments, and what the model called."""
        recorded = Recorded()

        def recording(model: nn.Module, batch: Any) -> Tensor:
            with recorded:
                return loss(model, batch)

        try:
            with torch.enable_grad(), uncompiled(model):
                return *way(model, recording, batch, direction), recorded.functions
        except CannotFollow:
            raise
        except RuntimeError as error:
            if reentrant := no_reentrant_checkpoint(error):
                raise reentrant from error
            if self.name != "loop" and _no_rule(error):
                raise EngineError(
                    f"the {self.name} engine has no rule for an operator of this model ({first_line(error)}): "
                    f"use engine={'double_backward' if self.name == 'forward' else 'loop'!r}."
                ) from error
            raise


@dataclass
class _Case:
    """The ways that are left for a model and a loss."""

    engine: str
    ways: list[Linearize]
    with_gradient: bool
    is_proved: bool = False
    kinds: Kinds = field(default_factory=Kinds)

    @property
    def way(self) -> Linearize:
        return self.ways[0]

    def failed(self, why: str) -> None:
        """Drop the way in use; raises if it was the last one."""
        dropped, self.kinds = self.ways.pop(0), Kinds()
        if not self.ways:
            self.ways.append(dropped)
            raise EngineError(
                f"the {self.engine} engine is not exact for this model ({why}): use engine='loop', or engine='auto', "
                "which picks the fastest exact one."
            )
        logger.info("the %s engine goes on by its slower way, because %s", self.engine, why)


class PerModel(Generic[Value]):
    """A value for a model and a loss, both referenced weakly.

    It holds while the model's modules, their training flags and hooks and its trainable parameters stay the same.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[nn.Module, list[_Kept[Value]]] = WeakKeyDictionary()

    def get(self, model: nn.Module, loss: PerExampleLoss, condition: Hashable = None) -> Value | None:
        kept = self._values.get(model)
        if not kept:
            return None
        settings = (_settings(model), condition)
        return next((one.value for one in kept if one.settings == settings and _is_same(one.loss(), loss)), None)

    def keep(self, model: nn.Module, loss: PerExampleLoss, value: Value, condition: Hashable = None) -> None:
        """Replace the value, and drop those whose loss no longer exists."""
        new = _Kept((_settings(model), condition), _weak(loss), value)
        others = [one for one in self._values.get(model, []) if one.loss() is not None and not one.is_for(new, loss)]
        self._values[model] = [*others, new]


@dataclass(frozen=True, eq=False)
class _Kept(Generic[Value]):
    settings: Hashable
    loss: Callable[[], PerExampleLoss | None]  # a weak reference: a loss may refer to the model
    value: Value

    def is_for(self, other: _Kept[Value], loss: PerExampleLoss) -> bool:
        return self.settings == other.settings and _is_same(self.loss(), loss)


def _settings(model: nn.Module) -> Hashable:
    """Each module's class, training flag, number of hooks, and its own trainable parameters with theirs."""

    def own(module: nn.Module) -> tuple[tuple[str, int], ...]:
        parameters = ((name, p) for name, p in module._parameters.items() if p is not None and p.requires_grad)
        return tuple((name, len(p._backward_hooks or ())) for name, p in parameters)

    def hooks(module: nn.Module) -> tuple[int, int]:
        return len(module._forward_hooks) + len(module._forward_pre_hooks), len(module._backward_hooks)

    return tuple((type(module), module.training, hooks(module), own(module)) for module in model.modules())


def _weak(loss: PerExampleLoss) -> Callable[[], PerExampleLoss | None]:
    try:
        return WeakMethod(loss) if isinstance(loss, MethodType) else ref(loss)
    except TypeError:  # an object without weak references
        return lambda: loss


def _is_same(one: PerExampleLoss | None, other: PerExampleLoss) -> bool:
    """Identity; a bound method is a new object at every access, and equal for the same object and function."""
    return one is other or (isinstance(one, MethodType) and one == other)


def _ends_the_search(error: BaseException, *, is_last: bool) -> bool:
    """Whether an error in a proof is to be raised: a way that is not the last may fail in any manner of its own."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return is_last and not isinstance(error, Inexact | CannotFollow)


def _no_rule(error: RuntimeError) -> bool:
    """Whether PyTorch's error says that an operator lacks a derivative."""
    message = str(error)
    return isinstance(error, NotImplementedError) or any(
        sign in message
        for sign in (
            "forward AD",
            "is not implemented",
            "not differentiable twice",
            "does not support",
            "once_diff",
        )
    )
