"""Pieces: what can be added to a step of Algorithm 1, each with its own settings and its own state.

A piece is a frozen dataclass with two calls, as in optax:

    state = piece.init(task)                      # tensors by name, kept by the caller and saved in checkpoints
    value = piece.update(value, state, step)      # the value after this piece; the state is changed in place

The state is changed in place, never replaced, so that a step can be recorded as a CUDA graph. It is a tree of
mappings and lists whose leaves are tensors. A mapping under the key ``"examples"`` holds one entry per source example
of this process; everything else is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from soseleto.data.batches import Batch
from soseleto.engines.interface import Losses, Passes
from soseleto.errors import UsageError
from soseleto.task.task import Task
from soseleto.weights import Weights

State = dict[str, Any]
REFRESH = 25  # steps between two refreshes of what pieces do not compute in every step


class ParameterStates:
    """Reads an optimizer's state by parameter name; the state is neither copied nor changed."""

    def __init__(self, optimizer: Optimizer, model: nn.Module) -> None:
        self.optimizer, self._model = optimizer, model
        self._groups = 0  # that the places are from
        self._places: dict[str, tuple[nn.Parameter, int]] = {}

    def of(self, name: str) -> tuple[Mapping[str, Any], Mapping[str, Any]] | None:
        """What the optimizer keeps about a parameter (nothing before its first step), and its group's settings.

        None for a parameter that the optimizer does not step.
        """
        groups = self.optimizer.param_groups
        if len(groups) != self._groups:
            of_group = {id(p): at for at, group in enumerate(groups) for p in group["params"]}
            named = self._model.named_parameters()
            self._places = {key: (p, of_group[id(p)]) for key, p in named if id(p) in of_group}
            self._groups = len(groups)
        if name not in self._places:
            return None
        parameter, at = self._places[name]
        return self.optimizer.state.get(parameter, {}), groups[at]


@dataclass(frozen=True)
class Step:
    """What a piece may read in one step.

    passes: losses, gradients and alignments of the step; None for pieces in ``direction``, which come before these.
    target_loss: the mean over the target batch; None where the step has not evaluated the target.
    last_layer: the model's last layer by side, "source" and "target", where a piece reads it (``reads_layer``).
    optimizer: the optimizer's state by parameter; None in a loop that has not given its optimizer.
    """

    task: Task
    source: Batch
    target: Batch
    passes: Passes | None = None
    target_loss: Tensor | None = None
    last_layer: Mapping[str, Any] = field(default_factory=dict)
    optimizer: ParameterStates | None = None


@dataclass(frozen=True)
class Alignment:
    """The alignments of a batch on their way to weights and scores.

    q: (B,) one number per source example.
    unit: what q is multiplied by before it moves weights and scores, such as one over its root mean square.
    gate: what the move of the weights is multiplied by; 0 holds them. Scores are not gated.
    evidence: (B,) what moves the weights in place of unit·q; scores still follow unit·q.
    """

    q: Tensor
    unit: Tensor | float = 1.0
    gate: Tensor | float = 1.0
    evidence: Tensor | None = None

    @property
    def scaled(self) -> Tensor:
        return self.unit * self.q

    @property
    def moving(self) -> Tensor:
        """What moves the weights, before the gate."""
        return self.scaled if self.evidence is None else self.evidence


class Piece:
    """The base of every piece: no state, no change.

    slot: the argument of ``Soseleto`` that the piece is for.
    reads_layer: whether ``update`` reads ``Step.last_layer``; in ``alignment`` it then makes the alignments itself.
    """

    slot: ClassVar[str] = ""
    reads_layer: ClassVar[bool] = False

    def init(self, task: Task) -> Any:
        """Check that the piece fits the task, and make its state."""
        return {}

    def before(self, rows: Tensor, state: Any, source: Batch, task: Task) -> None:
        """Before the passes of a batch: weights of its examples may be set, in ``rows[0]``."""

    def update(self, value: Any, state: Any, step: Step) -> Any:
        return value

    def refresh(self, state: Any) -> None:
        """Every ``REFRESH`` steps and outside of CUDA graphs: what is too slow for every step."""


class Direction(Piece):
    """From target gradients to the direction that source gradients are compared with.

    ``update`` gets the target gradient by parameter name, for some of the parameters at a time.
    """

    slot: ClassVar[str] = "direction"

    def correct(self, q: Tensor, state: Any) -> Tensor:
        """The alignments with the direction, once in a step after all of its updates; bias corrections belong here."""
        return q


class SourceLoss:
    """How the losses of a source batch and their weights make one loss."""

    slot: ClassVar[str] = "source_loss"

    def losses(self, plain: Losses, task: Task, weights: Weights) -> Losses:
        """The per-example losses to differentiate, made from the task's ``plain`` ones."""
        return plain

    def coefficients(self, alpha: Tensor, source: Batch, task: Task) -> Tensor:
        """c with Σ c_j ℓ_j the source loss of the batch."""
        raise NotImplementedError

    def finish(self, passes: Passes, losses: Losses, source: Batch, task: Task) -> Passes:
        """Correct gradient and alignments by what is known only after the losses are."""
        return passes


@dataclass(frozen=True, init=False)
class chain(Piece):
    """Apply pieces in order; ``chain()`` changes nothing. Pieces for ``alignment`` may precede one for ``scores``.

    Example:
        >>> from soseleto.pieces import chain, per_error, scale_by_rms
        >>> chain(per_error(), scale_by_rms())
        chain(per_error(), scale_by_rms())
    """

    pieces: tuple[Piece, ...]

    def __init__(self, *pieces: Piece) -> None:
        flat: list[Piece] = []
        for piece in pieces:
            flat.extend(piece.pieces if isinstance(piece, chain) else [piece])
        object.__setattr__(self, "pieces", tuple(flat))
        slots = {piece.slot for piece in flat}
        if len(slots) > 1 and [piece.slot for piece in flat] != ["alignment"] * (len(flat) - 1) + ["scores"]:
            raise UsageError(f"these pieces belong to different arguments ({', '.join(sorted(slots))}): {self}.")

    def __repr__(self) -> str:
        return f"chain({', '.join(map(repr, self.pieces))})"

    @property
    def slot(self) -> str:  # type: ignore[override]
        return self.pieces[-1].slot if self.pieces else ""

    @property
    def reads_layer(self) -> bool:  # type: ignore[override]
        return any(piece.reads_layer for piece in self.pieces)

    def init(self, task: Task) -> list[Any]:
        return [piece.init(task) for piece in self.pieces]

    def before(self, rows: Tensor, state: Any, source: Batch, task: Task) -> None:
        for piece, its in zip(self.pieces, state, strict=True):
            piece.before(rows, its, source, task)

    def update(self, value: Any, state: Any, step: Step) -> Any:
        for piece, its in zip(self.pieces, state, strict=True):
            value = piece.update(value, its, step)
        return value

    def refresh(self, state: Any) -> None:
        for piece, its in zip(self.pieces, state, strict=True):
            piece.refresh(its)
