"""Pieces that change alignments before they move weights and scores: ``alignment`` and ``scores`` of ``Soseleto``."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from soseleto.engines import trainable
from soseleto.engines.interface import inner
from soseleto.engines.model_state import unchanged, whole
from soseleto.errors import UsageError
from soseleto.pieces.piece import Alignment, Piece, State, Step
from soseleto.task.task import Task

PRIOR = 4.0  # ν of ``beyond_noise``: how many visits the variance of all examples counts for
_NEW = 0.1  # weight of a batch in the running mean of the target loss
_SMALLEST_ERROR = 1e-4


@dataclass(frozen=True)
class scale_by_rms(Piece):
    """Divide by the root mean square of all alignments so far, so that one weight step serves every problem.

        unit = 1 / √(mean of q² over all alignments so far)

    In the paper's terms λ_α = weight_step·nˢ/(λ_p·rms(q)).
    """

    slot: ClassVar[str] = "alignment"

    def init(self, task: Task) -> State:
        tiny = torch.finfo(torch.float32).tiny
        return {
            "moves": torch.zeros((), dtype=torch.float64, device=task.device),
            "square": torch.full((), tiny, dtype=torch.float64, device=task.device),  # Σ over moves of mean(q²)
        }

    def update(self, value: Alignment, state: State, step: Step) -> Alignment:
        q = value.q if isinstance(value.unit, float) and value.unit == 1.0 else value.scaled
        state["moves"].add_(1)
        state["square"].add_(step.task.sharing.sum(torch.dot(q, q)), alpha=1.0 / step.source.total)
        return replace(value, q=q, unit=(state["moves"] / state["square"]).sqrt_())


@dataclass(frozen=True)
class hold_when_vanished(Piece):
    """Move no weight while the running target loss is below ``share`` of its first value; scores are still updated.

    Once the target loss has vanished, its gradient, and so every alignment, carries no signal.
    """

    share: float = 1e-3

    slot: ClassVar[str] = "alignment"

    def __post_init__(self) -> None:
        if not self.share > 0:
            raise UsageError(f"share of hold_when_vanished must be above 0, got {self.share}: leave the piece out.")

    def init(self, task: Task) -> State:
        numbers = {"target_loss": 0.0, "first_target_loss": 0.0, "alive": 1.0}
        return {name: torch.full((), v, dtype=torch.float32, device=task.device) for name, v in numbers.items()}

    def update(self, value: Alignment, state: State, step: Step) -> Alignment:
        assert step.target_loss is not None
        target_loss = step.target_loss.to(torch.float32)
        target_loss = torch.where(target_loss.isfinite(), target_loss, state["target_loss"])
        first = state["first_target_loss"] == 0  # none observed yet
        for loss in (state["target_loss"], state["first_target_loss"]):
            torch.where(first, target_loss, loss, out=loss)
        state["target_loss"].lerp_(target_loss, _NEW)
        torch.gt(state["target_loss"], self.share * state["first_target_loss"], out=state["alive"])
        return replace(value, gate=value.gate * state["alive"])


@dataclass(frozen=True)
class per_error(Piece):
    """Divide every alignment by the size of the example's own error, q / (1 − exp(−ℓ)).

    For cross-entropy 1 − exp(−ℓ) is one minus the probability of the label. A gradient is an error times a direction:
    this compares directions, so that examples that are already fitted still show whether they help.
    """

    slot: ClassVar[str] = "alignment"

    def update(self, value: Alignment, state: State, step: Step) -> Alignment:
        assert step.passes is not None
        losses = step.passes.source_losses.to(value.q.dtype)
        return replace(value, q=value.q / (_SMALLEST_ERROR - torch.expm1(-losses)))


@dataclass(frozen=True)
class beyond_noise(Piece):
    """Weights move by the part of an example's mean alignment beyond ``z`` standard errors; scores by all of it.

        ū, n, s²     mean, number and variance of the example's alignments u over its visits, this one included
        s²           (ν s₀² + Σ(u − ū)²)/(ν + n − 1), shrunk towards the mean variance s₀² of all examples
        evidence     sign(ū)·max(|ū| − z·s/√n, 0), by which the weight moves in place of u

    A single alignment is mostly noise of the target batch. Without this piece a weight is the clipped sum of all of
    them: that of a right but hard example, whose alignments scatter around zero, is a random walk that starts at 1 and
    can only fall. Here it stays where it is, while a wrong label, whose mean is well below zero, falls after a few
    visits. In the first epoch no variance is known, and weights move by the alignments as they are.
    """

    z: float = 2.0

    slot: ClassVar[str] = "alignment"

    def __post_init__(self) -> None:
        if not self.z > 0:
            raise UsageError(f"z of beyond_noise must be above 0, got {self.z}: leave the piece out.")

    def init(self, task: Task) -> State:
        examples = {name: _zeros(task) for name in ("visits", "means", "squares")}
        pooled = torch.zeros(2, dtype=torch.float64, device=task.device)  # Σ of squares and of degrees of freedom
        return {"examples": examples, "pooled": pooled}

    def update(self, value: Alignment, state: State, step: Step) -> Alignment:
        mean, error = _mean_and_error(state, step, value.moving.to(torch.float32))
        return replace(value, evidence=mean.sign() * (mean.abs() - self.z * error).clamp_min(0.0))


def _zeros(task: Task) -> Tensor:
    """One number per source example, in float32 whatever the default is."""
    return torch.zeros(task.n_source, dtype=torch.float32, device=task.device)


def _mean_and_error(state: State, step: Step, u: Tensor) -> tuple[Tensor, Tensor]:
    """ū and s/√n of the batch's examples after this visit, (B,) each."""
    examples, index = state["examples"], step.source.index
    visits, mean, squares = (examples[name][index] for name in ("visits", "means", "squares"))
    visits = visits + 1.0
    change = u - mean
    mean = mean + change / visits
    added = change * (u - mean)
    for name, values in (("visits", visits), ("means", mean), ("squares", squares + added)):
        examples[name][index] = values
    sums = torch.stack([added.sum(), (visits > 1.0).sum().to(u.dtype)]).double()
    state["pooled"].add_(step.task.sharing.sum(sums))
    all_squares, freedom = state["pooled"].unbind()
    variance_of_all = (all_squares / freedom.clamp_min(1.0)).to(u.dtype)
    variance = (PRIOR * variance_of_all + squares + added) / (PRIOR + visits - 1.0)
    return mean, (variance / visits).sqrt()


@dataclass(frozen=True)
class pooled_by_class(Piece):
    """Scores are shrunk towards the mean of their class; for sources with whole classes of no use.

        u_jm = m_c + e_j + noise_m           the alignment of example j of class c at its m-th visit
        τ² = E[(u − m_c)(ū − m_c)]           variance between examples: u is of this visit, ū the mean of earlier ones
        σ² = E[(u − m_c)²] − τ²              variance between visits
        E[m_c + e_j | n visits] = m_c + s·(ū_j − m_c),        s = τ²/(τ² + σ²/n)

    This is the empirical-Bayes estimate of a two-level normal model; every expectation is a running mean over all
    visits. Where whole classes are useless, their means show it long before any single example can: single alignments
    are mostly noise (σ² ≫ τ²), and a class has thousands of them. Where labels are wrong at random, class means are
    equal, and s leaves the example's own mean as it is. Weights follow the example's own alignments: a class that helps
    less than others still has examples that help.
    """

    slot: ClassVar[str] = "scores"

    def init(self, task: Task) -> State:
        if task.classes is None:
            raise UsageError("pooled_by_class needs class indices as source labels: leave it out.")
        examples = {name: _zeros(task) for name in ("means", "visits")}  # ū_j
        totals = torch.zeros(2, task.classes, dtype=torch.float64, device=task.device)  # Σu and the count, by class
        # Σ(u − m)(ū − m) and its count, Σ(u − m)² and its count
        spread = torch.zeros(2, 2, dtype=torch.float64, device=task.device)
        return {"examples": examples, "totals": totals, "spread": spread}

    def update(self, value: Alignment, state: Any, step: Step) -> Tensor:
        """The scores of the batch's examples after this visit, (B,)."""
        return value.unit * _pooled(state, step, value.q.to(torch.float32))


def _pooled(state: State, step: Step, u: Tensor) -> Tensor:
    """m_c + s·(ū − m_c) of the batch's examples after this visit, (B,)."""
    labels, index, total = step.source.labels, step.source.index, step.task.sharing.sum
    totals, spread = state["totals"], state["spread"]
    means, counts = state["examples"]["means"], state["examples"]["visits"]
    ones = torch.ones_like(u)
    totals.add_(total(torch.zeros_like(totals).index_add_(1, labels, torch.stack([u, ones]).double())))
    m = (totals[0] / totals[1].clamp_min(1.0))[labels].float()
    before, visits = means[index], counts[index] + 1.0
    seen = (visits > 1.0).to(u.dtype)

    def centred(values: Tensor, used: Tensor) -> Tensor:
        # Alignments drift during training; what a whole batch has in common says nothing about its examples.
        return (values - total((values * used).sum()) / total(used.sum()).clamp_min(1.0)) * used

    now, earlier = centred(u - m, ones), centred(before - m, seen)
    spread[0].add_(total(torch.stack([(now * earlier).sum(), seen.sum()])))
    spread[1].add_(total(torch.stack([(now * now).sum(), ones.sum()])))
    mean = before + (u - before) / visits
    means[index], counts[index] = mean, visits
    return m + _shrinkage(spread, visits) * (mean - m)


def _shrinkage(spread: Tensor, visits: Tensor) -> Tensor:
    """s: how far an example's own mean over its visits is trusted."""
    persistent, total = (spread[:, 0] / spread[:, 1].clamp_min(1.0)).float()
    own = torch.minimum(persistent.clamp_min(0.0), total)
    return own / (own + (total - own) / visits).clamp_min(torch.finfo(own.dtype).tiny)


def copies(model: nn.Module) -> dict[str, Tensor]:
    """θ_m, before the optimizer moves it."""
    return {name: p.detach().clone() for name, p in trainable(model).items()}


def conditions(
    step: Step, before: dict[str, Tensor], aligned: Alignment, weight_step: Tensor | float
) -> dict[str, Tensor]:
    """The sufficient condition of the paper, and the change of the target loss, after a step from θ_m = ``before``.

    condition: λ_α ≥ √nˢ/(λ_p‖Qᵀ∂L_t/∂θ‖) on the batch, as the ratio of the two sides; it is met at 1 or more.
    predicted_change, actual_change: of L_t on this target batch, to first order, ⟨∂L_t, θ_{m+1} − θ_m⟩, and measured.
    held: 1 where the weights were held.
    """
    task, passes = step.task, step.passes
    assert passes is not None
    now = trainable(task.model)
    predicted = torch.zeros((), dtype=passes.target_losses.dtype, device=task.device)
    for name, g in passes.target_gradient.items():
        predicted = predicted + whole(inner({name: g}, {name: now[name].detach() - before[name]}))
    with unchanged(task.model), torch.no_grad():
        after = task.sharing.mean(task.sharing.losses(task.model, task.losses.target, step.target), step.target)
    size = task.sharing.sum(aligned.q.square().sum()).sqrt()  # ‖Qᵀ∂L_t/∂θ‖
    return {
        "held": torch.as_tensor(1.0 - aligned.gate, dtype=torch.float32, device=task.device),
        "condition": weight_step * aligned.gate * aligned.unit * size / math.sqrt(step.source.total),
        "predicted_change": predicted,
        "actual_change": after - task.sharing.mean(passes.target_losses, step.target),
    }
