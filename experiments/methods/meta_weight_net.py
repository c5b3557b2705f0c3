"""Meta-Weight-Net (Shu et al. 2019): a small network maps an example's loss to its weight.

    V(ℓ; Θ) = sigmoid(MLP(ℓ)),  one hidden layer of 100 ReLU units
    θ̂(Θ) = θ − λ_p ∂/∂θ (1/B) Σ_j V(ℓ_j; Θ) ℓ_j            a virtual step; V's input is treated as a constant
    Θ ← Θ − λ_Θ ∂L_t(θ̂(Θ))/∂Θ                              the meta-update
    θ ← θ − λ_p ∂/∂θ (1/B) Σ_j V(ℓ_j; Θ) ℓ_j               with the new Θ

θ̂ is linear in the weights, so ∂L_t(θ̂)/∂V_j = −(λ_p/B) ⟨∂ℓ_j/∂θ, ∂L_t/∂θ at θ̂⟩: alignments with the target gradient
after the virtual step, which an engine computes exactly; no double backward is needed. The source batch is run twice
per step, so dropout draws two masks, and BatchNorm's running statistics are updated twice.

Θ is trained by Adam, the virtual step is plain gradient descent with the current learning rate (no momentum), and V
has PyTorch's default initial values. ``normalize_weights`` divides by ΣV instead of B: with the paper's mean(Vℓ) a
larger V is also a larger learning rate, so that a low learning rate drives V to 1 for all examples. ``target_share``
mixes the target's own gradient into θ's step, as in SOSELETO; 0 is the paper.
Deviation: Adam's learning rate follows the model's schedule.

``state.weights`` is for reports only: the value is V at the last visit, the score the running mean of V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Adam

from soseleto.data.batches import Batch
from soseleto.engines import Engine, Losses, make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.baselines import checked_losses, require_noisy, shared_gradient
from soseleto.task.task import State, Task
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class MetaWeightNet:
    """hidden: units of the weight network; meta_lr, meta_decay: Adam's learning rate and weight decay for it
    normalize_weights: the source loss is ΣVℓ/ΣV instead of the paper's mean(Vℓ)
    target_share: share of the target's own gradient in θ's step; engine: how alignments are computed
    """

    hidden: int = 100
    meta_lr: float = 1e-3
    meta_decay: float = 1e-4
    normalize_weights: bool = False
    target_share: float = 0.0
    engine: str | Engine = "auto"

    name = "meta_weight_net"

    def init(self, task: Task) -> MetaWeightNetState:
        require_noisy(task, self.name)
        dtype = next(p.dtype for p in task.model.parameters() if p.is_floating_point())
        layers = nn.Linear(1, self.hidden), nn.ReLU(), nn.Linear(self.hidden, 1), nn.Sigmoid()
        net = nn.Sequential(*layers).to(task.device, dtype)
        return MetaWeightNetState.start(
            task,
            weights=Weights(task.n_source, device=task.device),
            engine=make_engine(self.engine),
            net=net,
            meta_optimizer=Adam(
                net.parameters(), lr=self.meta_lr, weight_decay=self.meta_decay, capturable=task.device.type == "cuda"
            ),
        )

    def step(
        self, state: MetaWeightNetState, source: Batch, target: Batch, *, monitor: bool = False
    ) -> dict[str, Tensor]:
        task = state.task
        losses, parameters = checked_losses(task, "source", source), trainable(task.model)
        before = self.coefficients(state.weigh(losses))
        moves = gradient(losses, parameters, before.detach(), retain_graph=True)
        direction, target_loss = state.after(moves, target)
        _, alignment = state.engine(task.model, task.losses.source, source, direction)
        state.meta_step(self.meta_gradient(state, before, alignment), self.meta_lr)
        after = self.coefficients(state.weigh(losses)).detach()
        step = gradient(losses, parameters, after)
        if self.target_share:
            _, of_target = shared_gradient(task, "target", target)
            step = {k: torch.lerp(g, of_target[k], self.target_share) for k, g in step.items()}
        state.take(step)
        with torch.no_grad():
            state.report(source.index, state.weigh(losses))
        return {"source_loss": losses.detach().mean(), "target_loss": target_loss}

    def meta_gradient(self, state: MetaWeightNetState, coefficients: Tensor, alignment: Tensor) -> tuple[Tensor, ...]:
        """∂L_t(θ̂(Θ))/∂Θ in the order of the weight network's parameters, through ∂L_t/∂c_j = −λ_p q_j."""
        of_coefficients = -state.lr * alignment.to(coefficients.dtype)
        return torch.autograd.grad(coefficients, list(state.net.parameters()), grad_outputs=of_coefficients)

    def coefficients(self, v: Tensor) -> Tensor:
        """c with Σ c_j ℓ_j the weighted loss."""
        return v / v.sum().clamp_min(torch.finfo(v.dtype).tiny) if self.normalize_weights else v / len(v)


@dataclass(kw_only=True)
class MetaWeightNetState(State):
    engine: Engine
    net: nn.Module  # V
    meta_optimizer: Adam

    def state(self) -> dict[str, Any]:
        return {**super().state(), "net": dict(self.net.state_dict()), "meta": self.meta_optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.net.load_state_dict(state["net"])
        self.meta_optimizer.load_state_dict(state["meta"])

    def weigh(self, losses: Tensor) -> Tensor:
        """V(ℓ) of each loss, (B,); no gradient flows into the losses."""
        return self.net(losses.detach()[:, None]).squeeze(1)

    def after(self, moves: Mapping[str, Tensor], target: Batch) -> tuple[dict[str, Tensor], Tensor]:
        """∂L_t/∂θ and L_t after the virtual step θ̂ = θ − λ_p·moves; the model itself is not changed."""
        parameters = trainable(self.task.model)
        virtual = {k: (p.detach() - self.lr * moves[k]).requires_grad_() for k, p in parameters.items() if k in moves}
        losses = functional_call(
            _Target(self.task.model, self.task.losses), {f"model.{k}": p for k, p in virtual.items()}, (target,)
        )
        self.task.guard("target", losses.detach(), target.index)
        found = torch.autograd.grad(losses.mean(), list(virtual.values()), allow_unused=True)
        return {k: g for k, g in zip(virtual, found, strict=True) if g is not None}, losses.detach().mean()

    def meta_step(self, gradients: tuple[Tensor, ...], meta_lr: float) -> None:
        for parameter, g in zip(self.net.parameters(), gradients, strict=True):
            parameter.grad = g
        self.meta_optimizer.param_groups[0]["lr"] = meta_lr * self.lr_left
        self.meta_optimizer.step()
        self.meta_optimizer.zero_grad(set_to_none=True)


class _Target(nn.Module):
    """The target loss as a module, so that functional_call can replace the parameters of the user's model."""

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model = model
        self.losses = losses
        self.training = model.training

    def forward(self, target: Batch) -> Tensor:
        return self.losses.target(self.model, target)
