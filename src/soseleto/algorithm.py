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
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from soseleto import monitor as monitoring
from soseleto.data.batches import Batch
from soseleto.engines import Engine, Losses, Passes, make_engine
from soseleto.engines.contract import Coefficients, Direction
from soseleto.errors import UsageError
from soseleto.pieces import chain, hold_when_vanished, last_batch, mean, normalized, running_mean, scale_by_rms
from soseleto.pieces.renamed import explains_old_names
from soseleto.task.last_layer import watched
from soseleto.task.layer_inputs import InputsWatched
from soseleto.task.piece import Alignment, DirectionPiece, Piece, SourceLossPiece, Step
from soseleto.task.state import Evaluated, Moved, SoseletoState, without_alignments
from soseleto.task.task import Task, optimizer_and_schedule, take_step
from soseleto.weights import Weights

SLOTS = ("direction", "alignment", "source_loss", "gradients", "scores")


@explains_old_names
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
    weights_first: move α before θ, as the authors' notebook does; the paper moves θ with the old α.
    engine: how alignments are computed.

    Example:
        >>> from soseleto.pieces import chain, per_error, scale_by_rms, target_share
        >>> method = Soseleto(alignment=chain(per_error(), scale_by_rms()), gradients=target_share(0.3))
    """

    weight_step: float | None = 0.1
    initial_weight: float = 1.0
    direction: DirectionPiece = field(default_factory=running_mean)
    alignment: Piece = field(default_factory=lambda: chain(scale_by_rms(), hold_when_vanished()))
    source_loss: SourceLossPiece = field(default_factory=normalized)
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
        self._check_last_layer()
        if self.weights_first and (self.alignment.needs_losses or self.source_loss.needs_losses):
            raise UsageError("weights_first cannot wait for the losses that per_error and label_doubt need: drop one.")
        if self.source_loss.needs_losses and self.alignment.needs_losses:
            raise UsageError("label_doubt and per_error both divide alignments by the network's own error: drop one.")
        if self.gradients.needs_target and not self.direction.looks(1):
            raise UsageError("running_mean(every=...) leaves no target gradient for target_share: drop one.")

    def _check_last_layer(self) -> None:
        if not self._watched:
            return
        if len(self._watched) > 1:
            raise UsageError(f"last_layer reads one layer in a run, got {sorted(map(str, self._watched))}: name one.")
        if self.alignment.replaces_engine and (self.direction != running_mean() or self.engine != "auto"):
            raise UsageError("last_layer makes alignments without direction and engine: leave these out.")
        if self.weights_first:
            raise UsageError("weights_first moves the weights before last_layer has seen the step: drop one.")

    @property
    def _watched(self) -> frozenset[str | None]:
        """The layers that pieces read."""
        return self.alignment.watched | (frozenset() if self.scores is None else self.scores.watched)

    @property
    def shares_work(self) -> bool:
        """Whether ranks and micro-batches give what the whole batch gives."""
        return all(piece.shares_work for piece in (self.alignment, self.gradients, self.scores) if piece is not None)

    def init(self, task: Task) -> SoseletoState:
        """Initialize α; θ, φˢ and φᵗ are the model's."""
        state = self.start(task)
        state.follow(*optimizer_and_schedule(task))
        self.direction.require(state.optimizer)
        return state

    def start(self, task: Task) -> SoseletoState:
        """The state without an optimizer, for a training loop that has its own."""
        weights = Weights(task.n_source, initial=self.initial_weight, device=task.device)
        slots = {name: getattr(self, name) for name in SLOTS if name != "source_loss"}
        plain = self._watch(task) if self.weight_step is not None else task.losses
        return SoseletoState(
            task=task,
            plain_losses=plain,
            losses=self.source_loss.losses(plain, task, weights),
            engine=make_engine(self.engine),
            weights=weights,
            pieces={name: piece.init(task) for name, piece in slots.items() if piece is not None},
            looks=self.direction.looks,
            refresh=self._refresh,
        )

    def _watch(self, task: Task) -> Losses:
        """The losses of the task, with the layers that pieces ask for recorded in every pass."""
        losses = watched(task.losses, task.model, self._watched)
        return InputsWatched(losses, self.direction.inputs_of, task.model) if self.direction.inputs_of else losses

    def _refresh(self, states: Mapping[str, Any]) -> None:
        """Between steps: what pieces do not compute in every one."""
        self.direction.refresh(states["direction"])
        self.alignment.refresh(states["alignment"])
        if self.scores is not None:
            self.scores.refresh(states["scores"])

    def step(self, state: SoseletoState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One iteration: θ, φˢ, α_b and φᵗ move."""
        before = monitoring.copies(state.task.model) if monitor else {}
        look = monitor or state.kind
        found = self.evaluate(state, source, target, look=look, monitor=monitor)  # Qα_b, Rα_b, Qᵀ∂L_t/∂θ, ∂L_t/∂φᵗ
        take_step(state.task, state, found.gradients)  # θ ← θ − λ_p Qα_b,  φˢ ← φˢ − λ_p Rα_b,  φᵗ ← φᵗ − λ_p ∂L_t/∂φᵗ
        moved = found.moved or self.move(state, found.step, found.rows)  # α_b ← CLIP[0,1](α_b + λ_α λ_p Qᵀ∂L_t/∂θ)
        if monitor and moved is not None:
            found.numbers.update(monitoring.conditions(found.step, before, moved))
        state.advance(1)
        return found.numbers

    def evaluate(
        self, state: SoseletoState, source: Batch, target: Batch, *, look: bool = True, monitor: bool = False
    ) -> Evaluated:
        """All that a step needs, at the same θ; with ``look`` the target is evaluated too."""
        task, rows = state.task, state.weights.rows(source.index)  # α_b, with scores and visits
        watching: Any = state.plain_losses
        if watches := self.weight_step is not None and bool(self._watched or self.direction.inputs_of):
            watching.forget()
        moved: list[Moved] = []

        def after_moving(q: Tensor) -> Tensor:
            moved.append(self._move(state, Step(task, source, target), rows, q))
            return self.source_loss.coefficients(moved[0].alpha, source, task)

        first = self.weights_first and self.weight_step is not None
        c = after_moving if first else self.source_loss.coefficients(rows[0], source, task)
        look = look if self.weight_step is not None else bool(task.target_head) or self.gradients.needs_target
        found = self._passes(state, source, target, c, look=look, monitor=monitor)
        passes = self.source_loss.finish(found, state.losses, source, task)
        task.guard("source", passes.source_losses, source.index)
        numbers = {"source_loss": task.sharing.mean(passes.source_losses, source)}
        if look:
            task.guard("target", passes.target_losses, target.index)
            numbers["target_loss"] = task.sharing.mean(passes.target_losses, target)
        seen = watching.take() if watches and self._watched else {}
        if watches and self.direction.inputs_of:
            self.direction.learn(watching.take_inputs(task.sharing.sum), state.pieces["direction"], task)
        step = Step(task, source, target, passes, numbers.get("target_loss"), seen)
        if look:
            self.alignment.observe(state.pieces["alignment"], step)
        gradients = {name: g for name, g in passes.source_gradient.items() if name not in task.target_head}
        gradients |= {name: g for name, g in passes.target_gradient.items() if name in task.target_head}
        gradients = self.gradients.update(gradients, state.pieces["gradients"], step)
        return Evaluated(step, rows, gradients, numbers, moved[0] if moved else None)

    def _passes(
        self,
        state: SoseletoState,
        source: Batch,
        target: Batch,
        c: Coefficients,
        *,
        look: bool,
        monitor: bool,
    ) -> Passes:
        """Losses, gradients and alignments, from as few passes through the model as possible."""
        task, averages = state.task, state.pieces["direction"]
        if self.weight_step is None:
            return without_alignments(task, state.losses, source, target if look else None, c)
        if self.alignment.replaces_engine:
            both = monitor or self.gradients.needs_target
            return without_alignments(task, state.losses, source, target, c, target_gradient_too=both)
        if not look:
            direction, loss = self._along(state, self.direction.last(averages)), state.losses.source
            return task.sharing.source_pass(state.engine, task.model, loss, source, direction, c).without_target()
        self.direction.begin(averages)
        return task.sharing.passes(
            state.engine,
            task.model,
            state.losses,
            source,
            target,
            to_direction=lambda found: self._along(state, self.direction.update(found, averages, task)),  # ∂L_t/∂θ
            coefficients=c,
            wanted=None if monitor or self.gradients.needs_target else task.target_head,
        )

    def _along(self, state: SoseletoState, direction: Direction) -> dict[str, Tensor]:
        """The direction as the optimizer would step along it, where the piece asks for that."""
        return self.direction.precondition(direction, state.pieces["direction"], state.parameter_states)

    def move(self, state: SoseletoState, step: Step, rows: Tensor) -> Moved | None:
        """Move α_b by the alignments of a step; None where the weights are frozen."""
        if self.weight_step is None or step.passes is None:
            return None
        return self._move(state, step, rows, step.passes.alignment)

    def _move(self, state: SoseletoState, step: Step, rows: Tensor, q: Tensor) -> Moved:
        """α_b ← CLIP[0,1](α_b + λ_α λ_p Qᵀ∂L_t/∂θ); the scores follow."""
        assert self.weight_step is not None
        weight_step, index = self.weight_step * state.lr_left(), step.source.index
        if not self.alignment.replaces_engine:
            q = q * self.direction.correction(state.pieces["direction"])
        aligned = self.alignment.update(Alignment(q), state.pieces["alignment"], step)
        scored = aligned if self.scores is None else self.scores.update(aligned, state.pieces["scores"], step)
        of_visit = scored.scaled if isinstance(scored, Alignment) else aligned.scaled
        alpha = state.weights.step(index, weight_step * aligned.gate * aligned.moving, of_visit, rows)
        if isinstance(scored, Tensor):  # the scores themselves, not an alignment that joins their mean
            rows[1].copy_(scored)
            state.weights.put(index, rows)
        return Moved(alpha, weight_step, aligned)
