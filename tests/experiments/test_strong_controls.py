"""Controls of the strong recipe: what they change of a batch, and what they leave."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from experiments.strong_controls import FrozenStrong, ShuffledStrong
from soseleto.data.batches import Batch
from soseleto.methods import Strong
from soseleto.task.losses import NoisyLosses
from soseleto.task.optimizers import sgd
from soseleto.task.task import Task

C, B = 4, 6


def given_by(method: Strong) -> tuple[Tensor, Tensor, Tensor]:
    """What a source batch is trained on, its weights, and its labels, by a teacher's random scores."""
    seeded = torch.Generator().manual_seed(0)
    model = nn.Linear(3, C)
    task = Task(
        model=model,
        losses=NoisyLosses(),
        n_source=B,
        steps=10,
        shared=frozenset(name for name, _ in model.named_parameters()),
        classes=C,
        target_head=frozenset(),
        make_optimizer=partial(sgd, lr=0.1),
        device=torch.device("cpu"),
        guard=lambda side, losses, index: None,
    )
    torch.manual_seed(0)
    state = method.init(task)
    labels = torch.randint(C, (B,), generator=seeded)
    source = Batch(torch.arange(B), torch.zeros(B, 3), labels)
    judged = 2 * torch.randn(B, C, generator=seeded)
    state.taken += 1
    s, w = method.believed(state, judged, state.beliefs, source, Batch(torch.arange(2), torch.zeros(2, 3), labels[:2]))
    return s, w, labels


def test_labels_are_believed_by_other_weights_and_the_rest_by_the_teachers_answer() -> None:
    for ramp, g in ((0.0, 1.0), (0.5, 0.2)):
        _, w, labels = given_by(Strong(ramp=ramp))
        q = given_by(Strong(ramp=0.0, labels="ignored"))[0]
        label = torch.eye(C)[labels]
        for method, v in (
            (FrozenStrong(ramp=ramp), w.mean().expand(B)),
            (ShuffledStrong(ramp=ramp), torch.stack([w[i - 1] for i in range(B)])),
        ):
            found, learned, _ = given_by(method)
            assert torch.equal(learned, w)
            expected = (1 - g) * label + g * (v[:, None] * label + (1 - v[:, None]) * q)
            torch.testing.assert_close(found, expected)


def test_with_others_answers_keep_their_proportions() -> None:
    for ramp in (0.0, 0.5):  # g is 1, and 0.2
        s, w, labels = given_by(Strong(ramp=ramp))
        own = s.gather(1, labels[:, None]).squeeze(1)
        others = s.scatter(1, labels[:, None], 0.0)
        others = others / others.sum(1, keepdim=True)
        assert float(own.max() - own.min()) > 0.1
        for method, expected in (
            (FrozenStrong(ramp=ramp, others=True), own.mean().expand(B)),
            (ShuffledStrong(ramp=ramp, others=True), torch.stack([own[i - 1] for i in range(B)])),
        ):
            found, learned, _ = given_by(method)
            assert torch.equal(learned, w)
            torch.testing.assert_close(found.gather(1, labels[:, None]).squeeze(1), expected)
            rest = found.scatter(1, labels[:, None], 0.0)
            torch.testing.assert_close(rest, (1 - expected)[:, None] * others, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(found.sum(1), torch.ones(B))
