"""Label-efficient transfer (Luo et al. 2017): adversarial domain alignment, and entropy of unlabelled examples.

    L = L_s + L_t + λ_d · L_domain + λ_e · L_entropy
    L_domain:  discriminators classify source against target from the activations of several layers, each with the
               output of the one before as a further input; the trunk gets their gradient reversed
    L_entropy: H(softmax_c(scale · cos(f(x), m_c))) of unlabelled target examples x, with m_c the prototypes of the
               labelled target classes: an example moves towards its nearest prototype

With ``entropy=0`` it is the paper's "fine-tune + adversarial". Both λ grow linearly over the training, since neither
term is informative while the features are random.

Deviations: prototypes are the class means of the step's own labelled batch; the paper's entropy over source classes is
left out, since no target example belongs to any of them; heads, trunk and discriminators share one learning rate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.methods.matching import cosines, require_transfer
from soseleto.data import Augment, generator, seed_for
from soseleto.data.batches import Batch, ExampleRandom
from soseleto.engines import trainable
from soseleto.errors import UsageError
from soseleto.task.losses import FULL
from soseleto.task.task import State, Task


@dataclass(frozen=True, kw_only=True)
class Luo:
    """unlabelled: target inputs (N, ...) as the model takes them; augment: their augmentation
    layers: names of the trunk's layers whose activations are aligned, in addition to its output
    domain, entropy: λ_d and λ_e at the end of the training; scale: of the cosines; batch_size: of unlabelled examples
    """

    unlabelled: Tensor | None = field(default=None, repr=False)
    augment: Augment | None = None
    layers: tuple[str, ...] = ()
    domain: float = 0.1
    entropy: float = 0.3
    scale: float = 10.0
    batch_size: int = 32
    hidden: int = 100

    name = "luo"

    def init(self, task: Task) -> LuoState:
        require_transfer(task, self.name)
        if self.unlabelled is None:
            raise UsageError("the method 'luo' needs unlabelled target examples: say Luo(unlabelled=inputs).")
        unlabelled = self.unlabelled.to(task.device)
        with torch.no_grad():
            seen = self._activations(task, _as_model_takes(unlabelled[:1], task))
        chain = Discriminators([activation.shape[1] for activation in seen], self.hidden).to(seen[0])
        return LuoState.start(
            replace(task, make_optimizer=lambda own: task.make_optimizer([*own, *chain.parameters()])),
            discriminators=chain,
            unlabelled=unlabelled,
            order=torch.randperm(len(unlabelled), generator=generator(0, "luo/order")).to(task.device),
            begun=torch.zeros((), dtype=torch.int64, device=task.device),
        )

    def step(self, state: LuoState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        task = state.task
        model: Any = task.model
        more = _as_model_takes(state.next_unlabelled(self.batch_size, self.augment), task)
        seen = self._activations(task, torch.cat([source.inputs, target.inputs, more]))
        features, (n, t) = seen[-1], (len(source), len(target))
        of_source = F.cross_entropy(model.source_head(features[:n]), source.labels, reduction="none")
        of_target = F.cross_entropy(model.target_head(features[n : n + t]), target.labels, reduction="none")
        task.guard("source", of_source.detach(), source.index)
        task.guard("target", of_target.detach(), target.index)
        reversed_rows = [reverse(torch.cat([a[:n], a[n + t :]])) for a in seen]
        domain = domain_loss(state.discriminators(reversed_rows), n)
        entropy = prototype_entropy(features[n + t :], features[n : n + t], target.labels, self.scale)
        grown = state.progress()
        loss = of_source.mean() + of_target.mean() + grown * (self.domain * domain + self.entropy * entropy)
        own = dict(trainable(task.model))
        found = torch.autograd.grad(loss, [*own.values(), *state.discriminators.parameters()], allow_unused=True)
        for parameter, g in zip(state.discriminators.parameters(), found[len(own) :], strict=True):
            parameter.grad = g
        state.take({name: g for name, g in zip(own, found, strict=False) if g is not None})
        return {
            "source_loss": of_source.detach().mean(),
            "target_loss": of_target.detach().mean(),
            "domain_loss": domain.detach(),
            "entropy": entropy.detach(),
        }

    def _activations(self, task: Task, inputs: Tensor) -> list[Tensor]:
        """The flattened activations of the named layers, and last the trunk's output; each (B, width)."""
        model: Any = task.model
        with _outputs_of(model.trunk, self.layers) as seen:
            features = getattr(task.losses, "precision", FULL)(model.trunk, inputs)
        return [*(activation.flatten(1) for activation in seen), features]


class Discriminators(nn.Module):
    """One per layer, fed its activations and the previous one's output; gives the target's log-odds, (B, layers)."""

    def __init__(self, widths: Sequence[int], hidden: int) -> None:
        super().__init__()
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(width + 1, hidden), nn.ReLU(), nn.Linear(hidden, 1)) for width in widths
        )

    def forward(self, activations: Sequence[Tensor]) -> Tensor:
        answer, answers = torch.zeros_like(activations[0][:, :1]), []
        for net, activation in zip(self.nets, activations, strict=True):
            answer = net(torch.cat([activation, answer], dim=1))
            answers.append(answer)
        return torch.cat(answers, dim=1)


@dataclass(kw_only=True)
class LuoState(State):
    """begun: steps so far, on the device, so that a captured step can read it."""

    discriminators: Discriminators
    unlabelled: Tensor
    order: Tensor
    begun: Tensor

    def next_unlabelled(self, size: int, augment: Augment | None) -> Tensor:
        """The next inputs of an endless pass over the unlabelled examples."""
        places = (self.begun * size + torch.arange(size, device=self.order.device)) % len(self.order)
        self.begun.add_(1)
        inputs = self.unlabelled[self.order[places]]
        if augment is None:
            return inputs
        return augment(inputs, ExampleRandom.of(seed_for(0, "luo/augment"), places, self.begun.expand(size)))

    def progress(self) -> Tensor:
        """The share of all steps taken so far."""
        return (self.begun / self.task.steps).clamp_max(1.0)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "discriminators": dict(self.discriminators.state_dict()), "begun": self.begun}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.discriminators.load_state_dict(state["discriminators"])
        self.begun.copy_(state["begun"])


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return -gradients[0]


def reverse(values: Tensor) -> Tensor:
    """The identity, whose backward pass negates the gradient (gradient reversal)."""
    reversed_: Tensor = _Reverse.apply(values)  # type: ignore[no-untyped-call]
    return reversed_


def domain_loss(answers: Tensor, n_source: int) -> Tensor:
    """Cross-entropy of source (the first ``n_source`` rows) against target, the mean over layers and sides."""
    of_source = F.softplus(answers[:n_source]).mean()
    of_target = F.softplus(-answers[n_source:]).mean()
    return (of_source + of_target) / 2


def prototype_entropy(features: Tensor, labelled: Tensor, labels: Tensor, scale: float) -> Tensor:
    """The mean entropy of the features' similarity to the prototypes of the labelled examples' classes."""
    same = (labels[:, None] == labels[None, :]).to(labelled.dtype)
    prototypes = (same @ labelled) / same.sum(1, keepdim=True)  # of each labelled example's class
    # A class has one column per labelled example, so each column's share of the softmax is divided by their number.
    logits = scale * cosines(features, prototypes) - same.sum(1).log()
    by_example = logits.log_softmax(1)
    log_p = by_example + same.sum(1).log()  # of the class
    return -(by_example.exp() * log_p).sum(1).mean()


def _as_model_takes(inputs: Tensor, task: Task) -> Tensor:
    dtype = next(p.dtype for p in task.model.parameters() if p.is_floating_point())
    return inputs.to(dtype)


@contextmanager
def _outputs_of(trunk: nn.Module, layers: Sequence[str]) -> Iterator[list[Tensor]]:
    """Collects the outputs of these layers inside the block; the hooks are removed at its end."""
    seen: list[Tensor] = []
    handles = [
        trunk.get_submodule(name).register_forward_hook(lambda module, given, output: seen.append(output))
        for name in layers
    ]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()
