"""StrongPair: two networks, each of which judges labels for the other.

    q¹, q² = teachers of network 1 and 2 (weak view)
    s¹ = believed by q², s² = believed by q¹                    as in method.py, each with beliefs of its own
    θ ← one step of both, on the same mixed views with s¹ and s²

A network that judges its own labels confirms its mistakes; two with other initial values make other mistakes (Han et
al., 2018). It takes twice the computation. The weight of a source example is the mean of both w. The second network is
a copy of the model whose layers draw their initial values again, so pretrained values are lost. After the last step
both are their teachers; ``Result.model`` is both, whose mean is evaluated, and a run folder keeps the first alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.methods.two_networks import Networks
from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.autograd import gradient
from soseleto.methods.baselines import share_of_target
from soseleto.methods.strong import LATER, Strong, StrongState
from soseleto.methods.teacher import clean_share, view_scores, views_of
from soseleto.task.task import Task, load_tree


@dataclass(frozen=True, kw_only=True)
class StrongPair(Strong):
    """The strong recipe with two networks that judge for each other; its settings are those of ``Strong``."""

    name = "strong_pair"

    def init(self, task: Task) -> StrongPairState:
        both = replace(task, model=Networks(task.model))
        parts = self.parts(both)
        return StrongPairState.start(both, others=parts["judge"].init(task.device), **parts)

    def step(self, state: StrongPairState, source: Batch, target: Batch, *, monitor: bool = False) -> dict[str, Tensor]:  # type: ignore[override]
        task = state.task
        weak, views = views_of(source, self.name)
        with torch.no_grad():
            judged = [view_scores(task, teacher, weak) for teacher in state.teacher.model.both]  # type: ignore[union-attr]
            beliefs = (state.beliefs, state.others)  # of the teachers
            found = [self.believed(state, *one, source, target) for one in zip(judged, beliefs, strict=True)]
        state.judged = (judged[0] + judged[1]) / 2
        (by_first, w), (by_second, v) = found
        pairs = zip(task.model.both, (by_second, by_first), strict=True)
        losses = [self.losses(state, network, given, views, source, target) for network, given in pairs]
        of_source, of_target = (torch.stack(each) for each in zip(*losses, strict=True))
        a = share_of_target(self.target_share, source, target)
        loss = (1.0 - a) * of_source.mean(1) + a * of_target.mean(1)
        state.take(gradient(loss.sum(), trainable(task.model)))
        state.move_teacher()
        state.report(source.index, (w + v) / 2, later=LATER)
        numbers = {"source_loss": of_source.detach().mean(), "target_loss": of_target.detach().mean()}
        return {**numbers, "clean_share": (clean_share(state.beliefs) + clean_share(state.others)) / 2}


@dataclass(kw_only=True)
class StrongPairState(StrongState):
    """beliefs, others: what is believed about labels by the first teacher and by the second."""

    others: dict[str, Tensor]

    def state(self) -> dict[str, Any]:
        return {**super().state(), "others": self.others, "second": dict(self.task.model.second.state_dict())}

    def load_state(self, state: Mapping[str, Any]) -> None:
        super().load_state(state)
        self.others |= load_tree(self.others, state["others"], self.task.device)
        self.task.model.second.load_state_dict(state["second"])
