"""The teacher: a running mean of the network over the steps, which judges better than the network itself.

    θ' ← θ' + (1 − d_t)(θ − θ'),      d_t = min(d, (1 + t)/(10 + t))

The buffers of BatchNorm are averaged like the parameters; integer buffers are copied. d_t lets the first teachers
follow the network closely, since there is nothing to average yet.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from soseleto.data import structure
from soseleto.data.batches import Batch, ExampleRandom
from soseleto.data.structure import Inputs, scores_of
from soseleto.errors import UsageError
from soseleto.methods.baselines import require_noisy
from soseleto.task.losses import FULL, cross_entropy
from soseleto.task.task import State, Task

SMALLEST = 1e-8  # probability
FIRST_SHARE = 0.7  # π before anything is known
MEMORY = 0.99  # of the running means over steps
_KNOTS = 4096  # of the table of Beta quantiles


class Teacher:
    """A copy of the network in evaluation mode that follows it."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False).eval()
        self._decay = decay
        self._averaged, self._copied = _pairs(self.model, model)

    @torch.no_grad()
    def follow(self, taken: Tensor) -> None:
        """After a step; ``taken`` is the number of steps before it, on the device."""
        t = taken.double()
        rate = 1.0 - torch.clamp((1.0 + t) / (10.0 + t), max=self._decay)
        means, values = self._averaged
        apart = torch._foreach_sub(values, means)
        torch._foreach_mul_(apart, rate.to(means[0].dtype))
        torch._foreach_add_(means, apart)
        for mine, its in self._copied:
            mine.copy_(its)

    @torch.no_grad()
    def replace(self, model: nn.Module) -> None:
        """Give the network the teacher's values."""
        for mine, its in zip(_tensors(self.model), _tensors(model), strict=True):
            its.copy_(mine)


@dataclass(kw_only=True)
class TaughtState(State):
    """The state of a method with a teacher; ``taken`` counts the steps on the device.

    judged: scores of the last source batch, before the step
    """

    teacher: Teacher
    taken: Tensor
    judged: Tensor | None = None

    @property
    def answering(self) -> nn.Module:
        """The network to evaluate: the teacher, whose values the model has after the last step."""
        return self.task.model if self.steps == self.task.steps else self.teacher.model

    def move_teacher(self) -> None:
        """After the network has moved: move the teacher."""
        self.teacher.follow(self.taken)
        self.taken += 1

    def after_step(self) -> None:
        """After the last step the network gets the teacher's values."""
        if self.steps == self.task.steps:
            self.teacher.replace(self.task.model)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "teacher": dict(self.teacher.model.state_dict()), "taken": self.taken}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.teacher.model.load_state_dict(state["teacher"])
        self.taken.copy_(state["taken"])


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _pairs(teacher: nn.Module, model: nn.Module) -> tuple[tuple[list[Tensor], list[Tensor]], list[tuple[Tensor, ...]]]:
    """(means, values) of all floating point tensors, and pairs of the others."""
    both = list(zip(_tensors(teacher), _tensors(model), strict=True))
    floating = [pair for pair in both if pair[0].is_floating_point()]
    means, values = [mine.detach() for mine, _ in floating], [its.detach() for _, its in floating]
    return (means, values), [pair for pair in both if not pair[0].is_floating_point()]


@dataclass(frozen=True)
class Judge:
    """What is believed about the class of a source example, given the teacher's answer and the label.

        q ← q·t/q̄, normalised            class balance: q̄ mean of the teacher's answers, t shares of the trusted labels;
                                         classes that no trusted example has keep their share of the answers
        q ← q^(1/τ), normalised          sharpened or smoothed, where the teacher is under- or overconfident
        r_c = q_c T_cy / Σ_k q_k T_ky    posterior of class c given label y,  T_cy = P(label y | class c)

    w = r_y is the probability that the label is right. With one share π of right labels for all classes, T is π on its
    diagonal and (1 − π)/(C − 1) elsewhere, and

        w = π q_y / (π q_y + (1 − π)(1 − q_y)/(C − 1)).

    T is estimated as it is used: J_cy is the running mean of r_c over examples with label y, π its trace, and
    T_cy = J_cy/Σ_k J_ck where every class has mistakes of its own (expectation-maximisation, one batch at a time).
    Between the two forms is any mean of both.

    temperature: τ; balance: whether answers are balanced; by_class: how far classes have mistakes of their own.

    shares: class shares of all trusted examples, where those of their batches are others
    """

    classes: int
    temperature: float
    balance: bool
    by_class: float
    shares: Tensor | None = None

    def init(self, device: torch.device) -> dict[str, Tensor]:
        """J, q̄, t, and the classes that trusted examples have had."""
        even = torch.full((self.classes,), 1.0 / self.classes, device=device)
        start = torch.tensor(FIRST_SHARE, device=device)
        return {
            "joint": transition(start, self.classes) / self.classes,
            "answers": even,
            "trusted": even.clone(),
            "seen": torch.zeros_like(even, dtype=torch.bool),
        }

    def answer(self, scores: Tensor, trusted_labels: Tensor, state: dict[str, Tensor]) -> Tensor:
        """q (B, C), balanced and at temperature τ; the running means learn from the batch first."""
        q = scores.softmax(1)
        _learn(state["answers"], q.mean(0))
        trusted = one_hot(trusted_labels, self.classes).mean(0) if self.shares is None else self.shares
        _learn(state["trusted"], trusted)
        state["seen"].logical_or_(trusted > 0)
        if self.balance:
            q = q * _balance(state)
        return sharpened(q, self.temperature)

    def posterior(self, q: Tensor, labels: Tensor, state: dict[str, Tensor]) -> Tensor:
        """r (B, C); J learns from it."""
        t = transition(clean_share(state), self.classes)
        if self.by_class:
            t = torch.lerp(t, by_class(state["joint"]), float(self.by_class))
        r = q * t.T[labels]
        r = r / r.sum(1, keepdim=True).clamp(min=SMALLEST**2)
        _learn(state["joint"], r.T @ one_hot(labels, self.classes).to(r.dtype) / len(labels))
        return r


def sharpened(p: Tensor, temperature: float) -> Tensor:
    """p^(1/τ), normalised over the classes; τ = 1 only normalises."""
    p = p.clamp(min=SMALLEST) ** (1.0 / temperature)
    return p / p.sum(1, keepdim=True)


def clean_share(state: Mapping[str, Tensor]) -> Tensor:
    """π, between chance level and just below 1, so that it can always change."""
    joint = state["joint"]
    return joint.diagonal().sum().clamp(1.0 / len(joint), 1.0 - 1e-3)


def transition(share: Tensor, classes: int) -> Tensor:
    """T (C, C) with one share of right labels for all classes."""
    same = torch.eye(classes, device=share.device, dtype=share.dtype)
    return same * share + (1.0 - same) * (1.0 - share) / (classes - 1)


def by_class(joint: Tensor) -> Tensor:
    """T (C, C) from J; a hundredth of it is even, so that no mistake is impossible."""
    rows = joint / joint.sum(1, keepdim=True).clamp(min=SMALLEST)
    return 0.99 * rows + 0.01 / len(joint)


def one_hot(labels: Tensor, classes: int) -> Tensor:
    """(B, C) float32."""
    return (labels[:, None] == torch.arange(classes, device=labels.device)).float()


def _balance(state: Mapping[str, Tensor]) -> Tensor:
    """t/q̄ (C,), with t of the seen classes taken as shares of what the answers give to these; 1 for the others."""
    answers, seen = state["answers"], state["seen"]
    share, trusted = (answers * seen).sum(), state["trusted"] * seen
    trusted = trusted / trusted.sum().clamp(min=SMALLEST)
    return torch.where(seen, share * trusted / answers.clamp(min=SMALLEST), 1.0)


def _learn(mean: Tensor, new: Tensor) -> None:
    mean.lerp_(new.to(mean.dtype), 1.0 - MEMORY)


def mixed(
    inputs: Tensor, classes: Tensor, draws: ExampleRandom, *, mixup: float, cutmix: float
) -> tuple[Tensor, Tensor]:
    """Inputs (B, ...) and class shares (B, C), every example mixed with another of the batch.

    x ← λ x_i + (1 − λ) x_j,   y ← λ y_i + (1 − λ) y_j,   λ ~ Beta(a, a) per example      (Zhang et al., 2018)

    Cutmix (Yun et al., 2019) takes a rectangle of x_j instead, of area 1 − λ.

    draws: one stream per row
    mixup: a of Beta(a, a), 0 for no mixing; cutmix: the share of examples that are mixed by a rectangle
    """
    if not mixup:
        return inputs, classes
    order, u, which, x, y = draws.uniform(5)
    partner = order.argsort()
    share = quantiles(u, mixup)
    blend = share.view(-1, *[1] * (inputs.ndim - 1)).to(inputs.dtype)
    mixed_inputs = blend * inputs + (1 - blend) * inputs[partner]
    if cutmix:
        inside = _rectangles(1 - share, x, y, *inputs.shape[2:])
        chosen = which < cutmix
        pasted = torch.where(inside[:, None], inputs[partner], inputs)
        mixed_inputs = torch.where(chosen.view(-1, 1, 1, 1), pasted, mixed_inputs)
        share = torch.where(chosen, 1 - inside.float().mean((1, 2)), share)
    return mixed_inputs, share[:, None] * classes + (1 - share[:, None]) * classes[partner]


def quantiles(u: Tensor, a: float) -> Tensor:
    """λ with P(λ ≤ quantile) = u for Beta(a, a), interpolated from a table; u in [0, 1)."""
    table = _table(a, str(u.device))
    place = u * (_KNOTS - 1)
    low = place.to(torch.int64)
    return torch.lerp(table[low], table[(low + 1).clamp(max=_KNOTS - 1)], place - low)


@lru_cache(maxsize=8)
def _table(a: float, device: str) -> Tensor:
    """Beta quantiles at 0, 1/(K − 1), ..., 1."""
    from scipy.stats import beta

    return torch.from_numpy(beta.ppf(np.linspace(0.0, 1.0, _KNOTS), a, a)).float().to(device)


def _rectangles(area: Tensor, x: Tensor, y: Tensor, h: int, w: int) -> Tensor:
    """(B, H, W) masks of rectangles with these shares of the area, where they lie inside."""
    half = area.sqrt().view(-1, 1, 1) / 2
    rows = ((torch.arange(h, device=area.device) + 0.5) / h).view(1, h, 1)
    columns = ((torch.arange(w, device=area.device) + 0.5) / w).view(1, 1, w)
    return ((rows - y.view(-1, 1, 1)).abs() < half) & ((columns - x.view(-1, 1, 1)).abs() < half)


def require_classes(task: Task, name: str) -> int:
    """The number of classes; raises where source and target are not labelled with the same ones."""
    require_noisy(task, name)
    if task.classes is None or getattr(task.losses, "loss", None) is not cross_entropy:
        raise UsageError(f"the method {name!r} is for class labels and cross-entropy: leave it out.")
    return task.classes


def views_of(batch: Batch, name: str) -> tuple[Inputs, list[Inputs]]:
    """The weak view and the strong ones."""
    if not isinstance(batch.inputs, tuple | list):
        raise UsageError(f"the method {name!r} needs a weak and a strong view of every image: say augment=Views().")
    weak, *strong = batch.inputs
    return weak, strong


def view_scores(task: Task, model: nn.Module, inputs: Inputs) -> Tensor:
    """(B, C), in float32 or better."""
    scores: Tensor = scores_of(getattr(task.losses, "precision", FULL)(model, inputs))
    if scores.shape[1] != task.classes:
        raise UsageError(
            f"the model has {scores.shape[1]} outputs, but the source has {task.classes} classes: "
            "give a model with one output per class."
        )
    return scores.to(torch.promote_types(scores.dtype, torch.float32))


def joint_scores(task: Task, model: nn.Module, parts: Sequence[Inputs]) -> Tensor:
    """(B, C) of all parts, in one pass, so that BatchNorm sees them together; texts of another width in their own."""
    if all(structure.of_one_form(parts[0], part) for part in parts):
        return view_scores(task, model, structure.concatenate(parts))
    return torch.cat([view_scores(task, model, part) for part in parts])
