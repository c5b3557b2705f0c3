"""Controls: what they change of a batch, and what they leave."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.controls import FrozenStrong, ShuffledStrong, ShuffledWeights, _Shuffled
from small_tasks import noisy_task
from soseleto.algorithm import Soseleto
from soseleto.data.batches import Batch
from soseleto.methods import Strong

C, B = 4, 6


def given_by(method: Strong) -> tuple[Tensor, Tensor, Tensor]:
    """What a source batch is trained on, its weights, and its labels, by a teacher's random scores."""
    seeded = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    state = method.init(noisy_task(nn.Linear(3, C), n_source=B, classes=C))
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
    s, _, labels = given_by(Strong(ramp=0.0))
    own = s.gather(1, labels[:, None]).squeeze(1)
    others = s.scatter(1, labels[:, None], 0.0)
    others = others / others.sum(1, keepdim=True)
    found, _, _ = given_by(ShuffledStrong(ramp=0.0, others=True))
    expected = torch.stack([own[i - 1] for i in range(B)])
    torch.testing.assert_close(found.gather(1, labels[:, None]).squeeze(1), expected)
    rest = found.scatter(1, labels[:, None], 0.0)
    torch.testing.assert_close(rest, (1 - expected)[:, None] * others, rtol=1e-4, atol=1e-4)


def test_shuffled_weights_weigh_other_examples() -> None:
    weights = _Shuffled(50)
    moved = torch.arange(10)
    weights.step(moved, torch.full((10,), -0.5), torch.zeros(10), weights.rows(moved))  # as the algorithm calls it
    assert weights.values[:10].eq(0.5).all()
    assert not torch.equal(weights.rows(torch.arange(50))[0], weights.values)
    assert torch.equal(weights.rows(torch.arange(50))[0].sort().values, weights.values.sort().values)


def test_the_step_of_shuffled_weights_follows_those_of_others() -> None:
    torch.manual_seed(0)
    inputs, labels = torch.randn(50, 4), torch.randint(3, (50,))
    moved = {}
    for method in (Soseleto(), ShuffledWeights()):
        model = nn.Linear(4, 3)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        state = method.init(noisy_task(model, n_source=50))
        state.weights.values[:25] = 0.0
        weighs = state.weights.rows(torch.arange(50))[0]
        method.step(state, Batch(torch.arange(50), inputs, labels), Batch(torch.arange(4), inputs[:4], labels[:4]))
        moved[method.name] = model.weight.detach().clone()
        zeros = torch.zeros(3, 4, requires_grad=True)
        plain = F.cross_entropy(F.linear(inputs, zeros), labels, reduction="none")
        (expected,) = torch.autograd.grad((weighs * plain).sum() / weighs.sum(), zeros)
        assert torch.allclose(moved[method.name], -0.1 * expected, atol=1e-6)
    assert not torch.allclose(moved["soseleto"], moved["shuffled_weights"])
