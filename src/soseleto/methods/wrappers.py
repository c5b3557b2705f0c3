"""A method around another method, which records label-quality signals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.data.structure import call, label_margin, length, scores_of, tensors
from soseleto.engines.forward import without_tangent
from soseleto.methods.baselines import require_noisy
from soseleto.task.losses import cross_entropy
from soseleto.task.task import Method, Task, state_of


@dataclass
class Signals:
    """Running means over the visits of n source examples: of the cross-entropy, and of the label's margin.

    They cost almost nothing: outputs are those of the step's own forward pass, read by a hook that is removed when the
    step ends. Only where the hook does not see that pass (a captured graph) is the source batch run once more.
    """

    n: int

    def __post_init__(self) -> None:
        self.to(torch.device("cpu"))

    def to(self, device: torch.device) -> None:
        """Begin anew on this device."""
        self.loss, self.margin, self.visits = torch.zeros(3, self.n, device=device)

    def state(self) -> dict[str, Any]:
        return {"loss": self.loss, "margin": self.margin, "visits": self.visits}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for name, mine in self.state().items():
            mine.copy_(state[name])

    def add(self, batch: Batch, scores: Tensor) -> None:
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        visits = self.visits[batch.index] + 1
        self.visits[batch.index] = visits
        loss, margin = cross_entropy(scores, batch.labels), label_margin(scores, batch.labels)
        for mean, new in ((self.loss, loss), (self.margin, margin)):
            old = mean[batch.index]
            mean[batch.index] = old + (new.to(old.dtype) - old) / visits


@dataclass(frozen=True, repr=False)
class Recording:
    """``method`` unchanged, with ``signals`` recorded for the source examples it visits.

    It appears in messages, tables and run folders under the name and settings of ``method``.
    """

    method: Method
    signals: Signals

    @property
    def name(self) -> str:
        return self.method.name

    @property
    def takes_views(self) -> bool:
        return bool(getattr(self.method, "takes_views", False))

    def __repr__(self) -> str:
        return repr(self.method)

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
            with torch.no_grad():
                scores = scores_of(call(state.task.model, source.inputs))
        self.signals.add(source, scores)
        return numbers


@dataclass
class RecordingState:
    """The inner method's state, and the signals; other attributes are read from ``inner``."""

    task: Task
    inner: Any
    signals: Signals

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not set yet, as while copying: looking it up would recurse
            raise AttributeError(name)
        return getattr(self.inner, name)

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
