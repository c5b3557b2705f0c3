"""Algorithm 1 of the paper: SOSELETO.

    Sample a source batch b, its weights α_b, and a target batch
    Q ← [q_1 … q_L],  q_ℓ = ∂ℓ(y_ℓ, F(x_ℓ; θ, φˢ))/∂θ          (without the paper's 1/nˢ, see weight_step)
    θ  ← θ  − λ_p Q α_b
    φˢ ← φˢ − λ_p R α_b
    α_b ← CLIP[0,1](α_b + λ_α λ_p Qᵀ ∂L_t/∂θ)
    φᵗ ← φᵗ − λ_p ∂L_t/∂φᵗ

Everything is evaluated at the θ the step began with. "θ ← θ − λ_p …" is whatever optimizer the user chose. What we
add to the page, each of it a setting: the target gradient may be averaged over steps, the weight step may be measured
in units of the alignments' own size, and the weighted loss may be divided by Σα.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from soseleto.data.batch import Batch
from soseleto.engines import Engine, Passes, make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.shards import whole
from soseleto.engines.unchanged import unchanged
from soseleto.errors import UsageError
from soseleto.extensions.class_pooling import Pooling
from soseleto.extensions.domain_loss import DomainLoss
from soseleto.extensions.label_doubt import DoubtedLosses, doubt
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.task.task import Task, optimizer_and_schedule, take_step
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Soseleto:
    """The method's settings; ``init`` and ``step`` run it.

    weight_step: how far a weight moves at a visit when its alignment is of ordinary size (``scale_free``): the step is
        weight_step·q/rms(q), with the rms over all alignments so far. It follows the learning rate down. In the
        paper's terms λ_α = weight_step·nˢ/(λ_p·rms(q)). ``None`` freezes the weights, which is ordinary training.
    scale_free: ``False`` takes weight_step·q as it is; then weight_step = λ_α λ_p/nˢ of the paper.
    initial_weight: where every α starts. The authors' notebook starts at 0.5.
    normalize_weights: the source loss is Σαℓ/Σα over the batch; ``False`` is the paper's mean(αℓ).
    target_average: the target gradient used for alignments is a running mean with this decay; 0 is the paper's single
        batch. A batch of 32 gives a direction that is mostly noise; tens of steps give one that is mostly signal.
    aligned: alignments are over those parameters of θ whose names begin with one of these; ``None`` takes all of θ.
        A large layer can drown in noise what a small one knows.
    pool_classes: an example's score is its mean alignment drawn towards that of its class, by as much as its own is
        noise (see ``pooling``). For sources with whole classes of no use. Weights follow the example's own alignments:
        a class that helps less than others still has examples that help.
    per_error: alignments are divided by the size of the example's own error, 1 − exp(−ℓ), which for cross-entropy is
        one minus the probability of its label. A gradient is an error times a direction: this compares directions, so
        that examples which are learned already still tell whether they help.
    doubt_labels: a weight is the belief in the label, and an example counts by what is left of it once the network has
        been heard (see ``doubt``); the source loss that is told is then the doubted one. For wrong labels. An example
        that counts no more cannot hurt, so weights and scores tell less about it.
    weights_first: the authors' notebook moves α before θ; the paper (and the default) moves θ with the old α.
    target_share: how much of θ's step is the target's own gradient. 0 is the paper, whose target reaches θ through the
        weights alone; more makes use of clean labels that are too many to be learned by heart.
    domain_loss: a loss on the trunk's features of both batches that joins θ's step (transfer mode); see ``domain``.
    max_norm: clip the norm of the gradient that the optimizer sees.
    vanished: when the running target loss falls below this share of its first value, alignments carry no signal and
        the weights are held.
    engine: how alignments are computed.
    reuse_target: exactness for speed, off at 1: the target is looked at every so many steps only, and the steps
        between compare with what was seen last. For noisy-label mode, where the target takes no step of its own.
    """

    weight_step: float | None = 0.1
    scale_free: bool = True
    initial_weight: float = 1.0
    normalize_weights: bool = True
    target_average: float = 0.99
    aligned: tuple[str, ...] | None = None
    pool_classes: bool = False
    per_error: bool = False
    doubt_labels: bool = False
    weights_first: bool = False
    target_share: float = 0.0
    domain_loss: DomainLoss | None = None
    max_norm: float | None = None
    vanished: float = 1e-3
    engine: str | Engine = "auto"
    reuse_target: int = 1

    name = "soseleto"

    @property
    def shares_work(self) -> bool:
        """Pooling compares the examples of a class, and a domain loss those of both batches, wherever they are."""
        return not self.pool_classes and self.domain_loss is None

    def __post_init__(self) -> None:
        if self.weight_step is not None and not (self.weight_step > 0 and math.isfinite(self.weight_step)):
            raise UsageError(
                f"weight_step must be above 0, got {self.weight_step}: "
                "give a step such as 0.1, or None to keep the weights where they are."
            )
        if not 0.0 <= self.target_average < 1.0:
            raise UsageError(f"target_average must lie in [0, 1), got {self.target_average}: 0 averages nothing.")
        if not 0.0 <= self.target_share < 1.0:
            raise UsageError(f"target_share must lie in [0, 1), got {self.target_share}: 0 is the paper's.")
        if self.max_norm is not None and self.max_norm <= 0:
            raise UsageError(f"max_norm must be above 0, got {self.max_norm}: leave it out to clip nothing.")
        if self.per_error and self.weights_first:
            raise UsageError("per_error needs the losses, which weights_first cannot wait for: drop one.")
        if self.doubt_labels and self.weights_first:
            raise UsageError("doubt_labels needs the losses, which weights_first cannot wait for: drop one.")
        if self.doubt_labels and self.per_error:
            raise UsageError("doubt_labels and per_error both divide alignments by what the network says: drop one.")
        if self.reuse_target < 1:
            raise UsageError(f"reuse_target must be at least 1, got {self.reuse_target}: 1 looks at every step.")
        if self.reuse_target > 1 and self.target_share:
            raise UsageError("reuse_target leaves no target gradient for target_share between two looks: drop one.")

    def init(self, task: Task) -> SoseletoState:
        if self.domain_loss is not None and not isinstance(task.model, TrunkAndHeads):
            raise UsageError("domain_loss compares the features of a trunk: say mode='transfer', or leave it out.")
        weights = Weights(task.n_source, initial=self.initial_weight, device=task.device)
        if task.target_head and self.reuse_target > 1:
            raise UsageError("reuse_target would leave the target head untrained between two looks: drop it.")
        if self.doubt_labels:
            task = replace(task, losses=doubt(task.losses, weights, task.classes))
        state = SoseletoState.start(task, make_engine(self.engine), weights, every=self.reuse_target)
        if self.aligned is not None:
            state.compared = frozenset(name for name in task.shared if name.startswith(self.aligned))
            if not state.compared:
                raise UsageError(
                    f"aligned={self.aligned} fits none of θ's parameters: {', '.join(sorted(task.shared))}."
                )
        if self.pool_classes:
            if task.classes is None:
                raise UsageError("pool_classes needs class indices as source labels: leave it out.")
            state.pooling = Pooling(task.n_source, task.classes, task.device)
        return state

    def step(self, state: SoseletoState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One iteration of Algorithm 1."""
        if self.weight_step is None:
            return self._frozen_step(state, source, target)
        task, model, losses = state.task, state.task.model, state.task.losses
        weight_step = self.weight_step * state.lr_left()
        rows = state.weights.rows(source.index)  # α_b, with scores and visits

        def new_coefficients(q: Tensor) -> Tensor:
            return self.coefficients(task, self._move(state, source, q, weight_step, rows), source)

        coefficients = new_coefficients if self.weights_first else self.coefficients(task, rows[0], source)
        fresh = monitor or state.looks
        if fresh:
            state.steps.add_(1)
            passes = task.sharing.passes(
                state.engine,
                model,
                losses,
                source,
                target,
                to_direction=lambda found: state.average(found, self.target_average),  # ∂L_t/∂θ
                coefficients=coefficients,
            )
        else:
            passes = task.sharing.source_pass(
                state.engine, model, losses.source, source, state.averages, coefficients
            ).without_target()
        if isinstance(losses, DoubtedLosses):
            w = losses.counts(passes.source_losses, source)
            of_source = self._normalized(task, passes.source_gradient, w, source)
            passes = replace(passes, source_gradient=of_source, alignment=passes.alignment / w)
        if self.per_error:
            passes = replace(passes, alignment=per_error(passes.alignment, passes.source_losses))
        task.guard("source", passes.source_losses, source.index)
        numbers = {"source_loss": task.sharing.mean(passes.source_losses, source)}
        if fresh:
            task.guard("target", passes.target_losses, target.index)
            numbers["target_loss"] = task.sharing.mean(passes.target_losses, target)
            state.hear(numbers["target_loss"], self.vanished)
        gradients = self._gradients(task, passes.source_gradient, passes.target_gradient)
        gradients = self._with_domain(task, gradients, source, target)
        before = _copies(model) if monitor else {}
        take_step(task, state, gradients, max_norm=self.max_norm)  # θ, φˢ and φᵗ step, with the old α
        if not self.weights_first:
            self._move(state, source, passes.alignment, weight_step, rows)
        if monitor:
            multiplier = weight_step * state.alive * self._unit(state)  # α moved by multiplier·q
            numbers |= _monitor(state, passes, before, source, target, multiplier)
        state.advance(1)
        return numbers

    def _move(
        self, state: SoseletoState, source: Batch, q: Tensor, weight_step: Tensor | float, rows: Tensor
    ) -> Tensor:
        """α_b ← CLIP(α_b + λ_α λ_p Qᵀ ∂L_t/∂θ); returns the new α_b."""
        useful = q * state.mean_so_far(self.target_average)
        if self.scale_free:
            state.measure(useful, source.total)
        unit = state.one_over_size if self.scale_free else 1.0
        scaled = unit * useful
        moved = state.weights.step(source.index, weight_step * state.alive * scaled, scaled, rows)
        if state.pooling is not None:
            pooled = state.pooling.estimate(source.index, source.labels, useful)
            state.weights.scores[source.index] = (unit * pooled).to(torch.float32)  # a mean over visits already
        return moved

    def _unit(self, state: SoseletoState) -> Tensor | float:
        """What q was multiplied by: the start of the running mean made good, in units of the alignments' own size."""
        return state.mean_so_far(self.target_average) * (state.one_over_size if self.scale_free else 1.0)

    def coefficients(self, task: Task, alpha: Tensor, source: Batch) -> Tensor:
        """c with Σ c_j ℓ_j the weighted source loss: Σαℓ/Σα, or the paper's mean(αℓ)."""
        if self.doubt_labels:
            return torch.full_like(alpha, 1.0 / source.total)  # α is in the losses themselves
        if self.normalize_weights:
            return alpha / task.sharing.sum(alpha.sum()).clamp_min(torch.finfo(alpha.dtype).tiny)
        return alpha / source.total

    def _normalized(self, task: Task, gradients: dict[str, Tensor], w: Tensor, source: Batch) -> dict[str, Tensor]:
        """From the gradient of mean(d) to Σw∂ℓ/Σw."""
        if not self.normalize_weights:
            return gradients
        mean = task.sharing.mean(w, source)
        return {name: (g / mean).to(g.dtype) for name, g in gradients.items()}

    def _frozen_step(self, state: SoseletoState, source: Batch, target: Batch) -> dict[str, Tensor]:
        """Ordinary training with the weights where they are: no alignment, and a target pass only for φᵗ."""
        task = state.task
        c = self.coefficients(task, state.weights.take(source.index), source)
        losses, of_source = task.sharing.gradient(task.model, task.losses.source, source, "source", c)
        task.guard("source", losses, source.index)
        if isinstance(task.losses, DoubtedLosses):
            of_source = self._normalized(task, of_source, task.losses.counts(losses, source), source)
        of_target: dict[str, Tensor] = {}
        numbers = {"source_loss": task.sharing.mean(losses, source)}
        if task.target_head or self.target_share:
            target_losses, of_target = task.sharing.gradient(task.model, task.losses.target, target, "target")
            task.guard("target", target_losses, target.index)
            numbers["target_loss"] = task.sharing.mean(target_losses, target)
        gradients = self._with_domain(task, self._gradients(task, of_source, of_target), source, target)
        take_step(task, state, gradients, max_norm=self.max_norm)
        return numbers

    def _gradients(self, task: Task, of_source: dict[str, Tensor], of_target: dict[str, Tensor]) -> dict[str, Tensor]:
        """Qα_b for θ (with the target's share), Rα_b for φˢ, ∂L_t/∂φᵗ for φᵗ."""
        found = {k: g for k, g in of_source.items() if k not in task.target_head}
        if self.target_share:
            shared = found.keys() & of_target.keys() & task.shared
            found |= {k: torch.lerp(found[k], of_target[k], self.target_share) for k in shared}
        return found | {k: g for k, g in of_target.items() if k in task.target_head}

    def _with_domain(self, task: Task, gradients: dict[str, Tensor], source: Batch, target: Batch) -> dict[str, Tensor]:
        """The domain loss needs a forward of its own: it joins what Algorithm 1 keeps apart, the two batches."""
        if self.domain_loss is None:
            return gradients
        assert isinstance(task.model, TrunkAndHeads)
        both = task.model.trunk(torch.cat([source.inputs, target.inputs]))
        loss = self.domain_loss(both[: len(source)], both[len(source) :])
        found = gradient(loss, {name: p for name, p in trainable(task.model).items() if name in task.shared})
        return gradients | {name: gradients[name] + g for name, g in found.items()}


def per_error(alignment: Tensor, losses: Tensor) -> Tensor:
    """q/(1 − exp(−ℓ)): the alignment of an example's gradient as if its error were of size one."""
    return alignment / (_SMALLEST_ERROR - torch.expm1(-losses.to(alignment.dtype)))


_SMALLEST_ERROR = 1e-4
# of SoseletoState
_NUMBERS = ("steps", "moves", "square", "target_loss", "first_target_loss", "alive")


@dataclass
class SoseletoState:
    """What is carried from step to step, beside the model: weights, optimizer, and running means.

    Every number is a tensor on the device that is changed in place: nothing here waits for a GPU, and a step can be
    replayed as a CUDA graph.
    """

    task: Task
    engine: Engine
    optimizer: Optimizer
    schedule: LRScheduler | None
    first_lr: float
    weights: Weights
    averages: dict[str, Tensor]  # the running target gradient, a sum that starts at 0
    steps: Tensor  # that looked at the target, so far
    moves: Tensor  # of the weights, so far
    square: Tensor  # the sum over moves of mean(q²)
    target_loss: Tensor  # running mean
    first_target_loss: Tensor
    alive: Tensor  # 1 while the target loss carries a signal, else 0
    compared: frozenset[str]  # the parameters that alignments are over
    pooling: Pooling | None = None
    every: int = 1  # steps from one look at the target to the next
    taken: int = 0  # steps

    @classmethod
    def start(cls, task: Task, engine: Engine, weights: Weights, *, every: int = 1) -> SoseletoState:
        optimizer, schedule = optimizer_and_schedule(task)

        def number(value: float = 0.0, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((), value, dtype=dtype, device=task.device)

        return cls(
            task=task,
            engine=engine,
            optimizer=optimizer,
            schedule=schedule,
            first_lr=float(optimizer.param_groups[0].get("initial_lr", optimizer.param_groups[0]["lr"])),
            weights=weights,
            averages={},
            steps=number(dtype=torch.float64),
            moves=number(dtype=torch.float64),
            square=number(torch.finfo(torch.float32).tiny, dtype=torch.float64),
            target_loss=number(),
            first_target_loss=number(),
            alive=number(1.0),
            compared=task.shared,
            every=every,
        )

    @property
    def looks(self) -> bool:
        """Whether the next step looks at the target."""
        return self.taken % self.every == 0

    @property
    def kind(self) -> bool:
        """A recorded step is replayed for steps of its own kind only."""
        return self.looks

    def advance(self, steps: int) -> None:
        """Steps were taken, by ``step`` itself or by replaying it."""
        self.taken += steps

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps beside model, optimizer and schedule."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        pooling = None if self.pooling is None else self.pooling.state()
        state = {"weights": self.weights.state(), "averages": self.averages, "numbers": numbers}
        return {**state, "pooling": pooling, "taken": self.taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` gave."""
        self.weights.load_state(state["weights"])
        self.averages = {name: mean.to(self.task.device) for name, mean in state["averages"].items()}
        for name in _NUMBERS:
            setattr(self, name, state["numbers"][name].to(self.task.device))
        self.taken = state["taken"]
        if self.pooling is not None:
            self.pooling.load_state(state["pooling"])

    def lr_left(self) -> Tensor | float:
        """The learning rate now, as a share of the first: the weight step follows the schedule."""
        return self.optimizer.param_groups[0]["lr"] / self.first_lr if self.first_lr else 1.0

    def average(self, found: dict[str, Tensor], decay: float) -> dict[str, Tensor]:
        """The running mean of the target gradient over θ's parameters; ``mean_so_far`` tells what its start cost."""
        found = {name: g for name, g in found.items() if name in self.compared}
        if decay == 0.0 and self.every == 1:
            return found
        for name, g in found.items():
            if name not in self.averages:
                self.averages[name] = torch.zeros_like(g)
        means = {name: self.averages[name] for name in found}
        if len(found) == 1:  # a layer's weight; on a GPU the call for many would leave most of it idle
            for name, g in found.items():
                means[name].lerp_(g, 1.0 - decay)
        elif found:
            torch._foreach_lerp_(list(means.values()), list(found.values()), 1.0 - decay)
        return means

    def mean_so_far(self, decay: float) -> Tensor | float:
        """What a running mean that started at 0 must be multiplied by after m steps: 1/(1 − decayᵐ)."""
        return (1.0 - torch.pow(decay, self.steps)).reciprocal() if decay else 1.0

    def hear(self, target_loss: Tensor, vanished: float) -> None:
        """Follow the target loss; once it has vanished, so has every alignment's meaning, and the weights are held."""
        target_loss = target_loss.to(torch.float32)
        first = self.first_target_loss == 0  # until one is heard
        for loss in (self.target_loss, self.first_target_loss):
            torch.where(first, target_loss, loss, out=loss)
        self.target_loss.lerp_(target_loss, 0.1)
        torch.gt(self.target_loss, vanished * self.first_target_loss, out=self.alive)

    def measure(self, q: Tensor, total: int) -> None:
        """These alignments, and those of other ranks, join ``one_over_size``."""
        self.moves.add_(1)
        self.square.add_(self.task.sharing.sum(torch.dot(q, q)), alpha=1.0 / total)

    @property
    def one_over_size(self) -> Tensor:
        """One over the root mean square of all alignments so far."""
        return (self.moves / self.square).sqrt_()


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainable(model).items()}


def _monitor(
    state: SoseletoState,
    passes: Passes,
    before: dict[str, Tensor],
    source: Batch,
    target: Batch,
    multiplier: Tensor,
) -> dict[str, Tensor]:
    """The paper's conditions, in numbers.

    condition: λ_α ≥ √nˢ/(λ_p‖Qᵀ∂L_t/∂θ‖) on the batch, as the ratio of the two sides; at 1 or more it is met.
    predicted_change, actual_change: of L_t on this target batch, to first order, ⟨∂L_t, θ_{m+1} − θ_m⟩, and really.
    """
    task, now = state.task, trainable(state.task.model)
    first_order = sum(
        (whole((g * (now[name].detach() - before[name])).sum()) for name, g in passes.target_gradient.items()),
        start=torch.zeros((), dtype=passes.target_losses.dtype, device=task.device),
    )
    with unchanged(task.model):
        after = task.sharing.mean_loss(task.model, task.losses.target, target)
    size = task.sharing.sum(passes.alignment.square().sum()).sqrt()  # ‖Qᵀ∂L_t/∂θ‖
    return {
        "held": 1.0 - state.alive,
        "condition": multiplier * size / math.sqrt(source.total),
        "predicted_change": first_order,
        "actual_change": after - task.sharing.mean(passes.target_losses, target),
    }
