"""Strong: for wrong labels and images; every batch has doubtful source images and trusted target images.

    q = teacher(weak view)                                  a running mean of the network judges: see ``Teacher``
    r = P(class | q, label),  w = r_y                       labels are doubted: see ``Judge``
    s = (1 − g)·label + g·r                                 what source images are trained on; g rises from 0 to 1
    x, y = mixed(strong views of both, s and trusted labels)                                        see ``mixed``
    θ ← θ − λ_p ∂/∂θ [ (1 − a)·mean_source H(y, p(x)) + a·mean_target H(y, p(x)) ],   H(y, p) = −Σ_c y_c log p_c

A doubted label is so replaced by the teacher's answer, and its image still trains the network to give the same answer
for weak and strong views. After the last step the model is the teacher. The weight of a source example is its w at the
last visit, its score a mean over all visits in which later ones count more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from soseleto.data import structure
from soseleto.data.batches import Batch, ExampleRandom
from soseleto.data.structure import Inputs
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.errors import UsageError
from soseleto.methods.baselines import require_share, share_of_target
from soseleto.methods.teacher import (
    Judge,
    TaughtState,
    Teacher,
    clean_share,
    joint_scores,
    mixed,
    one_hot,
    require_classes,
    sharpened,
    view_scores,
    views_of,
)
from soseleto.task.task import Task, load_tree
from soseleto.weights import Weights

LABELS = ("doubted", "believed", "ignored")
IMAGES_CUT = 0.5  # share of images that are mixed by cutmix
LATER = 8  # how much more later visits count in the scores: early teachers know little


@dataclass(frozen=True, kw_only=True)
class Strong:
    """teacher: decay d of the running mean of the network, reached as (1 + t)/(10 + t) in step t; 0 judges by the
        network of the last step

    labels: of the source, "doubted", or "believed", which trains on every label as it is, or "ignored", which trains on
        the teacher's answers alone
    answers: the teacher's answers replace doubted labels; without, an example counts as much as its label is believed
    by_class: 1 if every class has mistakes of its own, estimated in the training, 0 for one share of right labels for
        all, and between them a mean of both
    balance: the teacher's answers are brought to the class shares of the trusted labels
    judging: temperature of the answers that labels are judged by; below 1 if the teacher is underconfident
    ramp: the share of all steps over which g rises, since the first teachers know nothing
    mixup: a of Beta(a, a); 0 mixes nothing; half of images are mixed by cutmix instead
    target_share: a, the share of the loss that the target's rows have, which mixup mixes with rows of both sides;
        ``None`` gives every example of both batches the same weight
    """

    teacher: float = 0.999
    labels: Literal["doubted", "believed", "ignored"] = "doubted"
    answers: bool = True
    by_class: float = 0.5
    balance: bool = True
    judging: float = 0.5
    ramp: float = 0.05
    mixup: float = 0.5
    target_share: float | None = None

    name = "strong"
    takes_views = True

    def __post_init__(self) -> None:
        for name in ("teacher", "ramp", "by_class", "target_share"):
            if getattr(self, name) is not None:
                require_share(name, getattr(self, name))
        if self.labels not in LABELS:
            raise UsageError(f"labels must be one of {', '.join(map(repr, LABELS))}, got {self.labels!r}.")
        if not self.judging > 0:
            raise UsageError(f"judging must be above 0, got {self.judging!r}: 0.5 sharpens, 1 does not.")
        if not self.mixup >= 0:
            raise UsageError(f"mixup must be 0 or more, got {self.mixup!r}.")

    def init(self, task: Task) -> StrongState:
        return StrongState.start(task, **self.parts(task))

    def parts(self, task: Task) -> dict[str, Any]:
        """What a state begins with."""
        classes = require_classes(task, self.name)
        if classes < 2:
            raise UsageError(f"{self.name} needs two classes or more, and the source has one class: train it plainly.")
        judge = Judge(classes, self.judging, self.balance, self.by_class, task.target_shares)
        return {
            "weights": Weights(task.n_source, device=task.device),
            "teacher": Teacher(task.model, self.teacher),
            "judge": judge,
            "beliefs": judge.init(task.device),
            "taken": torch.zeros((), dtype=torch.int64, device=task.device),
            "key": int(torch.randint(1 << 62, ())),
        }

    def step(self, state: StrongState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:
        weak, views = views_of(source, self.name)
        with torch.no_grad():
            judged = view_scores(state.task, state.teacher.model, weak)
            given, w = self.believed(state, judged, state.beliefs, source, target)
        state.judged = judged
        of_source, of_target = self.losses(state, state.task.model, given, views, source, target)
        a = share_of_target(self.target_share, source, target)
        loss = (1.0 - a) * of_source.mean() + a * of_target.mean()
        state.take(gradient(loss, trainable(state.task.model)))
        state.move_teacher()
        state.report(source.index, w, later=LATER)
        numbers = {"source_loss": of_source.detach().mean(), "target_loss": of_target.detach().mean()}
        return {**numbers, "clean_share": clean_share(state.beliefs)}

    def losses(
        self, state: StrongState, network: nn.Module, given: Tensor, views: list[Inputs], source: Batch, target: Batch
    ) -> tuple[Tensor, Tensor]:
        """H(y, p(x)) of source (B,) and target (T,), mean over the strong views; given: s (B, C)."""
        task = state.task
        _, trusted_views = views_of(target, self.name)
        trusted = one_hot(target.labels, given.shape[1])
        count, n = len(views), len(given) * len(views)
        parts = [structure.concatenate(views), structure.concatenate(trusted_views)]
        classes = torch.cat([given.repeat(count, 1), trusted.repeat(count, 1)])
        if self.mixup:
            rows = torch.arange(len(classes), device=task.device)
            draws = ExampleRandom.of(state.key, rows, state.taken.expand(len(rows)))
            inputs = torch.cat(parts)
            cutmix = IMAGES_CUT if inputs.ndim == 4 else 0.0
            inputs, classes = mixed(inputs, classes, draws, mixup=self.mixup, cutmix=cutmix)
            parts = [inputs]
        losses = -(classes * joint_scores(task, network, parts).log_softmax(1)).sum(1)  # H(y, p)
        of_source, of_target = losses[:n].view(count, -1).mean(0), losses[n:].view(count, -1).mean(0)
        task.guard("source", _blamed(of_source.detach(), state.judged), source.index)
        task.guard("target", of_target.detach(), target.index)
        return of_source, of_target

    def believed(
        self, state: StrongState, judged: Tensor, beliefs: dict[str, Tensor], source: Batch, target: Batch
    ) -> tuple[Tensor, Tensor]:
        """s (B, C) and w (B,), by a teacher's scores; the beliefs learn from them."""
        q = state.judge.answer(judged, target.labels, beliefs)
        r = state.judge.posterior(q, source.labels, beliefs)
        w = r.gather(1, source.labels[:, None]).squeeze(1)
        labels = one_hot(source.labels, r.shape[1])
        if self.labels == "believed":
            return labels, w
        ramp = max(1.0, self.ramp * state.task.steps)
        g = (state.taken / ramp).clamp(max=1.0) if self.ramp else 1.0
        if self.labels == "ignored":
            return g * sharpened(q, 1.0), w
        return labels + g * (self.doubted(r, q, labels) - labels), w

    def doubted(self, r: Tensor, q: Tensor, labels: Tensor) -> Tensor:
        """What source examples are trained on in place of their labels, by r, q and one-hot labels (B, C)."""
        return sharpened(r, 1.0) if self.answers else r * labels


def _blamed(losses: Tensor, judged: Tensor | None) -> Tensor:
    """The losses, or where the teacher has bad scores of some examples, those: one bad example spoils every loss."""
    assert judged is not None
    by_teacher = judged.sum(1)
    return torch.where(by_teacher.isfinite().all(), losses, by_teacher)


@dataclass(kw_only=True)
class StrongState(TaughtState):
    """Beside optimizer, weights and teacher: what is believed about labels.

    judged: the teacher's scores of the last source batch
    """

    judge: Judge
    beliefs: dict[str, Tensor]
    key: int  # of the random numbers of mixing

    def state(self) -> dict[str, Any]:
        return {**super().state(), "beliefs": self.beliefs, "key": self.key}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.beliefs |= load_tree(self.beliefs, state["beliefs"], self.task.device)
        self.key = state["key"]
