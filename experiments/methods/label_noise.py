"""Label noise as a matrix Q[j, i] = p(label j | class i), whose columns sum to 1, and a warm-up that estimates it.

The warm-up trains on noisy and clean examples together. The confusion matrices of one classifier on clean and on noisy
labels determine the noise (``from_confusions``), long before the classifier is good, and before it has memorised
examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.data.structure import scores_of
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.errors import UsageError
from soseleto.methods.baselines import PhasedState, share_of_target
from soseleto.task.losses import FULL, joined_inputs
from soseleto.task.task import Task

_PULL = 0.03  # strength of the regularisation of Q, in units of the mean square of C


def project(matrix: Tensor) -> Tensor:
    """The nearest matrix (least squares) whose columns are probabilities.

    >>> project(torch.tensor([[2.0, 0.5], [0.0, 0.5]]))
    tensor([[1.0000, 0.5000],
            [0.0000, 0.5000]])
    """
    n = len(matrix)
    ordered = matrix.sort(dim=0, descending=True).values
    ranks = torch.arange(1, n + 1, device=matrix.device, dtype=matrix.dtype)[:, None]
    surplus = (ordered.cumsum(0) - 1.0) / ranks
    kept = (ordered > surplus).sum(0, keepdim=True).clamp_min(1)  # below 1 only for NaN, which is propagated
    return (matrix - surplus.gather(0, kept - 1)).clamp_min(0.0)


def label_counts(probabilities: Tensor, labels: Tensor) -> Tensor:
    """Σ over examples of p(class k | x)·[label = j], as a matrix (k, j)."""
    return probabilities.T @ F.one_hot(labels, probabilities.shape[1]).to(probabilities.dtype)


def from_confusions(clean: Tensor, noisy: Tensor) -> Tensor:
    """Q from one classifier's confusion matrices on clean and on noisy labels.

    With C[k, i] = p(prediction k, class i) on clean examples and C̃[k, j] = p(prediction k, label j) on noisy ones, and
    labels that depend on the class alone, C̃ = C Qᵀ. For a weak classifier many Q explain C̃ about equally well, so the
    least-squares solution is regularised towards the best symmetric noise, in which a share η of every class is spread
    evenly over the others: even a classifier that is hardly better than chance determines η well.
    """
    clean, noisy = clean.cpu().double() / clean.cpu().sum(), noisy.cpu().double() / noisy.cpu().sum()
    identity = torch.eye(len(clean), dtype=clean.dtype)
    spread = (1.0 - identity) / (len(clean) - 1) - identity
    explained = clean @ spread
    eta = ((noisy - clean) * explained).sum() / explained.square().sum().clamp_min(torch.finfo(clean.dtype).tiny)
    even = identity + eta.clamp(0.0, 1.0) * spread
    squares = clean.T @ clean
    pull = _PULL * squares.trace() / len(clean) * identity
    return project(torch.linalg.solve(squares + pull, clean.T @ noisy + pull @ even).T)


def class_scores(task: Task, model: nn.Module, batch: Batch, name: str) -> Tensor:
    """The model's outputs (B, classes), for a method that takes them as the logits of a softmax."""
    outputs = scores_of(getattr(task.losses, "precision", FULL)(model, batch.inputs))
    if not isinstance(outputs, Tensor) or outputs.ndim != 2 or batch.labels.is_floating_point():
        shape = getattr(outputs, "shape", type(outputs).__name__)
        raise UsageError(
            f"the method {name!r} needs class scores (B, classes) and class indices, got outputs of {shape} and "
            f"labels of {batch.labels.dtype}: use it for classification."
        )
    return outputs


def scores_of_both(task: Task, source: Batch, target: Batch, name: str) -> tuple[Tensor, Tensor]:
    """``class_scores`` of the two batches, from one forward pass."""
    whole = Batch(source.index, joined_inputs(source, target), source.labels)
    scores = class_scores(task, task.model, whole, name)
    return scores[: len(source)], scores[len(source) :]


@dataclass(kw_only=True)
class MixedFirstState(PhasedState):
    """clean, noisy: confusion matrices (prediction, label), summed over the first phase."""

    clean: Tensor = field(default_factory=lambda: torch.zeros(()))
    noisy: Tensor = field(default_factory=lambda: torch.zeros(()))

    def state(self) -> dict[str, Any]:
        return {**super().state(), "clean": self.clean, "noisy": self.noisy}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.clean, self.noisy = (state[name].to(self.task.device) for name in ("clean", "noisy"))

    def mixed_step(self, source: Batch, target: Batch, share: float | None, name: str) -> dict[str, Tensor]:
        """One step of ``mixed`` training, whose predictions are added to the confusion matrices."""
        of_source, of_target = scores_of_both(self.task, source, target, name)
        source_loss = F.cross_entropy(of_source, source.labels, reduction="none")
        target_loss = F.cross_entropy(of_target, target.labels, reduction="none")
        self._count(of_target.detach().softmax(1), target.labels, of_source.detach().softmax(1), source.labels)
        return self.both_step(source, target, source_loss, target_loss, share)

    def _count(self, on_clean: Tensor, right: Tensor, on_noisy: Tensor, noisy: Tensor) -> None:
        """Add predictions to the matrices, in place."""
        if self.clean.ndim == 0:
            self.clean, self.noisy = (on_clean.new_zeros(2 * on_clean.shape[1:]) for _ in range(2))
        self.clean.add_(label_counts(on_clean, right))
        self.noisy.add_(label_counts(on_noisy, noisy))

    def both_step(
        self, source: Batch, target: Batch, source_loss: Tensor, target_loss: Tensor, share: float | None
    ) -> dict[str, Tensor]:
        """A step on (1 − s)·mean source loss + s·mean target loss."""
        self.task.guard("source", source_loss.detach(), source.index)
        self.task.guard("target", target_loss.detach(), target.index)
        s = share_of_target(share, source, target)
        loss = (1.0 - s) * source_loss.mean() + s * target_loss.mean()
        self.take(gradient(loss, trainable(self.task.model)))
        return {"source_loss": source_loss.detach().mean(), "target_loss": target_loss.detach().mean()}

    def after_step(self) -> None:
        """After the first phase, begin the second; nothing is known about the noise if all its steps were undone."""
        if self.steps == self.first_phase and bool(self.clean.any()):
            self.begin(self.noise().to(self.task.device))

    def begin(self, noise: Tensor) -> None:
        """Begin the second phase with an estimate of Q."""
        raise NotImplementedError

    def noise(self) -> Tensor:
        """The estimate of Q from the first phase."""
        return from_confusions(self.clean, self.noisy)
