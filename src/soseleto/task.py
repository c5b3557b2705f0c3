"""What a method is given to train, and what it must offer: two calls, ``init`` and ``step``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from soseleto.data.batch import Batch
from soseleto.distributed import Reducer, Single
from soseleto.engines.contract import Losses
from soseleto.engines.shards import rest
from soseleto.errors import TrainingError
from soseleto.sharing import Sharing
from soseleto.weights import Weights

# guard(side, losses, index): called on every batch's losses before they can reach the parameters
Guard = Callable[[str, Tensor, Tensor], None]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeSchedule = Callable[[Optimizer, int], LRScheduler]


@dataclass(frozen=True)
class Task:
    """A model to be trained on a source for the sake of a target.

    Every trainable parameter is in one of three parts: those in ``shared`` are θ; those in ``target_head`` are φᵗ;
    the others are φˢ. In noisy-label mode all are shared. ``n_source`` counts the source examples of this process,
    and ``sharing`` is how the work of a step is shared with others, and done in parts.
    """

    model: nn.Module
    losses: Losses
    n_source: int
    steps: int
    shared: frozenset[str]
    target_head: frozenset[str]
    make_optimizer: MakeOptimizer
    make_schedule: MakeSchedule | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    guard: Guard = field(default_factory=lambda: require_finite)
    classes: int | None = None  # of the source, where its labels are class indices
    sharing: Sharing = field(default_factory=Sharing)


class MethodState(Protocol):
    """What a method carries from step to step. The training loop steps the schedule, after every step."""

    @property
    def optimizer(self) -> Optimizer: ...

    @property
    def schedule(self) -> LRScheduler | None: ...

    @property
    def weights(self) -> Weights | None: ...


class Method(Protocol):
    """Anything that can be trained and compared."""

    @property
    def name(self) -> str: ...

    def init(self, task: Task) -> Any: ...

    def step(self, state: Any, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One update. The numbers come back as 0-d tensors, so that a GPU need not be waited for."""
        ...


class NonFiniteLoss(TrainingError):
    """Losses of some source or target examples are NaN or infinite; ``index`` holds their places."""

    def __init__(self, side: str, index: list[int]) -> None:
        super().__init__(f"{len(index)} {side} losses are not finite")
        self.side = side
        self.index = index


def require_finite(side: str, losses: Tensor, index: Tensor) -> None:
    """Stop before a NaN or infinite loss can reach the parameters."""
    finite = losses.isfinite()
    if not bool(finite.all()):
        raise NonFiniteLoss(side, index[~finite].tolist())


class AgreedGuard:
    """``require_finite`` for a rank: where one has found something, all stop, and name the same source examples."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self, side: str, losses: Tensor, index: Tensor) -> None:
        finite = losses.isfinite()
        if self._reducer.largest(int(not bool(finite.all()))):
            raise NonFiniteLoss(side, _everywhere(self._reducer, side, index[~finite].tolist()))


class DeferredGuard:
    """``require_finite`` for a device that must not be waited for: remembers on the device, speaks when asked."""

    def __init__(self, device: torch.device, reducer: Reducer | None = None) -> None:
        self._reducer = reducer or Single()
        self._calls = torch.zeros((), dtype=torch.int64, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)  # the call that found the first bad loss
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        self._where: dict[str, Tensor] = {}  # side -> the places of the first bad batch, -1 where all was well

    def __call__(self, side: str, losses: Tensor, index: Tensor) -> None:
        finite = losses.isfinite()
        places = torch.where(finite, -1, index)
        known = self._where.setdefault(side, torch.full_like(places, -1))
        if len(known) == len(places):
            known.copy_(torch.where(self._bad, known, places))
        self._calls.add_(1)
        self._first.copy_(torch.where(self._bad, self._first, self._calls))
        self._bad.logical_or_(~finite.all())

    def check(self) -> None:
        """Raise if any batch since the start had a loss that was not finite (this waits for the device)."""
        if not self._reducer.largest(int(self._bad)):
            return
        firsts = self._reducer.every(int(self._first) if bool(self._bad) else None)
        earliest = min(first for first in firsts if first is not None)  # what followed elsewhere is not to blame
        mine = firsts[self._reducer.rank] == earliest
        for side in ("source", "target"):
            places = self._where[side].tolist() if mine and side in self._where else []
            if found := _everywhere(self._reducer, side, [place for place in places if place >= 0]):
                raise NonFiniteLoss(side, found)
        raise NonFiniteLoss("source", [])


def make_guard(device: torch.device, reducer: Reducer) -> Guard:
    """The guard that stops a training, as the device and the ranks need it."""
    if device.type == "cuda":
        return DeferredGuard(device, reducer)
    return require_finite if isinstance(reducer, Single) else AgreedGuard(reducer)


def check_guard(guard: Guard) -> None:
    """Hear now what a guard may have kept for later."""
    if isinstance(guard, DeferredGuard):
        guard.check()


def _everywhere(reducer: Reducer, side: str, places: list[int]) -> list[int]:
    """Bad places of all ranks, in the whole data set: source place p of rank r is example p·ranks + r."""
    if side == "source":
        places = [place * reducer.ranks + reducer.rank for place in places]
    return sorted({place for found in reducer.every(places) for place in found})


def take_step(task: Task, state: MethodState, gradients: dict[str, Tensor], *, max_norm: float | None = None) -> None:
    """Hand the gradients to the optimizer, let it step, and leave no gradient on the model."""
    for name, parameter in task.model.named_parameters():
        parameter.grad = gradients.get(name)
    if max_norm is not None:
        nn.utils.clip_grad_norm_([p for p in task.model.parameters() if p.grad is not None], max_norm)
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


def optimizer_and_schedule(task: Task) -> tuple[Optimizer, LRScheduler | None]:
    rest(task.model)
    optimizer = task.make_optimizer([p for p in task.model.parameters() if p.requires_grad])
    schedule = None if task.make_schedule is None else task.make_schedule(optimizer, task.steps)
    return optimizer, schedule
