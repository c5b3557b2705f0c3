"""Algorithm 1 of the paper: SOSELETO.

    Initialize θ, φˢ, α, φᵗ
    while not converged
        Sample a source batch b and a target batch; denote the batch's weights by α_b
        Q ← [q_1 … q_L],  q_ℓ = ∂ℓ(y_ℓ, F(x_ℓ; θ, φˢ))/∂θ
        R ← [r_1 … r_L],  r_ℓ = ∂ℓ(y_ℓ, F(x_ℓ; θ, φˢ))/∂φˢ
        θ  ← θ  − λ_p Q α_b
        φˢ ← φˢ − λ_p R α_b
        α_b ← CLIP[0,1](α_b + λ_α λ_p Qᵀ ∂L_t/∂θ)
        φᵗ ← φᵗ − λ_p ∂L_t/∂φᵗ

Everything is evaluated at the θ the step began with. Only Qα_b, Rα_b and Qᵀ∂L_t/∂θ are formed, never Q or R. The
paper's factor 1/nˢ in q_ℓ and r_ℓ is part of ``weight_step`` and of the learning rate. "θ ← θ − λ_p …" is whatever
optimizer the user chose.

``Soseleto.paper()`` is this page and nothing else. What ``Soseleto()`` adds is composed of pieces, one for each
argument, each with its own state: see ``soseleto.pieces``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from soseleto.data.batches import Batch
from soseleto.engines import Engine, Losses, Passes, interface, make_engine
from soseleto.engines.model_state import Restore, is_recording
from soseleto.errors import UsageError
from soseleto.pieces import (
    chain,
    from_features,
    hold_when_vanished,
    label_doubt,
    last_batch,
    mean,
    normalized,
    running_mean,
    scale_by_rms,
)
from soseleto.pieces.alignment import conditions, copies
from soseleto.pieces.last_layer import WatchedLosses, with_last_layer
from soseleto.pieces.piece import REFRESH, Alignment, Direction, ParameterStates, Piece, SourceLoss, Step
from soseleto.task.task import State, Task, load_tree, optimizer_and_schedule, take_step
from soseleto.weights import Weights

SLOTS = ("direction", "alignment", "source_loss", "gradients", "scores")


@dataclass(frozen=True)
class Evaluated:
    """What a step needs, all at the same θ."""

    step: Step
    rows: Tensor  # weights, scores and visits of the batch
    gradients: dict[str, Tensor]  # for the optimizer
    numbers: dict[str, Tensor]  # for the history
    aligned: Alignment | None = None  # what has moved the weights, where they move before θ


@dataclass(frozen=True, kw_only=True)
class Soseleto:
    """The method's settings; ``init`` and ``step`` run it.

    weight_step: how far a weight moves at a visit when its alignment is of ordinary size; it follows the learning rate
        down. ``None`` freezes the weights, which is ordinary training. Without ``scale_by_rms`` it multiplies the
        alignment as it is, and is the paper's λ_α λ_p/nˢ.
    initial_weight: where every α starts; ``"beliefs"``: at the squared probabilities that labels are right, where they
        were judged before the training (``Probes(evidence=...)``), else at 1.
    direction: what source gradients are compared with: ``running_mean``, or ``last_batch``, the paper's ∂L_t/∂θ.
    alignment: pieces that change the alignments before they move weights and scores, in order. ``last_layer`` makes
        alignments of its own, without engine and direction.
    source_loss: ``normalized`` is Σαℓ/Σα, ``mean`` the paper's mean(αℓ), ``label_doubt`` a posterior of the label.
    gradients: pieces that change the gradients before the optimizer sees them, in order.
    scores: ``None`` is the running mean of an example's alignments; ``pooled_by_class`` shrinks it towards its class,
        and ``last_layer`` gives the scores a form of their own, whatever moves the weights.
    weights_first: move α before θ, as the authors' notebook does; the paper moves θ with the old α. It costs a second
        pass of the source.
    engine: how alignments are computed.

    Example:
        >>> from soseleto.pieces import chain, per_error, scale_by_rms, target_share
        >>> method = Soseleto(alignment=chain(per_error(), scale_by_rms()), gradients=target_share(0.3))
    """

    weight_step: float | None = 0.1
    initial_weight: float | Literal["beliefs"] = 1.0
    direction: Direction = field(default_factory=running_mean)
    alignment: Piece = field(default_factory=lambda: chain(scale_by_rms(), hold_when_vanished()))
    source_loss: SourceLoss = field(default_factory=normalized)
    gradients: Piece = field(default_factory=chain)
    scores: Piece | None = None
    weights_first: bool = False
    engine: str | Engine = "auto"

    name = "soseleto"
    shares_work = True  # ranks and micro-batches give what the whole batch gives

    @classmethod
    def paper(
        cls, *, weight_step: float | None = 0.2, weights_first: bool = False, engine: str | Engine = "auto"
    ) -> Self:
        """Algorithm 1 and nothing else; ``weight_step`` is λ_α λ_p/nˢ (0.2 and α from 0.5: the authors' notebook)."""
        return cls(
            weight_step=weight_step,
            initial_weight=0.5,
            direction=last_batch(),
            alignment=chain(),
            source_loss=mean(),
            gradients=chain(),
            weights_first=weights_first,
            engine=engine,
        )

    def __post_init__(self) -> None:
        if self.weight_step is not None and not (self.weight_step > 0 and math.isfinite(self.weight_step)):
            raise UsageError(
                f"weight_step must be above 0, got {self.weight_step}: "
                "give a step such as 0.1, or None to keep the weights where they are."
            )
        first = self.initial_weight
        if first != "beliefs" and not (isinstance(first, (int, float)) and 0.0 <= first <= 1.0):
            raise UsageError(f"initial_weight must lie in [0, 1], got {first!r}: give such a number, or 'beliefs'.")
        for slot in SLOTS:
            piece = getattr(self, slot)
            allowed = ("scores", "alignment", "") if slot == "scores" else (slot, "")
            if piece is not None and getattr(piece, "slot", None) not in allowed:
                raise UsageError(f"{slot}={piece!r} is not possible: take a piece for {slot} from soseleto.pieces.")
        pieces = self.alignment.pieces if isinstance(self.alignment, chain) else (self.alignment,)
        if isinstance(self.source_loss, label_doubt) and any(isinstance(piece, from_features) for piece in pieces):
            raise UsageError(
                "label_doubt doubts by the weights of the last visit, and from_features sets weights before a visit: "
                "leave label_doubt out."
            )
        if self.alignment.reads_layer and (self.direction != running_mean() or self.engine != "auto"):
            raise UsageError("last_layer makes alignments without direction and engine: leave these out.")

    def init(self, task: Task) -> SoseletoState:
        """Initialize α; θ, φˢ and φᵗ are the model's."""
        state = self.start(task)
        state.use_optimizer(*optimizer_and_schedule(task))
        return state

    def step(self, state: SoseletoState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One iteration: θ, φˢ, α_b and φᵗ move."""
        before = copies(state.task.model) if monitor else {}
        evaluated = self.evaluate(state, source, target, monitor=monitor)  # Qα_b, Rα_b, Qᵀ∂L_t/∂θ, ∂L_t/∂φᵗ
        # θ ← θ − λ_p Qα_b,  φˢ ← φˢ − λ_p Rα_b,  φᵗ ← φᵗ − λ_p ∂L_t/∂φᵗ
        take_step(state.task, state, evaluated.gradients)
        if self.weight_step is not None:
            aligned = self.move(state, evaluated)  # α_b ← CLIP[0,1](α_b + λ_α λ_p Qᵀ∂L_t/∂θ)
            if monitor:
                evaluated.numbers.update(conditions(evaluated.step, before, aligned, self._weight_step(state)))
        state.advance(1)
        return evaluated.numbers

    def evaluate(self, state: SoseletoState, source: Batch, target: Batch, *, monitor: bool = False) -> Evaluated:
        """All that a step needs, at the same θ."""
        task, rows = state.task, state.weights.rows(source.index)  # α_b, with scores and visits
        watched = state.plain_losses if isinstance(state.plain_losses, WatchedLosses) else None
        if watched is not None:
            watched.take()  # drops what an interrupted step has recorded
        if self.weight_step is not None:
            self.alignment.before(rows, state.pieces["alignment"], source, task)
        again = Restore(task.model) if self.weights_first and self.weight_step is not None else None
        coefficients = self.source_loss.coefficients(rows[0], source, task)
        passes = self._passes(state, source, target, coefficients, monitor=monitor)
        passes = self.source_loss.finish(passes, state.losses, source, task)
        task.guard("source", passes.source_losses, source.index)
        numbers = {"source_loss": task.sharing.mean(passes.source_losses, source)}
        if self._needs_target(task):
            task.guard("target", passes.target_losses, target.index)
            numbers["target_loss"] = task.sharing.mean(passes.target_losses, target)
        seen = watched.take(source=source, target=target) if watched else {}
        step = Step(task, source, target, passes, numbers.get("target_loss"), seen)
        aligned = None
        if again is not None:
            aligned = self.move(state, Evaluated(step, rows, {}, numbers))  # rows holds the new α now
            again()  # the second pass draws the same random numbers, and BatchNorm counts the batch once
            passes = self._with_new_weights(state, passes, source, rows[0])
            step = replace(step, passes=passes)
        gradients = {name: g for name, g in passes.source_gradient.items() if name not in task.target_head}
        gradients |= {name: g for name, g in passes.target_gradient.items() if name in task.target_head}
        gradients = self.gradients.update(gradients, state.pieces["gradients"], step)
        return Evaluated(step, rows, gradients, numbers, aligned)

    def _with_new_weights(self, state: SoseletoState, passes: Passes, source: Batch, alpha: Tensor) -> Passes:
        """The passes with Qα_b and Rα_b of weights that have moved."""
        task = state.task
        c = self.source_loss.coefficients(alpha, source, task)
        losses, gradient = task.sharing.gradient(task.model, state.losses.source, source, c)
        second = Passes(losses, losses[:0], losses[:0], gradient, {})
        second = self.source_loss.finish(second, state.losses, source, task)
        return replace(passes, source_gradient=second.source_gradient)

    def _passes(self, state: SoseletoState, source: Batch, target: Batch, c: Tensor, *, monitor: bool) -> Passes:
        """Losses, gradients and alignments, from as few passes through the model as possible."""
        task, sharing, all_of_target = state.task, state.task.sharing, monitor or self.gradients != chain()
        if self.weight_step is not None and not self.alignment.reads_layer:
            before = Step(task, source, target, optimizer=state.parameter_states)
            return sharing.passes(
                state.engine,
                interface.Step(
                    task.model,
                    state.losses,
                    source,
                    target,
                    to_direction=lambda g: self.direction.update(g, state.pieces["direction"], before),  # ∂L_t/∂θ
                    coefficients=c,
                    wanted=None if all_of_target else task.target_head,
                ),
            )
        source_losses, source_gradient = sharing.gradient(task.model, state.losses.source, source, c)
        target_losses, target_gradient = source_losses[:0], dict[str, Tensor]()
        if self._needs_target(task) and (self.weight_step is None or all_of_target):
            target_losses, target_gradient = sharing.gradient(task.model, state.losses.target, target)
        elif self._needs_target(task):  # a forward pass is enough
            target_losses = sharing.losses(task.model, state.losses.target, target)
        return Passes(source_losses, target_losses, source_losses[:0], source_gradient, target_gradient)

    def _needs_target(self, task: Task) -> bool:
        return self.weight_step is not None or bool(task.target_head) or self.gradients != chain()

    def move(self, state: SoseletoState, evaluated: Evaluated) -> Alignment:
        """α_b ← CLIP[0,1](α_b + λ_α λ_p Qᵀ∂L_t/∂θ); the scores follow."""
        if evaluated.aligned is not None:
            return evaluated.aligned  # weights_first
        step, rows, index = evaluated.step, evaluated.rows, evaluated.step.source.index
        assert step.passes is not None
        q = step.passes.alignment  # Qᵀ∂L_t/∂θ
        if not self.alignment.reads_layer:
            q = self.direction.correct(q, state.pieces["direction"])
        aligned = self.alignment.update(Alignment(q), state.pieces["alignment"], step)
        scored = aligned if self.scores is None else self.scores.update(aligned, state.pieces["scores"], step)
        of_visit = scored.scaled if isinstance(scored, Alignment) else aligned.scaled
        state.weights.step(index, self._weight_step(state) * aligned.gate * aligned.moving, of_visit, rows)
        if isinstance(scored, Tensor):  # the scores themselves, not an alignment that joins their mean
            rows[1].copy_(scored)
            state.weights.put(index, rows)
        return aligned

    def _weight_step(self, state: SoseletoState) -> Tensor | float:
        assert self.weight_step is not None
        return self.weight_step * state.lr_left

    def start(self, task: Task) -> SoseletoState:
        """The state without an optimizer, for a training loop that has its own."""
        first: Tensor | float = self.initial_weight if self.initial_weight != "beliefs" else 1.0
        if self.initial_weight == "beliefs" and task.beliefs is not None:
            first = task.beliefs
        weights = Weights(task.n_source, initial=first, device=task.device)
        slots = {slot: getattr(self, slot) for slot in SLOTS if slot != "source_loss"}
        pieces = {slot: piece for slot, piece in slots.items() if piece is not None}
        reads_layer = self.weight_step is not None and any(piece.reads_layer for piece in pieces.values())
        plain = with_last_layer(task.losses, task.model) if reads_layer else task.losses
        states = {slot: piece.init(task) for slot, piece in pieces.items()}

        def refresh() -> None:
            for slot, piece in pieces.items():
                piece.refresh(states[slot])

        return SoseletoState(
            task=task,
            plain_losses=plain,
            losses=self.source_loss.losses(plain, task, weights),
            engine=make_engine(self.engine),
            weights=weights,
            pieces=states,
            refresh=refresh,
            layers=getattr(self.direction, "layers", None) or ("",),
        )


@dataclass(kw_only=True)
class SoseletoState(State):
    """Weights, optimizer and the pieces' states.

    Every number is a tensor on the device that is changed in place: nothing here synchronises with a GPU, and a step
    can be recorded as a CUDA graph.
    """

    weights: Weights
    plain_losses: Losses  # the task's, with the last layer recorded where a piece reads it
    losses: Losses  # what is differentiated
    engine: Engine
    pieces: dict[str, Any]  # the state of each piece, by its argument
    refresh: Callable[[], None]  # of the pieces, between steps
    parameter_states: ParameterStates | None = None  # of the optimizer

    def use_optimizer(self, optimizer: Optimizer, schedule: LRScheduler | None = None) -> None:
        super().use_optimizer(optimizer, schedule)
        self.parameter_states = ParameterStates(optimizer, self.task.model)

    def advance(self, steps: int) -> None:
        super().advance(steps)
        if steps > 0 and self.steps % REFRESH == 0 and not is_recording():
            self.refresh()

    def state(self) -> dict[str, Any]:
        return {**super().state(), "pieces": self.pieces}

    def load_state(self, state: Any) -> None:
        super().load_state(state)
        self.pieces |= load_tree(self.pieces, state["pieces"], self.task.device)
