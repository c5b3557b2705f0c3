"""Methods around another method: one records label-quality signals, one undoes steps that are not finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from soseleto.data.batches import Batch
from soseleto.data.structure import call, label_margin, length, scores_of, tensors
from soseleto.engines.forward import without_tangent
from soseleto.methods.state import require_noisy
from soseleto.task.losses import cross_entropy
from soseleto.task.task import Method, Task, state_of


class Transparent:
    """A wrapper that appears in messages, tables and run folders under the name and settings of ``method``."""

    method: Method

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def takes_views(self) -> bool:
        return bool(getattr(self.method, "takes_views", False))

    def __repr__(self) -> str:
        return repr(self.method)


@dataclass
class WrapperState:
    """The task and the inner method's state; attributes that the wrapper's state lacks are read from ``inner``."""

    task: Task
    inner: Any

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, as while copying: looking it up would recurse
            raise AttributeError(name)
        return getattr(self.inner, name)


@dataclass
class Signals:
    """Running means over the visits of n source examples: of the cross-entropy, and of the label's margin.

    They cost almost nothing: outputs are those of the step's own forward pass, read by a hook that is removed when the
    step ends. Only where the hook does not see that pass (a captured graph) is the source batch run once more, and
    ``extra_forwards`` counts it.
    """

    n: int
    loss: Tensor = field(init=False)
    margin: Tensor = field(init=False)
    visits: Tensor = field(init=False)
    extra_forwards: int = 0

    def __post_init__(self) -> None:
        self.loss, self.margin, self.visits = torch.zeros(3, self.n)

    def to(self, device: torch.device) -> None:
        self.loss, self.margin, self.visits = (t.to(device) for t in (self.loss, self.margin, self.visits))

    def state(self) -> dict[str, Any]:
        return {"loss": self.loss, "margin": self.margin, "visits": self.visits, "extra_forwards": self.extra_forwards}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name in ("loss", "margin", "visits"):
            getattr(self, name).copy_(state[name])
        self.extra_forwards = state["extra_forwards"]

    def add(self, batch: Batch, scores: Tensor) -> None:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        visits = self.visits[batch.index] + 1
        self.visits[batch.index] = visits
        loss, margin = cross_entropy(scores, batch.labels), label_margin(scores, batch.labels)
        for mean, new in ((self.loss, loss), (self.margin, margin)):
            old = mean[batch.index]
            mean[batch.index] = old + (new.to(old.dtype) - old) / visits


@dataclass(frozen=True, repr=False)
class Recording(Transparent):
    """``method`` unchanged, with ``signals`` recorded for the source examples it visits."""

    method: Method
    signals: Signals

    def init(self, task: Task) -> Any:
        require_noisy(task, "recording")
        self.signals.to(task.device)
        return RecordingState(task, self.method.init(task), self.signals)

    def step(self, state: Any, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        with _source_outputs(state.task.model, source, len(target)) as seen:
            numbers = self.method.step(state.inner, source, target, monitor=monitor)
        judged: Tensor | None = getattr(state.inner, "judged", None)  # of a method that judges by other passes
        if judged is not None:
            scores = judged
        elif seen:
            scores = without_tangent(scores_of(seen[0])).detach()[: len(source)]
        else:
            self.signals.extra_forwards += 1
            with torch.no_grad():
                scores = scores_of(call(state.task.model, source.inputs))
        self.signals.add(source, scores)
        return numbers


@dataclass
class RecordingState(WrapperState):
    """The inner method's state, and the signals."""

    signals: Signals

    def state(self) -> dict[str, Any]:
        return {"inner": state_of(self.inner), "signals": self.signals.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state(state["inner"])
        self.signals.load_state(state["signals"])


@contextmanager
def _source_outputs(model: nn.Module, source: Batch, n_target: int) -> Iterator[list[Any]]:
    """Collects the model's outputs from forwards of the source alone or joined with the target; source rows first."""
    seen: list[Any] = []
    # Autocast may have copied the inputs, so a source forward is also recognised by its number of rows, unless the
    # target alone has as many.
    sizes = {len(source), len(source) + n_target} - {n_target}
    first = tensors(source.inputs)[0]

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
        inputs = tensors((args, kwargs))
        if inputs and (inputs[0] is first or length(inputs) in sizes):
            seen.append(outputs)  # as it is: an engine that follows the pass would take a detach for the model's own

    handle = model.register_forward_hook(keep, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


class CountingGuard:
    """A guard that never raises: it records on the device whether any loss of the step was not finite."""

    def __init__(self, device: torch.device) -> None:
        self.bad = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, side: str, losses: Tensor, index: Tensor) -> None:
        self.bad.logical_or_(~losses.isfinite().all())


class Skipping(Transparent):
    """``method`` unchanged, except that a step with a non-finite loss, gradient or alignment is undone and counted.

    Everything a step may change is copied before it and restored after it if something was not finite; the cost is a
    copy of the model and the optimizer state. Nothing synchronises with the device, so the steps can still be captured
    as a CUDA graph. The exception is a step in which the optimizer creates its state, usually the first: the host
    decides whether it is removed again. The schedule counts skipped steps too.
    """

    def __init__(self, method: Method, guard: CountingGuard) -> None:
        self.method, self.guard = method, guard  # the same guard as the task's

    def init(self, task: Task) -> SkippingState:
        return SkippingState(task, self.method.init(task))

    def step(self, state: SkippingState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        before = {key: tensor.clone() for key, tensor in _changing(state)}
        known = {parameter: set(entries) for parameter, entries in state.optimizer.state.items()}
        weights = None if state.weights is None else state.weights.rows(source.index)
        self.guard.bad.zero_()
        numbers = self.method.step(state.inner, source, target, monitor=monitor)
        fine = self._fine(state, before, source.index)
        _restore(state, before, fine)
        state.removed = _remove_new(state.optimizer, known, fine)
        if weights is not None:
            state.weights.put(source.index, torch.where(fine, state.weights.rows(source.index), weights))
        kept = {name: torch.where(fine, value, torch.zeros_like(value)) for name, value in numbers.items()}
        return {**kept, "skipped": 1.0 - fine.to(torch.float32)}

    def _fine(self, state: SkippingState, before: Mapping[Any, Tensor], index: Tensor) -> Tensor:
        """Whether on every rank all losses are finite, and all tensors that were finite before still are."""
        bad = self.guard.bad.clone()
        for key, tensor in _changing(state):
            if tensor.is_floating_point() and tensor.numel():
                was = before[key].isfinite().all() if key in before else torch.ones_like(bad)
                bad.logical_or_(was.to(bad.device) & ~tensor.isfinite().all().to(bad.device))
        if state.weights is not None:
            bad.logical_or_(~state.weights.rows(index).isfinite().all())
        return state.task.sharing.sum(bad.to(torch.float32)) == 0


@dataclass
class SkippingState(WrapperState):
    """removed: whether the last step was undone together with state that the optimizer had created in it."""

    removed: bool = False

    @property
    def capturable(self) -> bool:
        """False while the optimizer has yet to create its state, which a CUDA graph would create in every replay."""
        return not self.removed and getattr(self.inner, "capturable", True)


def _changing(state: SkippingState) -> Iterator[tuple[Any, Tensor]]:
    """Every tensor that a step may change, except the weights of source examples, by its path."""
    own = state.state() if hasattr(state, "state") else {}
    method = {name: value for name, value in own.items() if name != "weights"}
    yield from _leaves((state.task.model.state_dict(), state.optimizer.state, method))


def _restore(state: SkippingState, before: Mapping[Any, Tensor], fine: Tensor) -> None:
    """Unless the step was fine, give every tensor its value from before; running means that it began become 0."""
    with torch.no_grad():
        for key, tensor in _changing(state):
            old = before[key] if key in before else torch.zeros_like(tensor)
            tensor.copy_(torch.where(fine.to(tensor.device), tensor, old))


def _remove_new(optimizer: Optimizer, known: Mapping[Tensor, Set[str]], fine: Tensor) -> bool:
    """Unless the step was fine, remove what the optimizer has kept since ``known``; returns whether that was done."""
    kept = optimizer.state
    new = [(parameter, name) for parameter in kept for name in kept[parameter].keys() - known.get(parameter, set())]
    if not new or fine:  # reading ``fine`` waits for the device
        return False
    for parameter, name in new:
        del kept[parameter][name]
        if parameter not in known and not kept[parameter]:
            del kept[parameter]
    return True


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """The tensors in nested dicts, lists and tuples, each with its path."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, (*path, name))
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _leaves(value, (*path, place))
