"""The task that a method trains, and the interface of a method: ``init`` and ``step``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from soseleto.data.batches import Batch
from soseleto.engines.interface import Losses, trainable
from soseleto.engines.model_state import parameters_of, reshard
from soseleto.errors import CannotSave, TrainingError, UsageError
from soseleto.parallel.micro_batches import Sharing
from soseleto.parallel.reducer import Reducer, Single
from soseleto.weights import Weights

MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeSchedule = Callable[[Optimizer, int], LRScheduler]


class NonFiniteLoss(TrainingError):
    """Losses of some source or target examples are NaN or infinite; ``index`` holds the examples' indices."""

    def __init__(self, side: str, index: list[int]) -> None:
        super().__init__(f"{len(index)} {side} losses are not finite")
        self.side = side
        self.index = index


class Guard:
    """Gets the losses of every batch before they can reach the parameters; this one ignores them."""

    def __call__(self, side: str, losses: Tensor, index: Tensor) -> None: ...

    def check(self) -> None:
        """Raise if a batch since the start had a non-finite loss (this synchronises with the device)."""


class LossGuard(Guard):
    """Raises for NaN and infinite losses; if one rank has any, all raise.

    deferred: record them on the device, without synchronisation, and raise in ``check()``; else at once.
    """

    def __init__(self, device: torch.device, reducer: Reducer | None = None, *, deferred: bool = True) -> None:
        self._reducer, self._deferred = reducer or Single(), deferred
        self._calls = torch.zeros((), dtype=torch.int64, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)  # the call with the first bad loss; 0: none
        # by side and size: the indices of the first bad batch, -1 where the loss is finite
        self._where: dict[tuple[str, int], Tensor] = {}

    def __call__(self, side: str, losses: Tensor, index: Tensor) -> None:
        finite = losses.isfinite()
        places = torch.where(finite, -1, index)
        known = self._where.setdefault((side, len(places)), torch.full_like(places, -1))
        was_bad = self._first > 0
        known.copy_(torch.where(was_bad, known, places))
        self._calls.add_(1)
        self._first.copy_(torch.where(was_bad | finite.all(), self._first, self._calls))
        if not self._deferred:
            self.check()

    def check(self) -> None:
        if not self._reducer.largest(int(self._first)):
            return
        firsts = self._reducer.every(int(self._first))
        earliest = min(filter(None, firsts))  # later failures are its consequences
        mine = firsts[self._reducer.rank] == earliest
        for side in ("source", "target"):
            batches = [places.tolist() for (of, _), places in self._where.items() if of == side and mine]
            places = [place for batch in batches for place in batch if place >= 0]
            if side == "source":  # in the whole data set: source index p of rank r is example p·ranks + r
                places = [place * self._reducer.ranks + self._reducer.rank for place in places]
            if bad := {place for of_rank in self._reducer.every(places) for place in of_rank}:
                raise NonFiniteLoss(side, sorted(bad))
        raise NonFiniteLoss("source", [])


@dataclass(frozen=True)
class Task:
    """A model, its losses and the settings of a training.

    Every trainable parameter belongs to one of three parts: θ (named in ``shared``), φᵗ (named in ``target_head``) or
    φˢ (the others). In noisy-label mode all are shared. ``n_source`` counts the source examples of this process;
    ``sharing`` divides the work of a step over ranks and micro-batches. ``target_shares`` are the target's class
    shares, where its batches are class-balanced; ``beliefs`` (n_source,) are where weights can start, where the labels
    were judged before the training; ``features`` are those of a source batch, (B, d), by which weights can be expected.
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
    guard: Guard = field(default_factory=Guard)
    classes: int | None = None  # of the source; None if its labels are not class indices
    sharing: Sharing = field(default_factory=Sharing)
    target_shares: Tensor | None = None
    beliefs: Tensor | None = None
    features: Callable[[Batch], Tensor] | None = None


class Method(Protocol):
    """A training method: SOSELETO or one that it is compared with.

    Its state has at least ``optimizer``, ``schedule`` and ``weights``, as ``State`` has them. After every step the
    training loop steps the schedule and calls ``state.after_step()``, where there is one: what a method does between
    steps, such as ending a phase. That is no part of the step, which may have been undone, and is never recorded as a
    CUDA graph.
    """

    @property
    def name(self) -> str: ...

    def init(self, task: Task) -> Any: ...

    def step(self, state: Any, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One update. Returns its metrics as 0-d tensors, without synchronising with a GPU."""
        ...


@dataclass(frozen=True)
class Coverage:
    """What the alignments are made of: for the log and for ``config.json``.

    share: of the trainable parameters that the alignments cover
    checked: the step in which they were last compared with ordinary backward passes; None where nothing is to be proved
    unproved: how many of the parameters have gradients too small for that
    """

    engine: str
    share: float
    checked: int | None
    unproved: int

    def sentence(self) -> str:
        return f"alignments by the {self.engine} engine cover {100 * self.share:.3g} % of the trainable parameters"


@dataclass(kw_only=True)
class State:
    """The task, its optimizer and schedule, the number of steps taken, and weights where the method has any."""

    task: Task
    weights: Weights | None = None
    optimizer: Optimizer = None  # type: ignore[assignment]  # set by ``use_optimizer``
    schedule: LRScheduler | None = None
    peak_lr: float = 0.0  # 0 without an optimizer
    steps: int = 0
    layers: tuple[str, ...] = ("",)  # that alignments are made of, as beginnings of parameter names

    @classmethod
    def start(cls, task: Task, **more: Any) -> Self:
        """The state before the first step; ``more`` are the fields a method adds."""
        state = cls(task=task, **more)
        state.use_optimizer(*optimizer_and_schedule(task))
        return state

    def use_optimizer(self, optimizer: Optimizer, schedule: LRScheduler | None = None) -> None:
        """Step with this optimizer; step sizes besides its own follow its learning rate."""
        self.optimizer, self.schedule = optimizer, schedule
        self.peak_lr = float(peak_rate(optimizer.param_groups[0]))

    @property
    def lr(self) -> Tensor | float:
        """The current learning rate."""
        return self.optimizer.param_groups[0]["lr"]

    @property
    def lr_left(self) -> Tensor | float:
        """The current learning rate as a share of the largest."""
        if not self.peak_lr:
            return 1.0
        if isinstance(self.lr, Tensor):
            return (self.lr / self.peak_lr).clamp_max(1.0)
        self.peak_lr = max(self.peak_lr, self.lr)  # of a schedule that multiplies the rate it starts from
        return self.lr / self.peak_lr

    @property
    def coverage(self) -> Coverage:
        sizes = {name: p.numel() for name, p in trainable(self.task.model).items()}
        covered = sum(n for name, n in sizes.items() if name in self.task.shared and name.startswith(self.layers))
        engine: Any = getattr(self, "engine", None)
        schedule = getattr(engine, "schedule", None)
        checked = (None, 0) if schedule is None else (schedule.last, len(schedule.unproved))
        return Coverage(getattr(engine, "name", ""), covered / max(sum(sizes.values()), 1), *checked)

    def state(self) -> dict[str, Any]:
        """What a checkpoint stores besides model, optimizer and schedule; subclasses add their own fields."""
        weights = None if self.weights is None else self.weights.state()
        return {"steps": self.steps, "peak_lr": self.peak_lr, "weights": weights}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""
        self.steps = state["steps"]
        if self.peak_lr:  # without an optimizer the weight step is constant
            self.peak_lr = state["peak_lr"] or self.peak_lr
        if state["weights"] is not None:
            self.weights = self.weights or Weights(self.task.n_source, device=self.task.device)
            self.weights.load_state(state["weights"])

    def report(self, index: Tensor, values: Tensor, *, later: int = 0) -> None:
        """For methods without persistent weights: store ``values`` as weights, and their running means as scores.

        later: p, for means in which the t-th visit counts about as tᵖ: s ← s + (p + 1)/(t + p)·(value − s)
        """
        if self.weights is None:
            self.weights = Weights(self.task.n_source, device=self.task.device)
        rows = self.weights.rows(index)
        before, scores, visits = rows
        counted = values
        if later:  # what, entering the mean with weight 1/t, moves it by that rate
            t = visits + 1.0
            counted = scores + (later + 1.0) * t / (t + later) * (values - scores)
        self.weights.step(index, values - before, counted, rows)

    def take(self, gradients: dict[str, Tensor]) -> None:
        """One step of the model."""
        take_step(self.task, self, gradients)
        self.advance(1)

    def advance(self, steps: int) -> None:
        """Count steps that were taken, or replayed by a CUDA graph."""
        self.steps += steps


def after_step(state: Any) -> None:
    """To be called after every step of a method."""
    if hasattr(state, "after_step"):
        state.after_step()


def take_step(task: Task, state: State, gradients: dict[str, Tensor]) -> None:
    """One step of the optimizer with these gradients; none are left on the model."""
    for name, parameter in parameters_of(task.model).items():
        parameter.grad = laid_out_like(parameter, gradients[name]) if name in gradients else None
    state.optimizer.step()
    state.optimizer.zero_grad(set_to_none=True)


def laid_out_like(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient with the parameter's strides, as autograd lays out ``.grad``; fused optimizers rely on that."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, dtype=gradient.dtype).copy_(gradient)


def peak_rate(group: Mapping[str, Any]) -> float | Tensor:
    """The largest learning rate of a parameter group: OneCycleLR starts from a small part of it."""
    rate: float | Tensor = group.get("initial_lr", group["lr"])
    return rate if isinstance(rate, Tensor) else max(rate, group.get("max_lr", 0.0))  # a tensor is not waited for


def optimizer_and_schedule(task: Task) -> tuple[Optimizer, LRScheduler | None]:
    reshard(task.model)
    optimizer = task.make_optimizer([p for p in task.model.parameters() if p.requires_grad])
    try:
        inspect.signature(optimizer.step).bind()
    except TypeError as error:
        raise UsageError(
            f"{type(optimizer).__name__} evaluates the loss itself, several times in a step, which no method does: "
            "write optimizer=functools.partial(torch.optim.SGD, lr=0.1), or another that steps by the gradient alone."
        ) from error
    schedule = None if task.make_schedule is None else task.make_schedule(optimizer, task.steps)
    return optimizer, schedule


def state_of(state: Any) -> dict[str, Any]:
    """A method's state besides model, optimizer and schedule; raises if it has no state() and load_state()."""
    if not hasattr(state, "state") or not hasattr(state, "load_state"):
        raise CannotSave(f"{type(state).__name__} has no state() and load_state()")
    return state.state()


def load_tree(mine: Any, saved: Any, device: torch.device) -> Any:
    """``saved`` on the device, in tensors of the same place and type as ``mine`` where there are such."""
    if isinstance(mine, Tensor):
        mine.copy_(saved)
        return mine
    if isinstance(mine, list):
        return [load_tree(its, theirs, device) for its, theirs in zip(mine, saved, strict=True)]
    if isinstance(saved, Mapping):
        return {name: load_tree((mine or {}).get(name), value, device) for name, value in saved.items()}
    return saved.to(device) if isinstance(saved, Tensor) else saved
