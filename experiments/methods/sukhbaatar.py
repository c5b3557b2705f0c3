"""Training with a noise layer after the softmax (Sukhbaatar et al. 2014, "bottom-up" label flips).

    p(ỹ = j | x) = Σ_i Q[j, i] · p(y = i | x; θ),      Q[j, i] = p(ỹ = j | y = i)
    source loss: −log p(ỹ | x), target loss: −log p(y | x)
    θ, Q ← a gradient step on (1 − s)·mean source + s·mean target; then Q is projected onto probabilities

Q is learned together with θ, with weight decay, which makes it more diffuse (without decay it stays near the identity
and θ fits the noise itself). The first steps train without it. The noise layer is dropped after training: the model
itself predicts the true label.

Deviations: the clean examples are in the loss from the first step to the last; Q starts at the noise estimated in the
first steps (``warm_up``) instead of the identity; the projection is onto the nearest matrix in least squares; the
entries of Q's gradient are clipped; Q's learning rate follows the model's schedule.

``state.weights`` is for reports only: p(y = ỹ | x, ỹ) at the last visit, and its running mean as the score.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.methods.label_noise import MixedFirstState, project, scores_of_both
from soseleto.data.batches import Batch
from soseleto.methods.baselines import require_noisy, share_of_target
from soseleto.task.task import Task
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class Sukhbaatar:
    """pretrain: share of all steps that train without Q; noise_lr, noise_decay: Q's learning rate and weight decay
    target_share: s, or ``None`` to give every example the same weight
    """

    pretrain: float = 0.1
    noise_lr: float = 0.01
    noise_decay: float = 0.01
    target_share: float | None = None

    name = "sukhbaatar"

    def init(self, task: Task) -> SukhbaatarState:
        require_noisy(task, self.name)
        return SukhbaatarState.start(
            task, weights=Weights(task.n_source, device=task.device), first_phase=round(self.pretrain * task.steps)
        )

    def step(self, state: SukhbaatarState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        if state.in_first_phase:
            return state.mixed_step(source, target, self.target_share, self.name)
        of_source, of_target = scores_of_both(state.task, source, target, self.name)
        q = state.matrix(of_source).requires_grad_()
        source_loss, clean = noisy_losses(q, of_source, source.labels)
        target_loss = F.cross_entropy(of_target, target.labels, reduction="none")
        of_loss = (1.0 - share_of_target(self.target_share, source, target)) * source_loss.mean()
        (of_q,) = torch.autograd.grad(of_loss, q, retain_graph=True)
        rate = self.noise_lr * state.lr_left
        numbers = state.both_step(source, target, source_loss, target_loss, self.target_share)
        moved = q.detach() - rate * (of_q.clamp(-_LARGEST, _LARGEST) + self.noise_decay * q.detach())
        state.matrix(of_source).copy_(project(moved))
        state.report(source.index, clean)
        return numbers


@dataclass(kw_only=True)
class SukhbaatarState(MixedFirstState):
    """q: the noise layer."""

    q: Tensor | None = None

    def state(self) -> dict[str, Any]:
        return {**super().state(), "q": self.q}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.q = None if state["q"] is None else state["q"].to(self.task.device)

    def begin(self, noise: Tensor) -> None:
        self.q = noise.to(next(p.dtype for p in self.task.model.parameters() if p.is_floating_point()))

    def matrix(self, scores: Tensor) -> Tensor:
        """Q without its graph, at first the identity; the caller updates it in place."""
        if self.q is None:
            self.q = torch.eye(scores.shape[1], dtype=scores.dtype, device=scores.device)
        return self.q.detach()


# Bound on the entries of Q's gradient, which are usually about 1/classes. The loss of a label whose probability under Q
# is 0 has an unbounded gradient: without the bound a single such label would dominate Q.
_LARGEST = 1.0


def noisy_losses(q: Tensor, scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """−log Σ_i Q[ỹ, i] p_i of each example, and p(y = ỹ | x, ỹ), both (B,); the latter detached."""
    p = scores.softmax(1)
    observed = (q[labels] * p).sum(1).clamp_min(torch.finfo(p.dtype).tiny)  # p(ỹ | x)
    with torch.no_grad():
        right = q.diagonal()[labels] * p.gather(1, labels[:, None]).squeeze(1) / observed
    return -observed.log(), right.detach()
