"""An engine from a function that follows the whole model: ``forward``, ``double_backward`` or ``loop``.

The function returns the batch's losses, still attached to their graph, and the alignments. It is used once it has been
proved for the model at hand (``proof``), and proved again for every new kind of graph that the model builds.
"""

from __future__ import annotations

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
from soseleto.engines.proof import Inexact, Kinds, Recorded, Schedule, prove
from soseleto.engines.shards import sharded_modules
from soseleto.engines.unchanged import Restore
from soseleto.errors import EngineError, first_line

Value = TypeVar("Value")


class ProvedEngine:
    """The engine of one function; with ``proofs=False`` it is trusted, as ``loop`` is."""

    def __init__(self, name: str, linearize: Linearize, *, proofs: bool = True) -> None:
        self.name = name
        self.schedule = Schedule() if proofs else None
        self._function = linearize
        self._proofs: PerModel[_Proofs] = PerModel()

    def __call__(
        self, model: nn.Module, per_example_loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor]:
        named_in(direction, model)
        proofs = self._proofs_of(model, per_example_loss, batch, direction, with_gradient=False)
        losses, alignment = self._linearize(model, per_example_loss, batch, direction, proofs)
        return losses.detach(), alignment

    def passes(self, step: Step) -> Passes:
        # Proved before the target's pass, so that an engine that fails has not changed the method's direction yet.
        proofs = self._proofs_of(step.model, step.losses.source, step.source, None)
        return target_first(step, lambda source: self._source_pass(source, proofs))

    def source_pass(self, step: SourceStep) -> SourcePass:
        named_in(step.direction, step.model)
        return self._source_pass(step, self._proofs_of(step.model, step.loss, step.batch, step.direction))

    def _source_pass(self, step: SourceStep, proofs: _Proofs) -> SourcePass:
        losses, alignment = self._linearize(step.model, step.loss, step.batch, step.direction, proofs)
        c = step.coefficients(alignment) if callable(step.coefficients) else step.coefficients
        return SourcePass(losses.detach(), alignment, gradient(losses, trainable(step.model), c.to(losses.dtype)))

    @property
    def _calls(self) -> int:
        return 0 if self.schedule is None else self.schedule.calls

    def _linearize(
        self, model: nn.Module, loss: PerExampleLoss, batch: Any, direction: Direction, proofs: _Proofs
    ) -> tuple[Tensor, Tensor]:
        """Losses and alignments; a new kind of graph is proved first."""
        restore = None if self.schedule is None else Restore(model)
        losses, alignment, calls = self._run(model, loss, batch, direction)
        if restore is None or not proofs.kinds.is_new(calls, len(losses) > 1, now=self._calls):
            return losses, alignment
        del losses, alignment
        restore()
        self._prove(proofs, model, loss, batch, direction)
        losses, alignment, _ = self._run(model, loss, batch, direction)
        return losses, alignment

    def _proofs_of(
        self,
        model: nn.Module,
        loss: PerExampleLoss,
        batch: Any,
        direction: Direction | None,
        *,
        with_gradient: bool = True,
    ) -> _Proofs:
        """The proofs for a model and a loss, with a new one if it is due; for all parameters without ``direction``."""
        refuse_sharded(bool(sharded_modules(model)), f"the {self.name} engine")
        condition = (None if direction is None else tuple(direction), with_gradient)
        proofs = self._proofs.get(model, loss, condition)
        is_due = self.schedule is not None and self.schedule.count()
        is_new = proofs is None
        if proofs is None:
            proofs = _Proofs(with_gradient)
            self._proofs.keep(model, loss, proofs, condition)
        if self.schedule is not None and (is_due or is_new):
            self._prove(proofs, model, loss, batch, trainable(model) if direction is None else direction)
        return proofs

    def _prove(self, proofs: _Proofs, model: nn.Module, loss: PerExampleLoss, batch: Any, names: Iterable[str]) -> None:
        assert self.schedule is not None
        self.schedule.begin()
        kinds: list[tuple[list[Hashable], bool]] = []  # of the graphs that are built

        def align(along: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
            try:
                losses, alignment, calls = self._run(model, loss, batch, along)
            except (EngineError, torch.OutOfMemoryError):
                raise
            except (RuntimeError, TypeError, AttributeError) as error:  # an ordinary pass has just succeeded
                raise Inexact(first_line(error)) from error
            kinds.append((calls, len(losses) > 1))
            return losses, alignment

        seed, first = self._calls, not proofs.is_proved
        try:
            unproved = prove(
                align, model, loss, batch, names, seed=seed, first=first, with_gradient=proofs.with_gradient
            )
        except Inexact as error:
            raise EngineError(
                f"the {self.name} engine is not exact for this model ({error}): use engine='loop', or engine='auto', "
                "which picks the fastest exact one."
            ) from error
        proofs.is_proved = True
        again = [proofs.kinds.add(*kind, now=self._calls, unproved=unproved) for kind in kinds[-1:]]
        self.schedule.proved(unproved, *again)

    def _run(
        self, model: nn.Module, loss: PerExampleLoss, batch: Any, direction: Direction
    ) -> tuple[Tensor, Tensor, list[Hashable]]:
        """Losses, alignments, and what the model called."""
        recorded = Recorded()

        def recording(model: nn.Module, batch: Any) -> Tensor:
            with recorded:
                return loss(model, batch)

        try:
            with torch.enable_grad(), uncompiled(model):
                return *self._function(model, recording, batch, direction), recorded.functions
        except RuntimeError as error:
            if reentrant := no_reentrant_checkpoint(error):
                raise reentrant from error
            if self.name != "loop" and (isinstance(error, CannotFollow) or _no_rule(error)):
                raise EngineError(
                    f"the {self.name} engine has no rule for an operator of this model ({first_line(error)}): "
                    f"use engine={'double_backward' if self.name == 'forward' else 'loop'!r}."
                ) from error
            raise


@dataclass
class _Proofs:
    """What was proved for a model and a loss."""

    with_gradient: bool
    is_proved: bool = False
    kinds: Kinds = field(default_factory=Kinds)


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
