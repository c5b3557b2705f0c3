"""ProMix (Xiao et al., 2023), with the trusted images added to the labelled side.

Two networks are trained; k is one of them. Each has its classifier, with scores z, and an auxiliary head on the same
features, with scores a. Selected for network k are

    small losses:  of every class c the ⌈R·N/C⌉ images labelled c with its smallest losses −log p^k_y, after every epoch
    matched:       images whose label it predicts with p^k_y > τ, in every batch

Labelled are these and the trusted images, with their labels, and in the last part of the training also images for which
both networks predict the same class with p > τ, the surest first and at most so many that 90 % of a batch are labelled,
with the class of its debiased prediction. The others have the pseudo-label

    s = sharpened(softmax(z(weak) − α log p̃))

where p̃ are the shares in which the network predicts the classes: p̃ ← m p̃ + (1 − m)·mean of the batch's p, of its
labelled images and of its others apart. With the debiased margin loss ℓ(y, z) = −Σ_c y_c log softmax(z + α log p̃)_c,
the weak view w, the strong view v, and x = the weak view of a labelled image mixed with that of another,
λ = max(b, 1 − b), b ~ Beta(4, 4), one a batch,

    L = mean_labelled Σ_{h = z, a} [ℓ(y, h(w)) + γ ℓ(y, h(v)) + γ ℓ(y', h(x))]
        + β mean_others [ℓ(s, a(w)) + γ ℓ(s, a(v))]

so that a wrong pseudo-label reaches the classifier, which makes them, through the features alone. γ rises linearly to
1. β rises to λ_u in twice the time, and is 0 from then on. A warm-up trains the classifiers on the labels as they are.

Settings and equations are those of the authors' program for CIFAR-10 (R = 0.5 there for human labels and 50 % flipped
ones, 0.7 at 20 %). By compute: its 600 epochs have 10 of warm-up, 50 in which γ rises, and 250 of agreement
at the end; here these are shares of the training, but for the warm-up, 10 of 100. m = 0.9994 remembers the same share
of the steps as 0.9999 in 600 epochs.

Deviations:
- FMix, a third mixture, is left out; so is the confidence penalty in the warm-up, for asymmetric mistakes.
- Losses for the selection are those of the last visit, not of a pass over all images after the epoch, and predictions
  are those of the networks in evaluation mode.
- One mixture serves both heads, and all views of a step are one pass of the network, so that BatchNorm sees them
  together; published are a mixture for each head and a pass for each view.
- Labelled images of a batch are those that the selection finds in it, counted by masks.
- Strong views are those of this package, in the manner of RandAugment and cutout: ``Views(count=1)``.
- Optimizer, schedule and batch sizes are those of the training; one optimizer has the parameters of both networks.
- The second network is a copy of the model whose layers draw their initial values again; pretrained values are lost.
- A run folder keeps the first network alone. ``Result.model`` is both, whose mean is evaluated.

The weight of a source example is the mean of both networks' p_y at the last visit, its score the mean over all visits.
They are reported for the ranking of labels and not used in training.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.methods.divide_mix import mean_over, mixed_alike
from experiments.methods.two_networks import Networks, PairState, anew, two_views
from soseleto.data.batches import Batch
from soseleto.data.structure import scores_of
from soseleto.errors import UsageError
from soseleto.methods.teacher import SMALLEST, one_hot, require_classes, sharpened
from soseleto.task.losses import FULL
from soseleto.task.task import Task


@dataclass(frozen=True, kw_only=True)
class ProMix:
    """ProMix (Xiao et al., 2023): two networks that select clean images; target images are always labelled.

    warm_up: share of all steps that train on the labels as they are
    ramp: share of all steps in which γ rises, from the first step on
    unlabelled: λ_u, the highest factor of the loss on images that are not selected
    share: R, of the source images that are selected by small losses
    confidence: τ, the probability above which a predicted label is selected, and a class that both networks predict
    agree_after: share of all steps after which such a class replaces a label
    labelled: the share of a batch up to which it does
    debias: α, of the margin loss and of pseudo-labels
    memory: m, of the running means p̃
    temperature: of sharpening
    mixup: a of Beta(a, a)
    """

    warm_up: float = 0.1
    ramp: float = 50 / 600
    unlabelled: float = 0.1
    share: float = 0.5
    confidence: float = 0.99
    agree_after: float = 350 / 600
    labelled: float = 0.9
    debias: float = 0.8
    memory: float = 0.9994
    temperature: float = 0.5
    mixup: float = 4.0

    name = "promix"
    takes_views = True

    def init(self, task: Task) -> ProMixState:
        classes, n = require_classes(task, self.name), task.n_source
        return ProMixState.begin(
            task,
            NetworksWithHeads(task.model, classes),
            self.warm_up,
            losses=torch.full((2, n), torch.inf, dtype=torch.float64, device=task.device),
            labels=torch.zeros(n, dtype=torch.int64, device=task.device),
            selected=torch.ones(2, n, dtype=torch.bool, device=task.device),
            shares=torch.full((2, 2, classes), 1.0 / classes, dtype=torch.float64, device=task.device),
        )

    def step(self, state: ProMixState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        """One step of both networks; ``monitor`` marks the last one of an epoch, after which images are selected."""
        n = len(source)
        pairs = zip(two_views(source, self.name), two_views(target, self.name), strict=True)
        weak, strong = (torch.cat(pair) for pair in pairs)
        scores = state.judge(source, [weak[:n]]).squeeze(1)
        if state.in_first_phase:
            labels = torch.cat([source.labels, target.labels])
            found = [self._on_labels(state, k, weak, labels) for k in range(2)]
        else:
            classes, labelled = self._given(state, scores, source, target)
            found = [self._on_given(state, k, (weak, strong), classes[k], labelled[k]) for k in range(2)]
            state.learn_shares(scores.softmax(2), labelled[:, :n], self.memory)
        losses, rows = (torch.stack(each) for each in zip(*found, strict=True))
        of_source, of_target = rows.detach().mean(0).split([n, len(target)])
        numbers = state.step_by(losses.sum(), (source, of_source), (target, of_target))
        if monitor:
            state.select(self.share)
        return {**numbers, "clean_share": state.selected[:, source.index].double().mean()}

    def _on_labels(self, state: ProMixState, k: int, weak: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Warm-up of network k: its loss, and that of every row (R,)."""
        z = F.cross_entropy(state.with_head(k, weak)[0], labels, reduction="none")
        return z.mean(), z

    @torch.no_grad()
    def _given(self, state: ProMixState, scores: Tensor, source: Batch, target: Batch) -> tuple[Tensor, Tensor]:
        """What each network is trained on: classes (2, R, C), and which rows are labelled (2, R); source rows first.

        scores: of both networks for the source (2, B, C)
        """
        p, classes = scores.softmax(2), scores.shape[2]
        of_label = p.gather(2, source.labels.expand(2, -1)[..., None]).squeeze(2)
        kept = state.selected[:, source.index] | (of_label > self.confidence)
        late = state.taken >= self.agree_after * state.task.steps
        most = math.floor(self.labelled * len(source))
        labelled = torch.stack([one | (late & agreed(p, one, self.confidence, most)) for one in kept])
        of_labelled, of_others = (pseudo_labels(scores, state.shares[:, side, None], self.debias) for side in (0, 1))
        labels = torch.where(kept, source.labels, of_labelled.argmax(2))
        hard = torch.stack([one_hot(one, classes) for one in labels]).to(scores.dtype)
        guessed = torch.stack([sharpened(one, self.temperature) for one in of_others])
        of_source = torch.where(labelled[..., None], hard, guessed)
        of_target = one_hot(target.labels, scores.shape[2]).to(scores.dtype).expand(2, -1, -1)
        trusted = torch.ones(2, len(target), dtype=torch.bool, device=labelled.device)
        return torch.cat([of_source, of_target], 1), torch.cat([labelled, trusted], 1)

    def _on_given(
        self, state: ProMixState, k: int, views: tuple[Tensor, Tensor], classes: Tensor, labelled: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Network k on its classes (R, C) in three views: as ``_on_labels``."""
        mixed, mixed_classes = mixed_alike(views[0], classes, state.draws(k, classes), self.mixup, labelled)
        y = torch.stack([classes, classes, mixed_classes])
        of_labelled, of_others = state.shares[k]
        shares = torch.where(labelled[:, None], of_labelled, of_others)
        z, a = (
            margin_loss(scores.view(y.shape), y, shares, self.debias)
            for scores in state.with_head(k, torch.cat([*views, mixed]))
        )
        gamma, beta = self._factors(state)
        of_rows = (z + a)[0] + gamma * ((z + a)[1] + (z + a)[2])
        loss = mean_over(of_rows, labelled) + beta * mean_over(a[0] + gamma * a[1], ~labelled)
        return loss, z[0]

    def _factors(self, state: ProMixState) -> tuple[Tensor, Tensor]:
        """γ and β of this step."""
        risen = state.taken / max(1.0, self.ramp * state.task.steps)
        return risen.clamp(max=1.0), self.unlabelled * risen / 2 * (risen < 2)


@dataclass(kw_only=True)
class ProMixState(PairState):
    """labels: (N,) of the source, as seen in the batches
    selected: (2, N) bool, by small losses of each network
    shares: (2, 2, C) float64, p̃ of each network for labelled images and for the others
    """

    MODULES = ("second", "heads")
    TENSORS = ("labels", "selected", "shares")

    labels: Tensor
    selected: Tensor
    shares: Tensor

    @torch.no_grad()
    def judge(self, source: Batch, views: Sequence[Tensor]) -> Tensor:
        """Labels and weights of the batch are recorded too."""
        scores = super().judge(source, views)
        self.labels[source.index] = source.labels
        self.report(source.index, (-self.losses[:, source.index]).exp().mean(0).to(scores.dtype))
        return scores

    def with_head(self, k: int, inputs: Tensor) -> tuple[Tensor, ...]:
        """Scores of network k and of its auxiliary head, (R, C) each, in float32 or better."""
        precision = getattr(self.task.losses, "precision", FULL)
        found = precision(partial(self.networks.with_head, k), inputs)
        return tuple(scores.to(torch.promote_types(scores.dtype, torch.float32)) for scores in found)

    def learn_shares(self, p: Tensor, labelled: Tensor, memory: float) -> None:
        """Move p̃ of both networks by their predictions p (2, B, C)."""
        for k in range(2):
            learn_shares(self.shares[k, 0], p[k], labelled[k], memory)
            learn_shares(self.shares[k, 1], p[k], ~labelled[k], memory)

    def select(self, share: float) -> None:
        """Select by the losses of each network."""
        classes = self.shares.shape[2]
        most = math.ceil(share * len(self.labels) / classes)
        for chosen, losses in zip(self.selected, self.losses, strict=True):
            chosen.copy_(small_losses(losses, self.labels, classes, most))


def small_losses(losses: Tensor, labels: Tensor, classes: int, most: int) -> Tensor:
    """(N,) bool: the ``most`` smallest losses among the examples of every label, or all where there are fewer."""
    order = losses.argsort(stable=True)
    order = order[labels[order].argsort(stable=True)]  # by label, then by loss
    counts = torch.zeros(classes, dtype=torch.int64, device=labels.device)
    counts.scatter_add_(0, labels, torch.ones_like(labels))
    first = counts.cumsum(0) - counts  # place of every label's smallest loss
    rank = torch.arange(len(order), device=order.device) - first[labels[order]]
    found = torch.empty(len(order), dtype=torch.bool, device=order.device)
    found[order] = rank < most
    return found


def agreed(p: Tensor, kept: Tensor, confidence: float, most: int) -> Tensor:
    """(B,) bool: not ``kept``, but both networks predict the same class with more than this confidence.

    The surest ones, so that at most ``most`` examples are labelled with those that are kept. p: (2, B, C)
    """
    highest, predictions = p.max(2)
    sure = (highest > confidence).all(0) & (predictions[0] == predictions[1]) & ~kept
    order = torch.where(sure, -highest.mean(0), torch.inf).argsort(stable=True)
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device)
    return sure & (rank < most - kept.sum())


def pseudo_labels(scores: Tensor, shares: Tensor, strength: float) -> Tensor:
    """(..., C) probabilities of the debiased scores; ``shares`` (..., C) is p̃, ``strength`` α."""
    return (scores - strength * _log(shares, scores)).softmax(-1)


def margin_loss(scores: Tensor, classes: Tensor, shares: Tensor, strength: float) -> Tensor:
    """ℓ (..., R) of scores, class shares y and p̃, all (..., R, C)."""
    return -(classes * (scores + strength * _log(shares, scores)).log_softmax(-1)).sum(-1)


def learn_shares(shares: Tensor, p: Tensor, rows: Tensor, memory: float) -> None:
    """Move p̃ (C,) towards the mean of p (B, C) over the marked rows (B,); it stays where there are none."""
    marked = rows.to(shares.dtype)
    count = marked.sum()
    mean = marked @ p.to(shares.dtype) / count.clamp(min=1.0)
    shares += (1.0 - memory) * (count > 0).to(shares.dtype) * (mean - shares)


def _log(shares: Tensor, scores: Tensor) -> Tensor:
    return shares.clamp(min=SMALLEST).log().to(scores.dtype)


class NetworksWithHeads(Networks):
    """Both networks and their auxiliary heads; to evaluate, the classifiers answer alone."""

    def __init__(self, first: nn.Module, classes: int) -> None:
        super().__init__(first)
        self._classifiers = [classifier(network, classes) for network in self.both]
        self.heads = nn.ModuleList(anew(one) for one in self._classifiers)

    def with_head(self, k: int, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of network k by its classifier and by its auxiliary head, both (B, C)."""
        seen: list[Tensor] = []
        with self._classifiers[k].register_forward_pre_hook(lambda layer, given: seen.append(given[0])):
            scores = scores_of(self.both[k](inputs))
        if not seen:
            raise UsageError("ProMix adds a head beside the classifier: let a linear layer end the model.")
        return scores, self.heads[k](seen[-1])


def classifier(network: nn.Module, classes: int) -> nn.Linear:
    """The last linear layer of the network with one output per class."""
    found = [one for one in network.modules() if isinstance(one, nn.Linear) and one.out_features == classes]
    if not found:
        raise UsageError(
            f"ProMix adds a head beside the classifier, and the model has no linear layer of {classes} outputs: "
            "let one end the model."
        )
    return found[-1]
