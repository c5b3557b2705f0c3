"""The strong recipe in transfer mode: a step against its equations, a training, a resumed one, and what is refused."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto import Soseleto
from soseleto.data import Views
from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.errors import UsageError
from soseleto.methods import Strong, StrongTransfer
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.task.losses import TransferLosses
from soseleto.task.optimizers import sgd
from soseleto.task.task import Task, after_step
from soseleto.training.fit import fit
from soseleto.training.options import Checkpoints, Inputs
from tiny_pictures import Stop, pictures, stopping
from two_views import WIDTH, B, C, T, batch, close

OTHERS, STEPS = 3, 10  # classes of the target


def network() -> TrunkAndHeads:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        trunk = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh())
        return TrunkAndHeads(trunk, nn.Linear(6, C), nn.Linear(6, OTHERS)).double()


def task(model: nn.Module) -> Task:
    names = frozenset(trainable(model))
    return Task(
        model=model, losses=TransferLosses(), n_source=B, steps=STEPS, classes=C,
        shared=frozenset(name for name in names if name.startswith("trunk.")),
        target_head=frozenset(name for name in names if name.startswith("target_head.")),
        make_optimizer=partial(sgd, lr=0.1, momentum=0.0),
    )  # fmt: skip


def pair(step: int) -> tuple[Batch, Batch]:
    target = batch(T, 100 + step)
    return batch(B, step), Batch(target.index, target.inputs, target.labels % OTHERS)


@pytest.mark.parametrize("ramp", [0.3, 0.0])
def test_a_step_is_algorithm_1_on_strong_views_and_softened_labels(ramp: float) -> None:
    method = StrongTransfer(teacher=0.4, consistency=0.6, temperature=0.7, ramp=ramp)
    model, slow = network(), network()
    state, expected = method.init(task(model)), Soseleto().init(task(slow))
    teacher = copy.deepcopy(slow)
    for step in range(5):
        source, target = pair(step)
        numbers = method.step(state, source, target)

        g = 0.6 * (min(1.0, step / 3) if ramp else 1.0)
        learned, losses = [], []
        for side, given in (("source", source), ("target", target)):
            rows = []
            for i, label in enumerate(given.labels):
                q = getattr(teacher, f"{side}_head")(teacher.trunk(given.inputs[0][i])).softmax(0) ** (1 / 0.7)
                y = g * q / q.sum()
                rows.append(y + (1 - g) * torch.eye(len(q), dtype=torch.float64)[label])
            learned.append(Batch(given.index, given.inputs[1], torch.stack(rows).detach()))
            p = getattr(slow, f"{side}_head")(slow.trunk(given.inputs[1])).softmax(1)
            losses.append(float(-(learned[-1].labels * p.log()).sum(1).mean().detach()))
        assert float(numbers["source_loss"]) == pytest.approx(losses[0], rel=1e-6)
        assert float(numbers["target_loss"]) == pytest.approx(losses[1], rel=1e-6)
        Soseleto().step(expected, *learned)
        decay = min(0.4, (1 + step) / (10 + step))
        with torch.no_grad():
            for mean, value in zip(teacher.parameters(), slow.parameters(), strict=True):
                mean.copy_(decay * mean + (1 - decay) * value)
        torch.testing.assert_close(state.weights.values, expected.weights.values)
    close(model, slow)
    close(state.teacher.model, teacher)
    assert state.weights.values.unique().numel() > 1


def columns(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Two classes: whether the bright third of the image is the first, from left to right."""
    images, labels = pictures(n, seed)
    return images.transpose(2, 3).contiguous(), (labels > 0).long()


def trunk() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(81, 16), nn.ReLU())


def trained(epochs: int = 5, **options: Any) -> soseleto.Result:
    views = Views(flip=False, count=1)
    common: dict[str, Any] = {
        "batch_size": 32,
        "target_batch_size": 12,
        "device": "cpu",
        "inputs": Inputs(augment=views),
    }
    common |= {"mode": "transfer", "method": Strong(), "epochs": epochs}
    return fit(trunk(), pictures(160, 0), columns(24, 1), **{**common, **options})


def test_the_model_ends_as_the_teacher() -> None:
    model, method = network(), StrongTransfer()
    state = method.init(task(model))
    for step in range(STEPS):
        assert state.answering is state.teacher.model
        method.step(state, *pair(step))
        after_step(state)
    assert state.answering is model
    for mine, its in zip(model.parameters(), state.teacher.model.parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_run_resumes_bit_for_bit_with_its_teacher(tmp_path: Path) -> None:
    whole = trained(3, optimizer=stopping(0), out=tmp_path / "whole")
    kept = {"out": tmp_path / "run", "checkpoints": Checkpoints(steps=3, seconds=None)}
    with pytest.raises(Stop):
        trained(3, optimizer=stopping(8), **kept)
    found = trained(3, optimizer=stopping(0), **kept)
    assert "resumed after step 6" in found.messages
    for name, value in found.model.state_dict().items():
        assert torch.equal(value, whole.model.state_dict()[name]), name
    assert torch.equal(found.scores, whole.scores)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"inputs": Inputs(augment=Views())}, r"takes two views of every image, got 3: say Views\(count=1\)"),
        ({"loss": partial(soseleto.cross_entropy)}, "'strong_transfer' is for class labels and cross-entropy"),
        ({"mode": "noisy", "method": StrongTransfer()}, "say mode='transfer'"),
    ],
)
def test_what_does_not_fit_is_one_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trained(1, **options)
