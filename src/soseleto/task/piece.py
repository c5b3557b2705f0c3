"""Pieces: what can be added to a step of Algorithm 1, each with its own settings and its own state.

A piece is a frozen dataclass with two calls, in the manner of optax:

    state = piece.init(task)                      # tensors by name, kept by the caller and saved in checkpoints
    value = piece.update(value, state, step)      # the value after this piece; the state is changed in place

The state is changed in place, never replaced, so that a step can be recorded as a CUDA graph. It is a tree of
mappings and lists whose leaves are tensors. A mapping under the key ``"examples"`` holds one entry per source example
of this process; everything else is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from torch import Tensor
from torch.optim import Optimizer

from soseleto.data.batches import Batch
from soseleto.engines.autograd import times
from soseleto.engines.contract import Losses, Passes
from soseleto.task.last_layer import LastLayer
from soseleto.task.layer_inputs import Moments
from soseleto.task.parameter_states import ParameterStates
from soseleto.task.task import Task
from soseleto.weights import Weights

__all__ = [
    "Alignment",
    "DirectionPiece",
    "Losses",
    "Passes",
    "Piece",
    "SourceLossPiece",
    "State",
    "Step",
    "times",
]

State = dict[str, Any]


@dataclass(frozen=True)
class Step:
    """What a piece may look at in one step.

    passes: losses, gradients and alignments of the step; None while they are still being computed.
    target_loss: the mean over the target batch; None in a step that does not evaluate the target.
    last_layer: the model's last layer on the sides that were evaluated, if a piece asks for it by ``watched``.
    """

    task: Task
    source: Batch
    target: Batch
    passes: Passes | None = None
    target_loss: Tensor | None = None
    last_layer: Mapping[str, LastLayer] = field(default_factory=dict)

    @property
    def source_losses(self) -> Tensor:
        assert self.passes is not None
        return self.passes.source_losses


@dataclass(frozen=True)
class Alignment:
    """The alignments of a batch on their way to weights and scores.

    q: (B,) one number per source example.
    unit: what q is multiplied by before it moves weights and scores, such as one over its usual size.
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

    slot: the argument of ``Soseleto`` the piece is for.
    needs_losses: ``update`` reads the source losses of the step.
    needs_target: ``update`` reads the target gradient of the step.
    replaces_engine: ``update`` makes alignments of its own, so that no engine need compute any.
    watched: the layer that it reads as ``Step.last_layer``, by name; None is the last one, the empty set none.
    shares_work: False where it compares examples of one batch, which ranks and micro-batches keep apart.
    """

    slot: ClassVar[str] = ""
    needs_losses: ClassVar[bool] = False
    needs_target: ClassVar[bool] = False
    replaces_engine: ClassVar[bool] = False
    watched: ClassVar[frozenset[str | None]] = frozenset()
    shares_work: ClassVar[bool] = True

    def init(self, task: Task) -> State:
        """Check that the piece fits the task, and make its state."""
        return {}

    def observe(self, state: Any, step: Step) -> None:
        """See the losses of a step that evaluated the target, once they are known."""

    def update(self, value: Any, state: Any, step: Step) -> Any:
        return value

    def refresh(self, state: Any) -> None:
        """Between steps, once in a while and outside of CUDA graphs: what need not be computed in every step."""


class DirectionPiece(Protocol):
    """From target gradients to the direction that source gradients are compared with.

    inputs_of: layers whose inputs it learns about. Its ``update`` then gets all of the target gradient at once.
    """

    slot: ClassVar[str]

    @property
    def inputs_of(self) -> tuple[str, ...]:
        return ()

    def learn(self, moments: Mapping[str, Moments], state: State, task: Task) -> None:
        """The moments of these layers' inputs in the source batch of a step, after its passes."""
        return

    def refresh(self, state: State) -> None:
        """Between steps, once in a while and outside of CUDA graphs."""
        return

    def init(self, task: Task) -> State: ...

    def looks(self, taken: int) -> bool:
        """Whether the step after ``taken`` steps evaluates the target."""
        ...

    def begin(self, state: State) -> None:
        """A step that evaluates the target begins."""
        ...

    def update(self, found: dict[str, Tensor], state: State, task: Task) -> dict[str, Tensor]:
        """The direction over the parameters in ``found``; called for some of the parameters at a time."""
        ...

    def last(self, state: State) -> Mapping[str, Tensor]:
        """The direction as the last target batch left it, for steps that do not evaluate the target."""
        ...

    def correction(self, state: State) -> Tensor | float:
        """What alignments with the direction must be multiplied by."""
        ...

    def require(self, optimizer: Optimizer | None) -> None:
        """Raise for an optimizer that the direction cannot follow; None where a loop has not given its own."""
        return

    def precondition(
        self, found: Mapping[str, Tensor], state: State, kept: ParameterStates | None
    ) -> dict[str, Tensor]:
        """What ``update`` and ``last`` returned, as the optimizer would step along it."""
        return found if isinstance(found, dict) else dict(found)


class SourceLossPiece(Protocol):
    """How the losses of a source batch and their weights make one loss."""

    slot: ClassVar[str]
    needs_losses: ClassVar[bool]

    def losses(self, plain: Losses, task: Task, weights: Weights) -> Losses:
        """The per-example losses to differentiate, made from the task's ``plain`` ones."""
        ...

    def coefficients(self, alpha: Tensor, source: Batch, task: Task) -> Tensor:
        """c with Σ c_j ℓ_j the source loss of the batch."""
        ...

    def finish(self, passes: Passes, losses: Losses, source: Batch, task: Task) -> Passes:
        """Correct gradient and alignments for what only the computed losses can tell."""
        ...
