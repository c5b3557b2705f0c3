"""Label and noise type predicted together (Xiao et al. 2015).

    p(ỹ | y, z):  z = clean: I[ỹ, y];  z = random: (1 − I)[ỹ, y]/(L − 1);  z = confusing: C[ỹ, y]
    E: p(y, z | ỹ, x) ∝ p(ỹ | y, z) · p(y | x; θ₁) · p(z | x; θ₂)
    M: θ₁ by the gradient of −Σ_y p(y | ỹ, x) log p(y | x; θ₁),  θ₂ in the same way for z

θ₁ is the model; θ₂ is a second network of the same architecture with three outputs. The first steps train θ₁ on clean
and noisy examples with their given labels, θ₂ is then initialised with θ₁'s parameters, and clean examples stay in the
loss, so that the posterior does not drift.

Deviations: the paper estimates C, and trains θ₂ before the mixture, on images that have both a noisy and a true label.
Here the clean examples have no noisy label, so both start from the noise estimated in the first steps (``warm_up``):
θ₂'s bias from the share of wrong labels, taken to be half random and half confusing, and C from the off-diagonal
entries. After that C follows the posterior's counts (the M-step for C). The paper's first steps use clean examples
alone. One optimizer trains both networks.

``state.weights`` is for reports only: p(z = clean | ỹ, x) at the last visit, and its running mean as the score.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.methods.label_noise import MixedFirstState, class_scores, label_counts, scores_of_both
from soseleto.data.batches import Batch
from soseleto.errors import UsageError
from soseleto.methods.baselines import require_noisy
from soseleto.task.task import Task
from soseleto.weights import Weights

TYPES = ("clean", "random", "confusing")
_MEMORY = 0.99  # decay of the running mean of the counts that C is computed from


@dataclass(frozen=True, kw_only=True)
class Xiao:
    """pretrain: share of all steps that take every label as given
    target_share: the clean examples' share of the loss, or ``None`` to give every example the same weight
    """

    pretrain: float = 0.1
    target_share: float | None = None

    name = "xiao"

    def init(self, task: Task) -> XiaoState:
        require_noisy(task, self.name)
        noise_net = noise_network(task.model)
        return XiaoState.start(
            replace(task, make_optimizer=lambda own: task.make_optimizer([*own, *noise_net.parameters()])),
            weights=Weights(task.n_source, device=task.device),
            first_phase=round(self.pretrain * task.steps),
            noise_net=noise_net,
        )

    def step(self, state: XiaoState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        if state.in_first_phase:
            state.batch_size = len(source)
            return state.mixed_step(source, target, self.target_share, self.name)
        of_source, of_target = scores_of_both(state.task, source, target, self.name)
        types = class_scores(state.task, state.noise_net, source, self.name)
        labels, kinds = state.posterior(of_source.detach(), types.detach(), source.labels)
        source_loss = -(labels * of_source.log_softmax(1)).sum(1)
        target_loss = F.cross_entropy(of_target, target.labels, reduction="none")
        # the M-step's gradient of θ₂; the optimizer steps θ₁ and θ₂ together
        of_types = -(kinds * types.log_softmax(1)).sum(1).mean()
        of_types.backward(inputs=list(state.noise_net.parameters()))
        numbers = state.both_step(source, target, source_loss, target_loss, self.target_share)
        state.report(source.index, kinds[:, 0])
        return numbers


@dataclass(kw_only=True)
class XiaoState(MixedFirstState):
    """counts: how often class i was labelled j in confusion, as a matrix (j, i); C is its columns, normalised.

    batch_size: of the source, in the last step of the first phase
    """

    noise_net: nn.Module
    counts: Tensor | None = None
    batch_size: int = 0

    def state(self) -> dict[str, Any]:
        return {**super().state(), "noise_net": dict(self.noise_net.state_dict()), "counts": self.counts}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.noise_net.load_state_dict(state["noise_net"])
        self.counts = None if state["counts"] is None else state["counts"].to(self.task.device)

    def begin(self, noise: Tensor) -> None:
        """θ₂ starts as θ₁, but for its last layer; its bias and C from the estimate of the noise."""
        mine, its = self.noise_net.state_dict(), self.task.model.state_dict()
        shared = {name: value for name, value in its.items() if name in mine and mine[name].shape == value.shape}
        self.noise_net.load_state_dict(mine | shared)
        wrong = (1.0 - noise.diagonal().mean()).clamp(0.01, 0.99)
        odds = torch.stack([1.0 - wrong, wrong / 2, wrong / 2]).log()
        with torch.no_grad():
            self.noise_net.get_submodule(last_linear(self.noise_net)).get_parameter("bias").copy_(odds)
        self.counts = noise * (self.batch_size * wrong / 2 / len(noise))  # the size of one batch's counts

    def posterior(self, scores: Tensor, types: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """The E-step: p(y | ỹ, x) (B, L) and p(z | ỹ, x) (B, 3); its counts update those of C."""
        p_y, p_z = scores.softmax(1), types.softmax(1)
        joint = p_z[:, :, None] * p_y[:, None, :] * likelihoods(self._confusion(p_y), labels)
        joint = joint / joint.sum((1, 2), keepdim=True).clamp_min(torch.finfo(joint.dtype).tiny)
        counts = label_counts(joint[:, TYPES.index("confusing")], labels).T
        if self.counts is None:
            self.counts = counts.clone()
        self.counts.lerp_(counts.to(self.counts.dtype), 1.0 - _MEMORY)  # in place
        return joint.sum(1), joint.sum(2)

    def _confusion(self, like: Tensor) -> Tensor:
        """C, whose diagonal is 0."""
        classes = like.shape[1]
        off = 1.0 - torch.eye(classes, dtype=like.dtype, device=like.device)
        counts = off if self.counts is None else self.counts.to(like.dtype) * off + 1e-6
        return counts * off / (counts * off).sum(0, keepdim=True)


def likelihoods(confusion: Tensor, labels: Tensor) -> Tensor:
    """p(ỹ | y, z) of the given labels, (B, 3, L)."""
    identity = torch.eye(len(confusion), dtype=confusion.dtype, device=confusion.device)
    random = (1.0 - identity) / (len(confusion) - 1)
    return torch.stack([identity[labels], random[labels], confusion[labels]], dim=1)


def noise_network(model: nn.Module) -> nn.Module:
    """A copy of the model whose last linear layer has three outputs, all equally likely at first."""
    last, made = last_linear(model), copy.deepcopy(model)
    old = made.get_submodule(last)
    new = nn.Linear(old.in_features, len(TYPES)).to(old.weight.device, old.weight.dtype)
    nn.init.zeros_(new.weight)
    nn.init.zeros_(new.bias)
    made.set_submodule(last, new)
    return made


def last_linear(model: nn.Module) -> str:
    """The name of the last linear layer."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name]
    if not names:
        raise UsageError(
            "the method 'xiao' copies the model and replaces its last linear layer, and this model has none: "
            "give a model with a linear layer."
        )
    return names[-1]
