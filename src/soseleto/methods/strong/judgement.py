"""What is believed about the class of a source example, given the teacher's answer and the label.

    q ← q·t/q̄, normalised            class balance: q̄ mean of the teacher's answers, t shares of the trusted labels;
                                     classes that no trusted example has keep their share of the answers
    q ← q^(1/τ), normalised          sharpened or smoothed, where the teacher is under- or overconfident
    r_c = q_c T_cy / Σ_k q_k T_ky    posterior of class c given label y,  T_cy = P(label y | class c)

w = r_y is the probability that the label is right. With one share π of right labels for all classes, T is π on its
diagonal and (1 − π)/(C − 1) elsewhere, and

    w = π q_y / (π q_y + (1 − π)(1 − q_y)/(C − 1)).

T is estimated as it is used: J_cy is the running mean of r_c over examples with label y, π its trace, and T_cy =
J_cy/Σ_k J_ck where every class has mistakes of its own (expectation-maximisation, one batch at a time). Between the two
forms is any mean of both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

SMALLEST = 1e-8  # probability
FIRST_SHARE = 0.7  # π before anything is known
MEMORY = 0.99  # of the running means over steps


@dataclass(frozen=True)
class Judge:
    """temperature: τ; balance: whether answers are balanced; by_class: how far classes have mistakes of their own.

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
