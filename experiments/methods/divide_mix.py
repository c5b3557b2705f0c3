"""DivideMix (Li et al., 2020), with the trusted images added to the labelled side.

Two networks p¹ and p² are trained; k is one of them and o the other. After every epoch a mixture of two Gaussians on
the losses of network o gives w, the probability that a label is right (``right_probability``). Then, for network k:

    labelled:    w > 0.5, and the trusted images with w = 1
    co-refined:  s = sharpened(w·label + (1 − w)·p^k)              labelled images;  p^k is the mean of its two views
    co-guessed:  s = sharpened((p¹ + p²)/2)                        the others
    mixed:       x ← λ x_i + (1 − λ) x_j,  y ← λ s_i + (1 − λ) s_j,   λ = max(b, 1 − b),  b ~ Beta(4, 4), one a batch
    L = mean_labelled H(y, p^k(x)) + λ_u mean_others |y − p^k(x)|²/C + Σ_c 1/C log((1/C)/p̄_c),   p̄ mean of all p^k(x)

λ_u rises linearly after a warm-up with cross-entropy on the labels as they are. Both views of an image are weak:
``Views(count=1, strong=StrongAugment(0, cutout=0.0))``.

As published: the sharpening T = 0.5, Beta(4, 4), threshold 0.5, λ_u = 25 (that of 50 and 80 % flipped labels; 0 at 20 %
and for asymmetric mistakes), two views of every image, and the mean of both networks' scores to evaluate. Warm-up and
rise of λ_u, published as 10 and 16 of 300 epochs, are 10 and 16 % of the steps here: the same number in 100 epochs.

Deviations:
- The labelled images of a batch are those that the division finds in it, not a fixed number; they are counted by masks.
- Both networks take a step on every batch, each with the other as before the step, not an epoch in turn.
- The losses of the mixture are those of the last visit, mean of the two views, not of a pass over all images after the
  epoch. Their mean over five epochs, published for 90 % flipped labels, is left out.
- Guesses and losses are those of both networks in evaluation mode; published is training mode for network k.
- Optimizer, schedule and batch sizes are those of the training; one optimizer has the parameters of both networks.
- The second network is a copy of the model whose layers draw their initial values again; pretrained values are lost.
- The confidence penalty −H(p^k) in the warm-up, for asymmetric mistakes, is left out.
- A run folder keeps the first network alone. ``Result.model`` is both, whose mean is evaluated.

The weight of a source example is the mean of both networks' w at the last visit, its score the mean over all visits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.methods.two_networks import Networks, PairState, two_views
from soseleto.data.batches import Batch, ExampleRandom
from soseleto.methods.teacher import one_hot, quantiles, require_classes, sharpened, view_scores
from soseleto.task.task import Task


@dataclass(frozen=True, kw_only=True)
class DivideMix:
    """DivideMix (Li et al., 2020): two networks divide the source for each other; target images are always labelled.

    warm_up: share of all steps that train on the labels as they are
    ramp: share of all steps over which λ_u rises after the warm-up
    unlabelled: λ_u, the factor of the loss on images whose labels are not believed
    threshold: of the probability that a label is right
    temperature: of sharpening
    mixup: a of Beta(a, a)
    """

    warm_up: float = 0.1
    ramp: float = 0.16
    unlabelled: float = 25.0
    threshold: float = 0.5
    temperature: float = 0.5
    mixup: float = 4.0

    name = "divide_mix"
    takes_views = True

    def init(self, task: Task) -> DivideMixState:
        require_classes(task, self.name)
        n = task.n_source
        return DivideMixState.begin(
            task,
            Networks(task.model),
            self.warm_up,
            losses=torch.zeros(2, n, dtype=torch.float64, device=task.device),
            right=torch.ones(2, n, device=task.device),
        )

    def step(self, state: DivideMixState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One step of both networks; ``monitor`` marks the last one of an epoch, after which the source is divided."""
        views, trusted = two_views(source, self.name), two_views(target, self.name)
        p = state.judge(source, views).softmax(3).mean(1)
        right = state.right[:, source.index]
        if state.in_first_phase:
            found = [self._on_labels(state, k, source, target) for k in range(2)]
        else:
            rows = Rows(torch.cat([*views, *trusted]), source.labels, target.labels)
            found = [self._on_mixed(state, k, rows, p, right[1 - k]) for k in range(2)]
        losses, of_source, of_target = (torch.stack(each) for each in zip(*found, strict=True))
        each = (source, of_source.detach().mean(0)), (target, of_target.detach().mean(0))
        numbers = state.step_by(losses.sum(), *each)
        state.report(source.index, right.mean(0))
        if monitor:
            state.divide()
        return {**numbers, "clean_share": (right > self.threshold).to(right.dtype).mean()}

    def _on_labels(self, state: DivideMixState, k: int, source: Batch, target: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Warm-up of network k, on view k: its loss, and the cross-entropy of source (B,) and target (T,)."""
        scores = view_scores(state.task, state.networks.both[k], torch.cat([source.inputs[k], target.inputs[k]]))
        each = F.cross_entropy(scores, torch.cat([source.labels, target.labels]), reduction="none")
        return each.mean(), each[: len(source)], each[len(source) :]

    def _on_mixed(
        self, state: DivideMixState, k: int, rows: Rows, p: Tensor, w: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Network k with the other's division w: as ``_on_labels``, with the mean of both views' H(y, p)."""
        labelled = w > self.threshold
        given = given_classes(p[k], p.mean(0), rows.labels, w, labelled, self.temperature)
        trusted = one_hot(rows.trusted, p.shape[2])
        classes = torch.cat([given.repeat(2, 1), trusted.repeat(2, 1)])
        counted = torch.cat([labelled.repeat(2), torch.ones_like(rows.trusted, dtype=torch.bool).repeat(2)])
        inputs, classes = mixed_alike(rows.inputs, classes, state.draws(k, classes), self.mixup)
        scores = view_scores(state.task, state.networks.both[k], inputs)
        loss, each = loss_of(scores, classes, counted, self._unlabelled(state))
        n = 2 * len(rows.labels)
        return loss, each[:n].view(2, -1).mean(0), each[n:].view(2, -1).mean(0)

    def _unlabelled(self, state: DivideMixState) -> Tensor:
        """λ_u of this step."""
        risen = (state.taken - state.first_phase) / max(1.0, self.ramp * state.task.steps)
        return self.unlabelled * risen.clamp(0.0, 1.0)


@dataclass(frozen=True)
class Rows:
    """Both views of the source and both of the target (2B + 2T, ...), with the labels (B,) and (T,)."""

    inputs: Tensor
    labels: Tensor
    trusted: Tensor


@dataclass(kw_only=True)
class DivideMixState(PairState):
    """right: (2, N), the probability that the label is right, by the losses of each network."""

    TENSORS = ("right",)

    right: Tensor

    def divide(self) -> None:
        """Fit the mixture to the losses of each network."""
        for right, losses in zip(self.right, self.losses, strict=True):
            right.copy_(right_probability(losses))


ITERATIONS = 10
ADDED_VARIANCE = 5e-4
_FEWEST = 1e-12  # examples in a component, so that an empty one has a mean


def right_probability(losses: Tensor) -> Tensor:
    """(N,) float64: which labels are right, by a mixture of two Gaussians on the losses (N,) of all examples.

        x = (ℓ − min ℓ)/(max ℓ − min ℓ)
        r_ik = π_k N(x_i; μ_k, σ_k²) / Σ_j π_j N(x_i; μ_j, σ_j²)
        π_k = mean_i r_ik,   μ_k = Σ_i r_ik x_i / Σ_i r_ik,   σ_k² = Σ_i r_ik (x_i − μ_k)² / Σ_i r_ik + 5e-4

    The probability is r_i of the component with the smaller mean. As published: the two clusters of k-means to start
    from, ten iterations and the variance that is added. Here all ten are taken, where the authors' stop when the
    likelihood rises by less than 0.01.
    """
    x = losses.double()
    x = (x - x.min()) / (x.max() - x.min()).clamp(min=_FEWEST)
    r = _clusters(x)
    for _ in range(ITERATIONS):
        count = r.sum(1, keepdim=True) + _FEWEST
        mean = (r * x).sum(1, keepdim=True) / count
        variance = (r * (x - mean) ** 2).sum(1, keepdim=True) / count + ADDED_VARIANCE
        density = -0.5 * ((x - mean) ** 2 / variance + variance.log() + math.log(2 * math.pi))
        r = (density + (count / len(x)).log()).softmax(0)
    return torch.where(mean[0] <= mean[1], r[0], r[1])


def _clusters(x: Tensor) -> Tensor:
    """(2, N) of 0 and 1: the clusters of k-means, which starts from the smallest and the largest."""
    low, high = x.min(), x.max()
    for _ in range(ITERATIONS):
        upper = (x > (low + high) / 2).to(x.dtype)
        high = (upper * x).sum() / upper.sum().clamp(min=1.0)
        low = ((1 - upper) * x).sum() / (1 - upper).sum().clamp(min=1.0)
    return torch.stack([1 - upper, upper])


def given_classes(own: Tensor, both: Tensor, labels: Tensor, w: Tensor, labelled: Tensor, temperature: float) -> Tensor:
    """s (B, C): co-refined labels where ``labelled`` (B,), co-guessed classes elsewhere.

    own: p of the network (B, C); both: mean of the two networks'; w: probability that the label is right (B,)
    """
    w = w[:, None].to(own.dtype)
    refined = w * one_hot(labels, own.shape[1]) + (1 - w) * own
    return sharpened(torch.where(labelled[:, None], refined, both), temperature)


def mixed_alike(
    inputs: Tensor, classes: Tensor, draws: ExampleRandom, a: float, side: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Mixup with one λ = max(b, 1 − b) of the whole batch, b ~ Beta(a, a): every row stays nearer to its own image.

    side: (R,) bool; rows are mixed with rows of the same side
    """
    order, u = draws.uniform(2)
    b = quantiles(u[:1], a)  # an index without dimensions would wait for the GPU
    partner = order.argsort() if side is None else partners(order, side)
    share = torch.maximum(b, 1 - b)
    blend, inverse = share.to(inputs.dtype), (1 - share).to(inputs.dtype)
    return blend * inputs + inverse * inputs[partner], share * classes + (1 - share) * classes[partner]


def partners(order: Tensor, side: Tensor) -> Tensor:
    """(R,) a permutation, random by ``order`` in [0, 1), that maps every row to one of the same side."""
    places = torch.arange(len(side), device=side.device)
    listed = (places + len(side) * side).argsort()  # both lists: one side, then the other
    drawn = (order + side).argsort()
    found = torch.empty_like(drawn)
    found[listed] = drawn
    return found


def loss_of(scores: Tensor, classes: Tensor, labelled: Tensor, unlabelled: Tensor | float) -> tuple[Tensor, Tensor]:
    """L, and H(y, p) of every row (R,).

    scores, classes: (R, C); labelled: (R,) bool; unlabelled: λ_u
    """
    log_p = scores.log_softmax(1)
    p, each = log_p.exp(), -(classes * log_p).sum(1)
    apart = ((p - classes) ** 2).mean(1)
    uneven = -(math.log(p.shape[1]) + p.mean(0).log().mean())  # Σ_c 1/C log((1/C)/p̄_c)
    return mean_over(each, labelled) + unlabelled * mean_over(apart, ~labelled) + uneven, each


def mean_over(values: Tensor, rows: Tensor) -> Tensor:
    """Mean over the marked rows; 0 if there are none."""
    marked = rows.to(values.dtype)
    return (values * marked).sum() / marked.sum().clamp(min=1.0)
