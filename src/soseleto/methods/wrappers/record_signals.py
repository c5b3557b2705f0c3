"""Around any method: the running mean loss and margin of every source example, the signals that are free elsewhere.

The outputs are those of the step's own forward, seen through a hook that is gone again when the step ends; only where
the method runs the model out of the hook's sight (a captured graph) the source batch is run once more, and
``Signals.extra_forwards`` counts that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data.batch import Batch
from soseleto.methods.state import require_noisy
from soseleto.task.losses import cross_entropy
from soseleto.task.task import Method, Task, state_of


@dataclass
class Signals:
    """Running means over visits of n source examples: of the cross-entropy, and of the margin of the label.

    The margin is the score (logit) of the label minus the largest of the other classes' scores.
    """

    n: int
    loss: Tensor = field(init=False)
    margin: Tensor = field(init=False)
    visits: Tensor = field(init=False)
    extra_forwards: int = 0

    def __post_init__(self) -> None:
        self.loss, self.margin, self.visits = (torch.zeros(self.n) for _ in range(3))

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
        for mean, new in ((self.loss, cross_entropy(scores, batch.labels)), (self.margin, margins(scores, batch))):
            old = mean[batch.index]
            mean[batch.index] = old + (new.to(old.dtype) - old) / visits


def margins(scores: Tensor, batch: Batch) -> Tensor:
    """The label's score minus the largest other one, (B,)."""
    label = batch.labels[:, None]
    others = scores.scatter(1, label, float("-inf"))
    return scores.gather(1, label).squeeze(1) - others.amax(1)


@dataclass(frozen=True)
class Recording:
    """``method`` as it is, while ``signals`` follow the source examples it visits."""

    method: Method
    signals: Signals

    @property
    def name(self) -> str:
        return self.method.name

    def __repr__(self) -> str:
        return repr(self.method)

    def init(self, task: Task) -> Any:
        require_noisy(task, "recording")
        self.signals.to(task.device)
        return _Seen(task, self.method.init(task), self.signals)

    def step(self, state: Any, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        with _watched(state.task.model, source, len(target)) as seen:
            numbers = self.method.step(state.inner, source, target, monitor=monitor)
        if seen:
            scores = seen[0]
        else:
            self.signals.extra_forwards += 1
            with torch.no_grad():
                scores = state.task.model(source.inputs)
        self.signals.add(source, scores)
        return numbers


@dataclass
class _Seen:
    """The inner state, with the task beside it; whatever else is asked for is the inner state's."""

    task: Task
    inner: Any
    signals: Signals

    def state(self) -> dict[str, Any]:
        return {"inner": state_of(self.inner), "signals": self.signals.state()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state(state["inner"])
        self.signals.load_state(state["signals"])

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@contextmanager
def _watched(model: nn.Module, source: Batch, n_target: int) -> Iterator[list[Tensor]]:
    """Gathers the model's outputs for the source rows, from forwards of the source alone or joined with the target."""
    seen: list[Tensor] = []
    # Inputs may have been copied on the way (autocast), so they are known by their number, where that tells.
    sizes = {len(source), len(source) + n_target} - {n_target}

    def look(module: nn.Module, given: tuple[Any, ...], outputs: Any) -> None:
        rows = given[0] if given else None
        if isinstance(rows, Tensor) and (rows is source.inputs or len(rows) in sizes):
            seen.append(outputs.detach()[: len(source)])

    handle = model.register_forward_hook(look)
    try:
        yield seen
    finally:
        handle.remove()
