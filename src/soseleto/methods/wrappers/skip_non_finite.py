"""Around any method: a step with a non-finite loss, gradient or alignment is undone and counted.

Everything a step may change is copied before it and restored after it if something was not finite; the cost is a copy
of the model and the optimizer state. Nothing synchronises with the device, so the steps can still be captured as a CUDA
graph. The exception is a step in which the optimizer creates its state, usually the first: the host decides whether it
is removed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from soseleto.data.batches import Batch
from soseleto.methods.wrappers.inner import Transparent, WrapperState
from soseleto.task.task import Method, Task


class CountingGuard:
    """A guard that never raises: it records on the device whether any loss of the step was not finite."""

    def __init__(self, device: torch.device) -> None:
        self.bad = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, side: str, losses: Tensor, index: Tensor) -> None:
        self.bad.logical_or_(~losses.isfinite().all())


class Skipping(Transparent):
    """``method`` unchanged, except that non-finite steps are undone. The schedule counts skipped steps too."""

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
    """Every tensor that a step may change, except the weights of source examples."""
    for name, value in state.task.model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            yield (0, name), value.detach()
    for parameter, entries in state.optimizer.state.items():
        yield from (((1, parameter, name), value) for name, value in entries.items() if isinstance(value, Tensor))
    if hasattr(state, "state"):
        own = {name: value for name, value in state.state().items() if name != "weights"}
        yield from (((2, path), tensor) for path, tensor in _leaves(own))


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
