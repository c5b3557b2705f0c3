"""Training steps as CUDA graphs: recorded once and replayed, so that small networks are not launch-bound.

Methods need not know about it. The state of a method with several kinds of step has an attribute ``kind``, that of the
next step. Batches of another shape, such as texts padded to another length, have a graph of their own; beyond ``MOST``
graphs their steps run without one. So does a monitored step, and one in which the state's engine is to be proved: a
recording that comes to a proof is given up, and the next step of its kind is recorded. When the state has replaced its
engine, its steps are of another kind. Steps before the recording run as if it had begun, since some models then take
another path (those of transformers make every mask): it is the path that the engine is proved on.

A recording repeats what the host has decided once. So a model that draws random numbers on the host, as for dropped
layers, or that counts its steps is not recorded, and one whose flags or attributes were changed is recorded again. What
a model reads elsewhere, such as a clock, is not seen: give ``Compute(cuda_graph=False)``.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.data import structure
from soseleto.data.batches import Batch
from soseleto.data.structure import Inputs
from soseleto.engines.proof import ProofDue, Schedule
from soseleto.errors import first_line

TakeStep = Callable[..., dict[str, Tensor]]  # step(source, target, monitor=False) -> the step's numbers
MOST = 32  # graphs
WARM_UP = 3  # eager steps before recording, so that lazy allocation and kernel selection are not recorded


@dataclass(frozen=True)
class _Recorded:
    """A graph with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    source: Batch
    target: Batch
    rates: list[Tensor]
    numbers: dict[str, Tensor]

    def replay(self, source: Batch, target: Batch, groups: list[dict[str, Any]]) -> dict[str, Tensor]:
        _fill(self.source, source)
        _fill(self.target, target)
        for rate, group in zip(self.rates, groups, strict=True):
            rate.fill_(group["lr"])
        self.graph.replay()
        return self.numbers


class CapturedStep:
    """A step as a CUDA graph, from the fourth call on; ``log`` gets the reason if that is impossible.

    Every ``kind`` of step and every shape of its batches has its own recording; a state that counts steps is notified
    of replays by ``advance``. What is returned is overwritten by the next call.

    step: ``partial(method.step, state)``, or a part of a step.
    reads: of these settings the optimizer needs one, so that what the step reads of its state is on the device.
    """

    def __init__(
        self, step: TakeStep, state: Any, log: Callable[[str], None], *, reads: Sequence[str] = ("capturable",)
    ) -> None:
        self._eager, self._state = step, state
        self._model: nn.Module | None = getattr(getattr(state, "task", None), "model", None)
        self._engine: Any = getattr(state, "engine", None)  # None for a method without one
        self._groups = [] if state.optimizer is None else state.optimizer.param_groups
        self._log = log
        self._calls: Counter[Hashable] = Counter()  # by kind and shapes
        self._recorded: dict[Hashable, _Recorded] = {}
        self._pool = torch.cuda.graph_pool_handle()  # shared, since two recordings never run at once
        self._possible = True
        self._changes = 0  # steps in which the model has changed its attributes
        if reads and not all(any(group.get(name, True) for name in reads) for group in self._groups):
            self._give_up(f"a CUDA graph needs an optimizer made with {'=True or '.join(reads)}=True")

    def __call__(self, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        has_stepped = bool(getattr(self._state.optimizer, "state", None))  # before that it keeps nothing to read
        settings = getattr(self._state, "kind", None), self._engine_name, has_stepped, attributes(self._model)
        kind = *settings, _shapes(source), _shapes(target)
        self._calls[kind] += 1
        needs_proof = self._proofs.calls > 0 and self._proofs.is_due
        if monitor or not self._possible or self._calls[kind] <= WARM_UP or needs_proof:
            return self._run(source, target, monitor=monitor)
        if kind not in self._recorded and not (len(self._recorded) < MOST and self._capture(kind, source, target)):
            return self._run(source, target)
        numbers = self._recorded[kind].replay(source, target, self._groups)
        self._advance(1)
        return numbers

    def _run(self, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """Without a recording; while one is possible, it is watched what the host decides."""
        if not self._possible:
            return self._eager(source, target, monitor=monitor)
        drawn, before = _drawn_on_host(), attributes(self._model)
        with as_if_recording():
            numbers = self._eager(source, target, monitor=monitor)
        self._changes += attributes(self._model) != before  # a few may be for values that are computed once
        if _drawn_on_host() != drawn:
            self._give_up("the model draws random numbers on the CPU, which a CUDA graph would not draw again")
        elif self._changes > WARM_UP:
            self._give_up("the model changes attributes of its own in every step, which a CUDA graph would not do")
        return numbers

    def _give_up(self, why: str) -> None:
        self._possible = False
        self._log(f"steps run one kernel at a time, since {why}")

    def _capture(self, kind: Hashable, source: Batch, target: Batch) -> bool:
        source, target, graph = _clone(source), _clone(target), torch.cuda.CUDAGraph()
        schedule = self._proofs
        calls, schedule.recording = schedule.calls, True
        try:
            # Threads that read data ahead may go on pinning memory meanwhile.
            record = torch.cuda.graph(graph, self._pool, capture_error_mode="thread_local")
            with _rates_on_device(self._groups, source.index.device) as rates, record:
                numbers = self._eager(source, target)
        except ProofDue:  # the call that came to it is not counted
            torch.cuda.synchronize()
            schedule.calls = calls
            return False
        except RuntimeError as error:  # the model or the optimizer synchronises with the device
            torch.cuda.synchronize()
            self._give_up(f"they cannot be captured as a CUDA graph ({first_line(error)})")
            return False
        finally:
            schedule.recording = False
        self._advance(-1)  # recording takes no step
        self._recorded[kind] = _Recorded(graph, source, target, rates, numbers)
        return True

    def _advance(self, steps: int) -> None:
        """Count steps that the method did not count itself."""
        if hasattr(self._state, "advance"):
            self._state.advance(steps)
        if (schedule := self._proofs).calls > 0:
            schedule.calls += steps

    @property
    def _engine_name(self) -> str | None:
        name: str | None = getattr(self._engine, "name", None)
        return name

    @property
    def _proofs(self) -> Schedule:
        """When the engine is to be proved. No calls: there is none, or its weights are frozen."""
        return getattr(self._engine, "schedule", None) or Schedule()


def attributes(model: nn.Module | None) -> Hashable:
    """The numbers, words and flags of every module, which of its parameters are trained, and where they lie."""
    if model is None:
        return None
    return tuple(
        (
            tuple(value for value in vars(module).values() if type(value) in (bool, int, float, str)),
            tuple((p.requires_grad, p.data_ptr()) for p in module._parameters.values() if p is not None),
        )
        for module in model.modules()
    )


def _drawn_on_host() -> Hashable:
    """Where the random numbers of the host are, without those of data loaders' own generators."""
    state: Any = np.random.get_state()  # noqa: NPY002  # what the user's code draws from
    return torch.get_rng_state().numpy().tobytes(), random.getstate(), state[1].tobytes(), state[2:]


@contextlib.contextmanager
def as_if_recording() -> Iterator[None]:
    """Inside, torch says that a CUDA graph is being recorded."""
    before = torch.cuda.is_current_stream_capturing
    torch.cuda.is_current_stream_capturing = lambda: True
    try:
        yield
    finally:
        torch.cuda.is_current_stream_capturing = before


@contextlib.contextmanager
def _rates_on_device(groups: list[dict[str, Any]], device: torch.device) -> Iterator[list[Tensor]]:
    """Inside, learning rates are tensors that a recorded step reads; outside, the numbers of the schedule."""
    numbers = [group["lr"] for group in groups]
    rates = [torch.full((), float(number), device=device) for number in numbers]
    torch.cuda.synchronize()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    try:
        yield rates
    finally:
        for group, number in zip(groups, numbers, strict=True):
            group["lr"] = number


def _clone(batch: Batch) -> Batch:
    index, inputs, labels = structure.change(Tensor.clone, _tensors(batch))
    return replace(batch, index=index, inputs=inputs, labels=labels)


def _shapes(batch: Batch) -> tuple[torch.Size, ...]:
    return tuple(tensor.shape for tensor in structure.tensors(_tensors(batch)))


def _fill(static: Batch, batch: Batch) -> None:
    for mine, its in zip(structure.tensors(_tensors(static)), structure.tensors(_tensors(batch)), strict=True):
        mine.copy_(its)


def _tensors(batch: Batch) -> tuple[Tensor, Inputs, Tensor]:
    return batch.index, batch.inputs, batch.labels
