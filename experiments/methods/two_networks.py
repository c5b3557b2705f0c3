"""Two networks that learn from each other: the model of the task, and one like it with other initial values."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from soseleto.data.batches import Batch, ExampleRandom
from soseleto.data.structure import scores_of
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.errors import UsageError
from soseleto.methods.baselines import PhasedState
from soseleto.methods.teacher import view_scores, views_of
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.task.task import Task
from soseleto.weights import Weights


class Networks(nn.Module):
    """Both networks; the scores of the two together are the mean of theirs."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, anew(first)

    def forward(self, inputs: Tensor) -> Tensor:
        mean: Tensor = (scores_of(self.first(inputs)) + scores_of(self.second(inputs))) / 2
        return mean

    @property
    def both(self) -> tuple[nn.Module, nn.Module]:
        return self.first, self.second


def anew(model: nn.Module) -> nn.Module:
    """A copy in training mode whose layers have drawn their initial values again."""
    made = copy.deepcopy(model).train()
    for module in made.modules():
        if callable(reset := getattr(module, "reset_parameters", None)):
            reset()
    return made


def two_views(batch: Batch, name: str) -> tuple[Tensor, Tensor]:
    """The weak view and the only other one."""
    first, others = views_of(batch, name)
    if len(others) != 1:
        raise UsageError(
            f"the method {name!r} takes two views of every image, got {1 + len(others)}: say Views(count=1)."
        )
    return first, others[0]


@dataclass(kw_only=True)
class PairState(PhasedState):
    """Beside optimizer and weights: both networks, and what each has found about the source.

    losses: (2, N) float64, −log p_y of each network at the last visit, mean over the views
    judged: mean of both networks' scores of the last source batch, first view
    """

    MODULES: ClassVar[tuple[str, ...]] = ("second",)  # of ``networks``; the first one is the model of the run
    TENSORS: ClassVar[tuple[str, ...]]  # besides ``losses`` and ``taken``

    networks: Any  # Networks
    losses: Tensor
    taken: Tensor  # steps, on the device
    key: int  # of the random numbers of mixing
    judged: Tensor | None = None

    @classmethod
    def begin(cls, task: Task, networks: Networks, warm_up: float, **own: Any) -> Self:
        return cls.start(
            replace(task, model=networks),
            weights=Weights(task.n_source, device=task.device),
            first_phase=round(warm_up * task.steps),
            networks=networks,
            taken=torch.zeros((), dtype=torch.int64, device=task.device),
            key=int(torch.randint(1 << 62, ())),
            **own,
        )

    @property
    def answering(self) -> Networks:
        """The network to evaluate: the mean of both."""
        return self.networks

    @torch.no_grad()
    def judge(self, source: Batch, views: Sequence[Tensor]) -> Tensor:
        """Scores (2, V, B, C) of both networks for these views; the losses of the batch are recorded."""
        with evaluation_mode(self.networks):
            found = [view_scores(self.task, network, torch.cat(list(views))) for network in self.networks.both]
        scores = torch.stack(found).view(2, len(views), len(source), -1)
        self.judged = scores[:, 0].mean(0)
        losses = -scores.log_softmax(3).mean(1).gather(2, source.labels.expand(2, -1)[..., None]).squeeze(2)
        self.losses[:, source.index] = losses.to(self.losses.dtype)
        return scores

    def draws(self, k: int, classes: Tensor) -> ExampleRandom:
        """Random numbers of this step for the rows of network k."""
        rows = torch.arange(len(classes), device=classes.device)
        return ExampleRandom.of(self.key, rows, self.taken.expand(len(rows)), torch.full_like(rows, k))

    def step_by(self, loss: Tensor, source: tuple[Batch, Tensor], target: tuple[Batch, Tensor]) -> dict[str, Tensor]:
        """One step of both networks; source, target: the batch and its losses."""
        for name, (batch, losses) in (("source", source), ("target", target)):
            self.task.guard(name, losses, batch.index)
        self.take(gradient(loss, trainable(self.task.model)))
        self.taken += 1
        return {"source_loss": source[1].mean(), "target_loss": target[1].mean()}

    def state(self) -> dict[str, Any]:
        modules = {name: dict(getattr(self.networks, name).state_dict()) for name in self.MODULES}
        return {**super().state(), **modules, **self._tensors(), "key": self.key}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        for name in self.MODULES:
            getattr(self.networks, name).load_state_dict(state[name])
        for name, tensor in self._tensors().items():
            tensor.copy_(state[name])
        self.key = state["key"]

    def _tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in ("losses", "taken", *self.TENSORS)}
