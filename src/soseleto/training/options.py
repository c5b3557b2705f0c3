"""The options of ``fit`` that come as objects, the shorthands for them, and the answer to an unknown argument."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from numbers import Integral
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import nn

from soseleto.data import Augment
from soseleto.data.views import AnyViews
from soseleto.errors import UsageError, did_you_mean
from soseleto.parallel.reducer import Reducer
from soseleto.suspects.probes import Share
from soseleto.task.losses import Loss
from soseleto.task.task import MakeOptimizer
from soseleto.training.defaults import CHECKPOINT_SECONDS, SUSPECT_PRECISION
from soseleto.training.history import Progress
from soseleto.training.loggers import Logger
from soseleto.training.optimizers import default_optimizer

P = ParamSpec("P")
R = TypeVar("R")
Watcher = Progress | Logger | bool
AUTOCAST = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The classifiers of transfer mode; a side without one gets a linear layer."""

    source: nn.Module | None = None
    target: nn.Module | None = None


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Target examples planted among the source with known right and wrong labels (noisy mode).

    They calibrate ``result.suspects()``, the source examples that are probably mislabelled.

    share: the share of the target to plant, or ``"auto"``
    labels_before: the labels that the target's examples had before they were checked, -1 where unknown: wrong probes
        then carry real mistakes; otherwise those that the data suggest
    precision: the share of the suspects that should really be mislabelled
    guarantee: choose the suspects so that the lower end of the interval, not its middle, reaches ``precision``
    """

    share: Share = "auto"
    labels_before: Any = None
    precision: float = SUSPECT_PRECISION
    guarantee: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.precision < 1.0:
            raise UsageError(
                f"the precision of the suspects must lie between 0 and 1, got {self.precision}: for 95 % write 0.95."
            )
        if self.share == 0 and self.labels_before is not None:
            raise UsageError("labels_before has no effect without probes: write share='auto', or leave it out.")
        if self.share == 0 and self.guarantee:
            raise UsageError("guarantee has no effect without probes: write share='auto', or leave it out.")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How a step is computed; the result of a step is the same for all but ``dtype`` and ``non_finite``.

    With BatchNorm in training mode it also depends on ``micro_batch_size`` and on the number of ranks, since statistics
    are those of each part.

    dtype: ``torch.bfloat16`` runs the model under autocast; weights, scores and alignments stay float32
    micro_batch_size: maximum number of examples per forward pass
    cuda_graph: on a GPU, record a step once and replay it; the run logs a message if that is impossible
    non_finite: for a loss or gradient that is NaN or infinite, ``"stop"`` and name the examples, or ``"skip"`` the step
        and count it
    reducer: the ranks of a training on several processes, see ``soseleto.ranks``
    """

    dtype: torch.dtype | None = None
    micro_batch_size: int | None = None
    cuda_graph: bool = True
    non_finite: Literal["stop", "skip"] = "stop"
    reducer: Reducer | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in AUTOCAST:
            raise UsageError(
                f"dtype must be torch.bfloat16, torch.float16 or None (no autocast), got {self.dtype}: leave it out to "
                "run the model as it is."
            )
        if self.micro_batch_size is not None:
            require_whole("micro_batch_size", self.micro_batch_size)
        if self.micro_batch_size is not None and self.micro_batch_size < 1:
            raise UsageError(f"micro_batch_size must be at least 1, got {self.micro_batch_size}.")
        if self.non_finite not in ("stop", "skip"):
            raise UsageError(f"non_finite must be 'stop' or 'skip', got {self.non_finite!r}.")


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the run folder gets a checkpoint, and what a folder that already holds a run means.

    seconds, steps: between two checkpoints; ``None`` disables that interval
    resume: continue an unfinished run in ``out``; ``False`` refuses a folder that holds any run
    rescue: a new or empty folder that the run is written to if ``out`` is deleted or cannot be written any more
    notes: further entries for ``config.json``; a resumed run must have the same
    """

    seconds: float | None = CHECKPOINT_SECONDS
    steps: int | None = None
    resume: bool = True
    rescue: str | Path | None = None
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds >= 0:
            raise UsageError(f"seconds between checkpoints must be 0 or more, or None, got {self.seconds}.")
        if self.steps is not None and self.steps < 1:
            raise UsageError(f"steps between checkpoints must be at least 1, or None, got {self.steps}.")


@dataclass(frozen=True)
class Balanced:
    """Class-balanced target batches of ``size`` examples: ``fit(..., target_batch_size=Balanced(32))``."""

    size: int


def require_whole(name: str, value: Any) -> None:
    """Raise for 2.5 or "3", which would fail later and deeper."""
    if not isinstance(value, Integral):
        raise UsageError(f"{name} must be a whole number, got {value!r}: write {name}=20, for example.")


def require_callable(name: str, value: Any, example: str) -> None:
    """Raise for a name or a number where a function is meant."""
    if not callable(value):
        raise UsageError(f"{name} must be a function, got {value!r}: write {name}={example}, for example.")


# Shorthands


def as_probes(given: Probes | Share | None) -> Probes:
    """``"auto"`` and a number stand for ``Probes(share=...)``, None for no probes."""
    return given if isinstance(given, Probes) else Probes(share=0.0 if given is None else given)


def as_losses(given: Loss | tuple[Loss, Loss], mode: str) -> tuple[Loss, Loss | None]:
    """The source's loss and the target's, None where it is the same function."""
    for one in given if isinstance(given, tuple | list) else [given]:
        require_callable("loss", one, "soseleto.cross_entropy")
    if not isinstance(given, tuple | list):
        return given, None
    if len(given) != 2:
        raise UsageError(f"loss must be one function or a pair (source, target), got {len(given)} entries.")
    if mode == "noisy":
        raise UsageError("a pair of losses has no effect in noisy mode, where both sides share one: give one function.")
    source, target = given
    return source, target


def as_augments(
    given: Augment | AnyViews | Sequence[Augment | None] | None,
) -> tuple[Augment | AnyViews | None, Augment | AnyViews | None]:
    """Of the source and of the target."""
    if given is None or isinstance(given, Augment | AnyViews):
        return given, given
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise UsageError("augment must be one Augment for both sides, or a pair (source, target): either may be None.")
    source, target = given
    return source, target


def as_optimizer(given: MakeOptimizer | None, lr: float | None, model: nn.Module) -> MakeOptimizer:
    """The one given, else the default for this kind of model."""
    if given is None:
        return default_optimizer(model, lr)
    if isinstance(given, torch.optim.Optimizer) or not callable(given):
        raise UsageError(
            "optimizer must be a function that makes one, since transfer mode adds heads: "
            "write optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)."
        )
    return given


def as_watchers(given: Watcher | Sequence[Watcher]) -> tuple[list[Progress], list[Logger]]:
    """The functions and the loggers of ``progress``; True stands for the live line on the terminal."""
    functions: list[Progress] = []
    loggers: list[Logger] = []
    for one in given if isinstance(given, tuple | list) else [given]:
        if one is True:
            from soseleto.training.progress import LiveLine

            functions.append(LiveLine())
        elif hasattr(one, "log") and hasattr(one, "close"):
            _require_calls(one)
            loggers.append(one)  # type: ignore[arg-type]
        elif callable(one):
            functions.append(one)
        elif one:
            raise UsageError(
                f"progress takes True, a function progress(event, record), a logger with log and close, or a list of "
                f"these, got {type(one).__name__}."
            )
    return functions, loggers


def _require_calls(one: Any) -> None:
    """Raise for a logger whose methods cannot be called as they will be, before the training and not after an epoch."""
    for name, arguments in (("log(step, numbers)", (0, {})), ("close()", ())):
        method = getattr(one, name.partition("(")[0])
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            raise UsageError(
                f"the logger {type(one).__name__} cannot be called as {name} ({error}): mend it."
            ) from error
        except ValueError:  # a method without a signature
            continue


# Unknown arguments

# Arguments that fit had in earlier versions, and what replaces them; {} is the value that was given.
RENAMED: Mapping[str, str] = {
    "weight_decay": "optimizer=soseleto.sgd(lr, weight_decay={})",
    "target_loss": "loss=(source_loss, target_loss)",
    "weight_step": "method=Soseleto(weight_step={})",
    "engine": "method=Soseleto(engine={})",
    "source_head": "heads=Heads(source={})",
    "target_head": "heads=Heads(target={})",
    "augment_source": "augment=({}, None)",
    "augment_target": "augment=(None, {})",
    "balanced_target": "target_batch_size=Balanced(32)",
    "labels_before": "probes=Probes(labels_before={})",
    "suspect_precision": "probes=Probes(precision={})",
    "precision": "compute=Compute(dtype={})",
    "micro_batch_size": "compute=Compute(micro_batch_size={})",
    "cuda_graph": "compute=Compute(cuda_graph={})",
    "non_finite": "compute=Compute(non_finite={})",
    "reducer": "compute=Compute(reducer={})",
    "checkpoint_every": "checkpoints=Checkpoints(seconds={})",
    "checkpoint_steps": "checkpoints=Checkpoints(steps={})",
    "resume": "checkpoints=Checkpoints(resume={})",
    "notes": "checkpoints=Checkpoints(notes={})",
    "loggers": "progress={}",
}


def checks_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """An unknown argument of ``function`` raises one sentence with the name to write.

    The check is made outside, so that the signature lists the real arguments and type checkers still see mistakes.
    """
    known = list(inspect.signature(function).parameters)

    @wraps(function)
    def checked(*arguments: P.args, **named: P.kwargs) -> R:
        check_arguments(function.__name__, known, named)
        return function(*arguments, **named)

    return checked


def check_arguments(function: str, known: Iterable[str], given: Mapping[str, Any]) -> None:
    known = list(known)
    for name, value in given.items():
        if name in known:
            continue
        if name in RENAMED:
            raise UsageError(f"{function} has no argument {name!r}: write {RENAMED[name].format(_shown(value))}.")
        hint = did_you_mean(name, known)
        raise UsageError(f"{function} has no argument {name!r}{hint}: see help(soseleto.{function}).")
    if given.get("lr") is not None and given.get("optimizer") is not None:
        raise UsageError("lr has no effect beside optimizer=...: give it there, as in optimizer=soseleto.sgd(0.1).")


def _shown(value: Any) -> str:
    """Plain values as they were typed, anything else as dots."""
    plain = isinstance(value, str | int | float | torch.dtype)
    return repr(value) if plain else "..."
