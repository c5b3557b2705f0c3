"""Around any method: a step with a loss, gradient or alignment that is not finite leaves no trace, and is counted.

What a step may change is copied before it and, where something was not finite, taken back after it. Nothing waits for
the device, so such steps can be recorded as a CUDA graph; the price is a copy of model and optimizer state.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from soseleto.data.batch import Batch
from soseleto.task.task import Method, Task


class CountingGuard:
    """Lets every loss pass, and remembers on the device whether one of this step was not finite."""

    def __init__(self, device: torch.device) -> None:
        self.bad = torch.zeros((), dtype=torch.bool, device=device)

    def __call__(self, side: str, losses: Tensor, index: Tensor) -> None:
        self.bad.logical_or_(~losses.isfinite().all())


class Skipping:
    """``method`` as it is, but for steps that are not finite. The schedule goes on over skipped steps."""

    def __init__(self, method: Method, guard: CountingGuard) -> None:
        self.method, self.guard = method, guard  # the guard is the task's

    @property
    def name(self) -> str:
        return self.method.name

    def __repr__(self) -> str:
        return repr(self.method)

    def init(self, task: Task) -> Any:
        self._task = task
        return self.method.init(task)

    def step(self, state: Any, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        before = {key: tensor.clone() for key, tensor in self._changing(state)}
        weights = None if state.weights is None else state.weights.rows(source.index)
        self.guard.bad.zero_()
        numbers = self.method.step(state, source, target, monitor=monitor)
        fine = self._fine(state, before, source.index)
        self._take_back(state, before, fine)
        if weights is not None:
            state.weights.put(source.index, torch.where(fine, state.weights.rows(source.index), weights))
        kept = {name: torch.where(fine, value, torch.zeros_like(value)) for name, value in numbers.items()}
        return {**kept, "skipped": 1.0 - fine.to(torch.float32)}

    def _fine(self, state: Any, before: Mapping[Any, Tensor], index: Tensor) -> Tensor:
        """Whether on every rank all losses, and all that was finite before, are finite now."""
        bad = self.guard.bad.clone()
        for key, tensor in self._changing(state):
            if tensor.is_floating_point() and tensor.numel():
                was = before[key].isfinite().all() if key in before else torch.ones_like(bad)
                bad.logical_or_(was.to(bad.device) & ~tensor.isfinite().all().to(bad.device))
        if state.weights is not None:
            bad.logical_or_(~state.weights.rows(index).isfinite().all())
        return self._task.sharing.sum(bad.to(torch.float32)) == 0

    def _changing(self, state: Any) -> Iterator[tuple[Any, Tensor]]:
        """Every tensor that a step may change, but for the weights of source examples."""
        for name, value in self._task.model.state_dict(keep_vars=True).items():
            if isinstance(value, Tensor):
                yield (0, name), value.detach()
        for parameter, entries in state.optimizer.state.items():
            yield from (((1, parameter, name), value) for name, value in entries.items() if isinstance(value, Tensor))
        if hasattr(state, "state"):
            own = {name: value for name, value in state.state().items() if name != "weights"}
            yield from (((2, path), tensor) for path, tensor in _leaves(own))

    def _take_back(self, state: Any, before: Mapping[Any, Tensor], fine: Tensor) -> None:
        """Where the step was not fine: what was there becomes what it was, what is new becomes 0."""
        with torch.no_grad():
            for key, tensor in self._changing(state):
                old = before[key] if key in before else torch.zeros_like(tensor)
                tensor.copy_(torch.where(fine.to(tensor.device), tensor, old))


def _leaves(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, Mapping):
        for name, value in tree.items():
            yield from _leaves(value, (*path, name))
    elif isinstance(tree, list | tuple):
        for place, value in enumerate(tree):
            yield from _leaves(value, (*path, place))
