"""The options of ``fit`` that come as objects, and the shorthands for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

import torch
from torch import nn

from soseleto.data import Augment
from soseleto.data.augment import AnyViews
from soseleto.data.feeding import Standardize
from soseleto.errors import UsageError
from soseleto.parallel.reducer import Reducer
from soseleto.suspects.probes import Share
from soseleto.task.losses import Loss

CHECKPOINT_SECONDS = 60.0
SUSPECT_PRECISION = 0.9
AUTOCAST = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What happens to inputs before the model sees them.

    augment: random changes of image batches, one ``Augment`` for both sides or a pair (source, target); for methods
        that take several views of an example ``soseleto.data.Views`` or ``TokenViews``
    standardize: centre and scale inputs by the source's statistics, or by the ``Preprocess`` given; by default only for
        uint8 images. For tables the ``preparation`` of ``soseleto.data.read_pair``, by default where a table with
        categories is read from its path; the model then gets ``preparation.width`` numbers, or the tokens of texts.
    """

    augment: Augment | AnyViews | Sequence[Augment | AnyViews | None] | None = None
    standardize: Standardize | bool | None = None


@dataclass(frozen=True, kw_only=True)
class Heads:
    """The classifiers of transfer mode; a side without one gets a linear layer."""

    source: nn.Module | None = None
    target: nn.Module | None = None


@dataclass(frozen=True, kw_only=True)
class Probes:
    """Target examples planted among the source, which show how right labels look to the training (noisy mode).

    They calibrate ``result.suspects()``, the source examples that are probably mislabelled.

    share: the share of the target to plant, or ``"auto"``; None as without ``probes=``
    labels_before: the labels that the target's examples had before they were checked, -1 where unknown: probes get
        these, and the wrong ones are counted
    precision: the share of the suspects that should really be mislabelled
    evidence: of a ``scan`` of the same source and target, in place of planted examples
    """

    share: Share | None = "auto"
    labels_before: Any = None
    precision: float = SUSPECT_PRECISION
    evidence: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0.0 < self.precision < 1.0:
            raise UsageError(
                f"the precision of the suspects must lie between 0 and 1, got {self.precision}: for 95 % write 0.95."
            )


@dataclass(frozen=True, kw_only=True)
class Compute:
    """How a step is computed; the result of a step is the same for all but ``dtype``.

    With BatchNorm in training mode it also depends on ``micro_batch_size`` and on the number of ranks, since statistics
    are those of each part.

    dtype: ``torch.bfloat16`` runs the model under autocast; weights, scores and alignments stay float32
    micro_batch_size: maximum number of examples per forward pass
    cuda_graph: on a GPU, record a step once and replay it; the run logs a message if that is impossible
    reducer: the ranks of a training on several processes, see ``soseleto.ranks``
    """

    dtype: torch.dtype | None = None
    micro_batch_size: int | None = None
    cuda_graph: bool = True
    reducer: Reducer | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None and self.dtype not in AUTOCAST:
            raise UsageError(
                f"dtype must be torch.bfloat16, torch.float16 or None (no autocast), got {self.dtype}: leave it out to "
                "run the model as it is."
            )
        if self.micro_batch_size is not None:
            require_size("micro_batch_size", self.micro_batch_size)

    @property
    def in_one_process(self) -> bool:
        return self.reducer is None or self.reducer.ranks == 1


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """When the run folder gets a checkpoint, and what a folder that already holds a run means.

    seconds, steps: between two checkpoints; ``None`` disables that interval
    resume: continue an unfinished run in ``out``; ``False`` refuses a folder that holds any run
    notes: further entries for ``config.json``; a resumed run must have the same
    """

    seconds: float | None = CHECKPOINT_SECONDS
    steps: int | None = None
    resume: bool = True
    notes: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds >= 0:
            raise UsageError(f"seconds between checkpoints must be 0 or more, or None, got {self.seconds}.")
        if self.steps is not None:
            require_size("steps between checkpoints", self.steps)


Progress = Callable[[str, dict[str, Any]], None]
Watcher = Progress | bool


def require_size(name: str, value: Any) -> None:
    """Raise for 0, 2.5 or "3", which would fail later and deeper."""
    if not isinstance(value, Integral) or value < 1:
        raise UsageError(f"{name} must be a whole number of at least 1, got {value!r}.")


def as_probes(probes: Probes | Share | None) -> Probes:
    """``"auto"`` and a number stand for ``Probes(share=...)``, None for no probes."""
    return probes if isinstance(probes, Probes) else Probes(share=probes)


def as_losses(loss: Loss | tuple[Loss, Loss], mode: str) -> tuple[Loss, Loss]:
    """The source's loss and the target's."""
    pair = tuple(loss) if isinstance(loss, tuple | list) else (loss, loss)
    if len(pair) != 2 or not all(map(callable, pair)):
        raise UsageError(
            f"loss must be a function, or in transfer mode a pair of them, got {loss!r}: write "
            "loss=soseleto.cross_entropy, for example."
        )
    if mode == "noisy" and isinstance(loss, tuple | list):
        raise UsageError("a pair of losses has no effect in noisy mode, where both sides share one: give one function.")
    return pair
