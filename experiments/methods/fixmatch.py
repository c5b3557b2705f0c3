"""FixMatch (Sohn et al., 2020): the trusted images are its labelled side, the source images its unlabelled side.

    q = p(weak view of a source image),   ŷ = argmax_c q_c        by the network in training, without gradient
    L_x = mean_target H(label, p(weak view))
    L_u = mean_source [max_c q_c ≥ τ] H(ŷ, p(strong view))
    θ ← θ − λ_p ∂/∂θ (L_x + λ_u L_u)

Labels of the source are ignored: what a method gains from them it must gain over this one. τ, λ_u and the running mean
of the network, which is evaluated, are as published. So are, in the experiment ``cifar10_deep``, one strong view, 64
labelled images a batch and the learning rate of 0.03 with Nesterov momentum and weight decay 5e-4.

Deviations: four unlabelled images for each labelled one in the experiment, not seven, and its number of steps, not 2²⁰;
its schedule, not cos(7πk/16K); its network and its strong augmentation, which is in the manner of the published
RandAugment and cutout; the running mean follows more closely at the start, and averages the buffers of BatchNorm
(``strong/teacher.py``). With several strong views L_u is their mean.

The weight of a source example is q_y of its label y at the last visit, its score the mean over all visits. They are
reported for the ranking of labels and not used in training.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.data import structure
from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.teacher import TaughtState, Teacher, joint_scores, require_classes, views_of
from soseleto.task.task import Task
from soseleto.weights import Weights


@dataclass(frozen=True, kw_only=True)
class FixMatch:
    """FixMatch (Sohn et al., 2020): target images are labelled, source images are not.

    threshold: τ, the probability from which on the network's answer is trained on
    unlabelled: λ_u, the factor of the loss on source images
    teacher: decay of the running mean of the network that is evaluated
    """

    threshold: float = 0.95
    unlabelled: float = 1.0
    teacher: float = 0.999

    name = "fixmatch"
    takes_views = True

    def init(self, task: Task) -> TaughtState:
        require_classes(task, self.name)
        return TaughtState.start(
            task,
            weights=Weights(task.n_source, device=task.device),
            teacher=Teacher(task.model, self.teacher),
            taken=torch.zeros((), dtype=torch.int64, device=task.device),
        )

    def step(self, state: TaughtState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        task = state.task
        weak, strong = views_of(source, self.name)
        trusted, _ = views_of(target, self.name)
        scores = joint_scores(task, task.model, [trusted, structure.concatenate([weak, *strong])])
        of_trusted, of_weak, *of_strong = scores.split([len(target), *[len(source)] * (1 + len(strong))])
        state.judged = of_weak.detach()
        answers, kept = confident(state.judged, self.threshold)
        of_source = sum(F.cross_entropy(one, answers, reduction="none") for one in of_strong) * kept / len(strong)
        of_target = F.cross_entropy(of_trusted, target.labels, reduction="none")
        task.guard("source", of_source.detach(), source.index)
        task.guard("target", of_target.detach(), target.index)
        state.take(gradient(of_target.mean() + self.unlabelled * of_source.mean(), trainable(task.model)))
        state.move_teacher()
        state.report(source.index, state.judged.softmax(1).gather(1, source.labels[:, None]).squeeze(1))
        numbers = {"source_loss": of_source.detach().mean(), "target_loss": of_target.detach().mean()}
        return {**numbers, "confident_share": kept.mean()}


def confident(scores: Tensor, threshold: float) -> tuple[Tensor, Tensor]:
    """ŷ (B,), and 1 where its probability reaches the threshold, else 0."""
    q, answers = scores.softmax(1).max(1)
    return answers, (q >= threshold).to(scores.dtype)
