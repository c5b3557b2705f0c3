"""Meta-Weight-Net (Shu et al. 2019): a small network maps an example's loss to its weight.

    V(ℓ; Θ) = sigmoid(MLP(ℓ)),  one hidden layer of 100 ReLU units
    θ̂(Θ) = θ − λ_p ∂/∂θ (1/B) Σ_j V(ℓ_j; Θ) ℓ_j            a virtual step; V's input is held constant
    Θ ← Θ − λ_Θ ∂L_t(θ̂(Θ))/∂Θ                              the meta-update, by double backward
    θ ← θ − λ_p ∂/∂θ (1/B) Σ_j V(ℓ_j; Θ) ℓ_j               with the new Θ

Θ is trained by Adam, the virtual step is one of plain gradient descent with the current learning rate (no momentum),
and V starts at PyTorch's own initial values. ``normalize_weights`` divides by ΣV instead of B: with the paper's
mean(Vℓ) a larger V is also a larger learning rate, and where the learning rate is low V is drawn to 1 for all.
Deviation: Adam's rate follows the model's schedule down.

``state.weights`` only reports: the value is V at the last visit, the score the running mean of V.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Adam

from soseleto.batch import Batch
from soseleto.engines import Losses, trainable
from soseleto.engines.autograd import gradient
from soseleto.errors import UsageError
from soseleto.methods.state import State, require_noisy, source_losses
from soseleto.task import Task
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class MetaWeightNet:
    """hidden: units of the weight network; meta_lr, meta_decay: Adam's rate and weight decay for it;
    normalize_weights: the source loss is ΣVℓ/ΣV instead of the paper's mean(Vℓ)."""

    hidden: int = 100
    meta_lr: float = 1e-3
    meta_decay: float = 1e-4
    normalize_weights: bool = False

    name = "meta_weight_net"

    def __post_init__(self) -> None:
        if self.hidden < 1 or self.meta_lr <= 0:
            raise UsageError(f"hidden and meta_lr must be above 0, got {self.hidden} and {self.meta_lr}.")

    def init(self, task: Task) -> MetaWeightNetState:
        require_noisy(task, self.name)
        dtype = next(p.dtype for p in task.model.parameters())
        net = _weight_net(self.hidden).to(task.device, dtype)
        return MetaWeightNetState.start(
            task,
            weights=Weights(task.n_source, device=task.device),
            net=net,
            meta_optimizer=Adam(
                net.parameters(),
                lr=self.meta_lr,
                weight_decay=self.meta_decay,
                capturable=task.device.type == "cuda",
            ),
        )

    def step(
        self, state: MetaWeightNetState, source: Batch, target: Batch, *, monitor: bool = False
    ) -> dict[str, Tensor]:
        task, parameters = state.task, trainable(state.task.model)
        losses = source_losses(task, source)
        meta_gradient, target_loss = self.meta_gradient(state, losses, target)
        state.meta_step(meta_gradient, self.meta_lr)
        with torch.no_grad():
            v = state.weigh(losses)
        state.take(gradient(losses, parameters, self.coefficients(v)))
        state.report(source.index, v)
        return {"source_loss": losses.detach().mean(), "target_loss": target_loss}

    def meta_gradient(
        self, state: MetaWeightNetState, losses: Tensor, target: Batch
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """∂L_t(θ̂(Θ))/∂Θ in the order of the weight network's parameters, and L_t(θ̂); the losses' graph stays."""
        task, parameters = state.task, trainable(state.task.model)
        c = self.coefficients(state.weigh(losses))
        moves = torch.autograd.grad(
            losses, list(parameters.values()), grad_outputs=c, create_graph=True, allow_unused=True
        )
        virtual = {
            f"model.{name}": p if move is None else p.detach() - state.lr * move
            for (name, p), move in zip(parameters.items(), moves, strict=True)
        }
        meta_losses = functional_call(_Target(task.model, task.losses), virtual, (target,))
        task.guard("target", meta_losses.detach(), target.index)
        loss = meta_losses.mean()
        return torch.autograd.grad(loss, list(state.net.parameters()), retain_graph=True), loss.detach()

    def coefficients(self, v: Tensor) -> Tensor:
        """c with Σ c_j ℓ_j the weighted loss."""
        return v / v.sum().clamp_min(torch.finfo(v.dtype).tiny) if self.normalize_weights else v / len(v)


@dataclass(kw_only=True)
class MetaWeightNetState(State):
    net: nn.Module  # V
    meta_optimizer: Adam

    def state(self) -> dict[str, Any]:
        return {**super().state(), "net": dict(self.net.state_dict()), "meta": self.meta_optimizer.state_dict()}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.net.load_state_dict(state["net"])
        self.meta_optimizer.load_state_dict(state["meta"])

    def weigh(self, losses: Tensor) -> Tensor:
        """V(ℓ) of each loss, (B,); the losses themselves are constants here."""
        return self.net(losses.detach()[:, None]).squeeze(1)

    def meta_step(self, gradients: tuple[Tensor, ...], meta_lr: float) -> None:
        for parameter, g in zip(self.net.parameters(), gradients, strict=True):
            parameter.grad = g
        self.meta_optimizer.param_groups[0]["lr"] = meta_lr * self.lr_left
        self.meta_optimizer.step()
        self.meta_optimizer.zero_grad(set_to_none=True)


class _Target(nn.Module):
    """Gives functional_call something to swap parameters in: the user's model, held, never changed."""

    def __init__(self, model: nn.Module, losses: Losses) -> None:
        super().__init__()
        self.model = model
        self.losses = losses
        self.training = model.training

    def forward(self, target: Batch) -> Tensor:
        return self.losses.target(self.model, target)


def _weight_net(hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, hidden), nn.ReLU(), nn.Linear(hidden, 1), nn.Sigmoid())
