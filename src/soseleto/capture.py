"""A training step recorded once as a CUDA graph and replayed: small networks stop waiting for the launch of kernels.

Nothing in a method knows of it, but a method whose steps go through phases, or look at a count of their own, has a
state that says ``capturable`` (False until the last phase is reached, or for good). A step whose batch has another
shape, or that is monitored, runs as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from soseleto.batch import Batch
from soseleto.task import Method, MethodState

WARM_UP = 3  # ordinary steps first: lazily made buffers and the choice of kernels must not be recorded


class EagerStep:
    """The method's step as it is."""

    def __init__(self, method: Method, state: MethodState) -> None:
        self._method, self._state = method, state

    def __call__(self, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        return self._method.step(self._state, source, target, monitor=monitor)


class CapturedStep:
    """The method's step as a CUDA graph, from the fourth call on; ``tell`` hears why where that is impossible."""

    def __init__(self, method: Method, state: MethodState, tell: Callable[[str], None]) -> None:
        self._eager = EagerStep(method, state)
        self._state = state
        self._optimizer = state.optimizer
        self._tell = tell
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._possible = True

    def __call__(self, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        self._calls += 1
        if not getattr(self._state, "capturable", True):
            self._calls = 0  # the steps of the next phase are warmed up anew
        if monitor or not self._possible or self._calls <= WARM_UP:
            return self._eager(source, target, monitor=monitor)
        if self._graph is None and not self._capture(source, target):
            return self._eager(source, target)
        if not (_fits(self._source, source) and _fits(self._target, target)):
            return self._eager(source, target)
        _fill(self._source, source)
        _fill(self._target, target)
        for rate, group in zip(self._rates, self._optimizer.param_groups, strict=True):
            rate.fill_(group["lr"])
        assert self._graph is not None
        self._graph.replay()
        return self._numbers

    def _capture(self, source: Batch, target: Batch) -> bool:
        self._source, self._target = _clone(source), _clone(target)
        graph = torch.cuda.CUDAGraph()
        try:
            with _rates_on_device(self._optimizer, source.inputs.device) as self._rates, torch.cuda.graph(graph):
                self._numbers = self._eager(self._source, self._target)
        except RuntimeError as error:  # the model or the optimizer waits for the device somewhere
            torch.cuda.synchronize()
            self._possible = False
            self._tell(f"steps run one kernel at a time, since they cannot be captured as a CUDA graph ({_why(error)})")
            return False
        self._graph = graph
        return True


@contextlib.contextmanager
def _rates_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> Iterator[list[Tensor]]:
    """Inside, learning rates are tensors that a recorded step reads; outside, the schedule's own numbers."""
    numbers = [group["lr"] for group in optimizer.param_groups]
    rates = [torch.full((), float(number), device=device) for number in numbers]
    torch.cuda.synchronize()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    try:
        yield rates
    finally:
        for group, number in zip(optimizer.param_groups, numbers, strict=True):
            group["lr"] = number


def _clone(batch: Batch) -> Batch:
    return Batch(batch.index.clone(), batch.inputs.clone(), batch.labels.clone())


def _fits(static: Batch, batch: Batch) -> bool:
    return static.inputs.shape == batch.inputs.shape and static.labels.shape == batch.labels.shape


def _fill(static: Batch, batch: Batch) -> None:
    static.index.copy_(batch.index)
    static.inputs.copy_(batch.inputs)
    static.labels.copy_(batch.labels)


def _why(error: Any) -> str:
    return str(error).strip().splitlines()[0][:160].rstrip(". ")
