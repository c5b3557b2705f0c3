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
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import Tensor

from soseleto.data.batches import Batch
from soseleto.engines import Engine, Passes, make_engine
from soseleto.engines.unchanged import Restore
from soseleto.errors import UsageError
from soseleto.pieces import chain, hold_when_vanished, last_batch, mean, normalized, running_mean, scale_by_rms
from soseleto.pieces.conditions import Moved, conditions, copies
from soseleto.pieces.piece import Alignment, Direction, Piece, SourceLoss, Step
from soseleto.task.last_layer import WatchedLosses, with_last_layer
from soseleto.task.state import SoseletoState, without_alignments
from soseleto.task.task import Task, optimizer_and_schedule, take_step
from soseleto.weights import Weights

SLOTS = ("direction", "alignment", "source_loss", "gradients", "scores")


@dataclass(frozen=True)
class Evaluated:
    """What a step needs, all at the same θ.

    rows: weights, scores and visits of the batch; moved: how its weights moved, where they have moved already.
    """

    step: Step
    rows: Tensor
    gradients: dict[str, Tensor]  # for the optimizer
    numbers: dict[str, Tensor]  # for the history
    moved: Moved | None = None


@dataclass(frozen=True, kw_only=True)
class Soseleto:
    """The method's settings; ``init`` and ``step`` run it.

    weight_step: how far a weight moves at a visit when its alignment is of ordinary size; it follows the learning rate
        down. ``None`` freezes the weights, which is ordinary training. Without ``scale_by_rms`` it multiplies the
        alignment as it is, and is the paper's λ_α λ_p/nˢ.
    initial_weight: where every α starts.
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
    initial_weight: float = 1.0
    direction: Direction = field(default_factory=running_mean)
    alignment: Piece = field(default_factory=lambda: chain(scale_by_rms(), hold_when_vanished()))
    source_loss: SourceLoss = field(default_factory=normalized)
    gradients: Piece = field(default_factory=chain)
    scores: Piece | None = None
    weights_first: bool = False
    engine: str | Engine = "auto"

    name = "soseleto"

    @classmethod
    def paper(cls, *, weight_step: float | None = 0.2, engine: str | Engine = "auto") -> Self:
        """Algorithm 1 and nothing else; ``weight_step`` is λ_α λ_p/nˢ (0.2 and α from 0.5: the authors' notebook)."""
        plain = {"direction": last_batch(), "alignment": chain(), "source_loss": mean(), "gradients": chain()}
        return cls(weight_step=weight_step, initial_weight=0.5, engine=engine, **plain)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.weight_step is not None and not (self.weight_step > 0 and math.isfinite(self.weight_step)):
            raise UsageError(
                f"weight_step must be above 0, got {self.weight_step}: "
                "give a step such as 0.1, or None to keep the weights where they are."
            )
        for slot in SLOTS:
            piece = getattr(self, slot)
            allowed = ("scores", "alignment", "") if slot == "scores" else (slot, "")
            if piece is not None and getattr(piece, "slot", None) not in allowed:
                raise UsageError(f"{slot}={piece!r} is not possible: take a piece for {slot} from soseleto.pieces.")
        if self.alignment.reads_layer and (self.direction != running_mean() or self.engine != "auto"):
            raise UsageError("last_layer makes alignments without direction and engine: leave these out.")

    @property
    def shares_work(self) -> bool:
        """Ranks and micro-batches give what the whole batch gives."""
        return True

    def init(self, task: Task) -> SoseletoState:
        """Initialize α; θ, φˢ and φᵗ are the model's."""
        state = self.start(task)
        state.follow(*optimizer_and_schedule(task))
        return state

    def start(self, task: Task) -> SoseletoState:
        """The state without an optimizer, for a training loop that has its own."""
        weights = Weights(task.n_source, initial=self.initial_weight, device=task.device)
        plain = with_last_layer(task.losses, task.model) if self._reads_layer else task.losses
        return SoseletoState(
            task=task,
            plain_losses=plain,
            losses=self.source_loss.losses(plain, task, weights),
            engine=make_engine(self.engine),
            weights=weights,
            pieces={name: piece.init(task) for name, piece in self._pieces.items()},
            refresh=self._refresh,
        )

    @property
    def _pieces(self) -> dict[str, Piece]:
        """The pieces with a state, by their arguments."""
        pieces = {name: getattr(self, name) for name in SLOTS if name != "source_loss"}
        return {name: piece for name, piece in pieces.items() if piece is not None}

    @property
    def _reads_layer(self) -> bool:
        return self.weight_step is not None and any(piece.reads_layer for piece in self._pieces.values())

    def _refresh(self, states: Mapping[str, Any]) -> None:
        for name, piece in self._pieces.items():
            piece.refresh(states[name])

    def step(self, state: SoseletoState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One iteration: θ, φˢ, α_b and φᵗ move."""
        before = copies(state.task.model) if monitor else {}
        found = self.evaluate(state, source, target, monitor=monitor)  # Qα_b, Rα_b, Qᵀ∂L_t/∂θ, ∂L_t/∂φᵗ
        take_step(state.task, state, found.gradients)  # θ ← θ − λ_p Qα_b,  φˢ ← φˢ − λ_p Rα_b,  φᵗ ← φᵗ − λ_p ∂L_t/∂φᵗ
        moved = found.moved or self.move(state, found)  # α_b ← CLIP[0,1](α_b + λ_α λ_p Qᵀ∂L_t/∂θ)
        if monitor and moved is not None:
            found.numbers.update(conditions(found.step, before, moved))
        state.advance(1)
        return found.numbers

    def evaluate(self, state: SoseletoState, source: Batch, target: Batch, *, monitor: bool = False) -> Evaluated:
        """All that a step needs, at the same θ."""
        task, rows = state.task, state.weights.rows(source.index)  # α_b, with scores and visits
        watched = state.plain_losses if isinstance(state.plain_losses, WatchedLosses) else None
        if watched is not None:
            watched.take()  # drops what an interrupted step has recorded
        again = Restore(task.model) if self._moves_first else None
        c = self.source_loss.coefficients(rows[0], source, task)
        passes = self._passes(state, source, target, c, monitor=monitor)
        passes = self.source_loss.finish(passes, state.losses, source, task)
        task.guard("source", passes.source_losses, source.index)
        numbers = {"source_loss": task.sharing.mean(passes.source_losses, source)}
        if self._needs_target(task):
            task.guard("target", passes.target_losses, target.index)
            numbers["target_loss"] = task.sharing.mean(passes.target_losses, target)
        step = Step(task, source, target, passes, numbers.get("target_loss"), watched.take() if watched else {})
        found = Evaluated(step, rows, {}, numbers)
        if again is not None:
            again()  # the second pass draws the same random numbers, and statistics count the batch once
            found = self._moved_first(state, found)
        return replace(found, gradients=self._gradients(state, found.step))

    def _gradients(self, state: SoseletoState, step: Step) -> dict[str, Tensor]:
        """What the optimizer gets for every parameter."""
        passes, of_target = step.passes, step.task.target_head
        assert passes is not None
        gradients = {name: g for name, g in passes.source_gradient.items() if name not in of_target}
        gradients |= {name: g for name, g in passes.target_gradient.items() if name in of_target}
        changed: dict[str, Tensor] = self.gradients.update(gradients, state.pieces["gradients"], step)
        return changed

    @property
    def _moves_first(self) -> bool:
        return self.weights_first and self.weight_step is not None

    def _moved_first(self, state: SoseletoState, found: Evaluated) -> Evaluated:
        """The weights have moved before θ, whose gradient is that of the new ones."""
        moved, task, source = self.move(state, found), state.task, found.step.source
        assert moved is not None
        assert found.step.passes is not None
        c = self.source_loss.coefficients(moved.alpha, source, task)
        second = self.source_loss.finish(
            without_alignments(task, state.losses, source, None, c), state.losses, source, task
        )
        passes = replace(found.step.passes, source_gradient=second.source_gradient)
        return replace(found, step=replace(found.step, passes=passes), moved=moved)

    def _needs_target(self, task: Task) -> bool:
        return self.weight_step is not None or bool(task.target_head) or self.gradients != chain()

    def _passes(self, state: SoseletoState, source: Batch, target: Batch, c: Tensor, *, monitor: bool) -> Passes:
        """Losses, gradients and alignments, from as few passes through the model as possible."""
        task, all_of_target = state.task, monitor or self.gradients != chain()
        if self.weight_step is None:
            return without_alignments(task, state.losses, source, target if self._needs_target(task) else None, c)
        if self.alignment.reads_layer:
            return without_alignments(task, state.losses, source, target, c, target_gradient_too=all_of_target)
        before = Step(task, source, target, optimizer=state.parameter_states)
        return task.sharing.passes(
            state.engine,
            task.model,
            state.losses,
            source,
            target,
            to_direction=lambda g: self.direction.update(g, state.pieces["direction"], before),  # ∂L_t/∂θ
            coefficients=c,
            wanted=None if all_of_target else task.target_head,
        )

    def move(self, state: SoseletoState, found: Evaluated) -> Moved | None:
        """α_b ← CLIP[0,1](α_b + λ_α λ_p Qᵀ∂L_t/∂θ); the scores follow. None where the weights are frozen."""
        step, rows = found.step, found.rows
        if self.weight_step is None or step.passes is None:
            return None
        weight_step, index, q = self.weight_step * state.lr_left(), step.source.index, step.passes.alignment
        if not self.alignment.reads_layer:
            q = self.direction.correct(q, state.pieces["direction"])
        aligned = self.alignment.update(Alignment(q), state.pieces["alignment"], step)
        scored = aligned if self.scores is None else self.scores.update(aligned, state.pieces["scores"], step)
        of_visit = scored.scaled if isinstance(scored, Alignment) else aligned.scaled
        alpha = state.weights.step(index, weight_step * aligned.gate * aligned.moving, of_visit, rows)
        if isinstance(scored, Tensor):  # the scores themselves, not an alignment that joins their mean
            rows[1].copy_(scored)
            state.weights.put(index, rows)
        return Moved(alpha, weight_step, aligned)
