"""Every piece through the same contract: state in place, saved and restored, in micro-batches, in any allowed place."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from small_tasks import N, batches, noisy_task, transfer_task
from soseleto import Soseleto, pieces
from soseleto.parallel.micro_batches import Sharing
from soseleto.pieces import (
    at_temperature,
    beyond_noise,
    centred,
    chain,
    from_features,
    hold_when_vanished,
    label_doubt,
    last_batch,
    last_layer,
    mean,
    normalized,
    per_error,
    pooled_by_class,
    preconditioned,
    running_mean,
    scale_by_rms,
    target_share,
    unit_length,
    whitened,
    without_own_error,
)
from soseleto.run_folder import checkpoint
from soseleto.task.optimizers import adamw, sgd
from soseleto.task.task import Task

task = partial(transfer_task, make_optimizer=partial(sgd, lr=0.1), classes=3)
METHODS: dict[str, Soseleto] = {
    "last_batch": Soseleto(direction=last_batch()),
    "running_mean": Soseleto(direction=running_mean(0.8)),
    "preconditioned": Soseleto(direction=preconditioned(running_mean(0.8))),
    "per_error": Soseleto(alignment=chain(per_error(), scale_by_rms())),
    "scale_by_rms": Soseleto(alignment=scale_by_rms()),
    "hold_when_vanished": Soseleto(alignment=hold_when_vanished(0.5), weight_step=0.5),
    "beyond_noise": Soseleto(alignment=chain(scale_by_rms(), beyond_noise(0.5))),
    "from_features": Soseleto(alignment=from_features()),
    "chain": Soseleto(alignment=chain(hold_when_vanished(), chain(scale_by_rms(), per_error()))),
    "mean": Soseleto(source_loss=mean(), initial_weight=0.5),
    "normalized": Soseleto(source_loss=normalized(), initial_weight=0.5),
    "label_doubt": Soseleto(source_loss=label_doubt(), initial_weight=0.7),
    "target_share": Soseleto(gradients=target_share(0.3)),
    "pooled_by_class": Soseleto(scores=pooled_by_class()),
    "last_layer": Soseleto(alignment=chain(last_layer(), scale_by_rms())),
    "at_temperature": Soseleto(alignment=last_layer(at_temperature(4.0))),
    "centred": Soseleto(scores=last_layer(centred())),
    "whitened": Soseleto(scores=last_layer(whitened(0.3))),
    "unit_length": Soseleto(alignment=last_layer(unit_length()), scores=last_layer(centred(), unit_length())),
    "without_own_error": Soseleto(scores=last_layer(without_own_error())),
}


def test_every_piece_is_in_the_table() -> None:
    assert set(pieces.__all__) - {"Piece"} == set(METHODS)


def task_of(name: str, **changes: Any) -> Task:
    """Transfer mode, or for pieces that need one head noisy-label mode."""
    method = METHODS[name]
    if name == "preconditioned":
        changes["make_optimizer"] = partial(adamw, lr=0.05)
    if name == "from_features":
        changes["features"] = lambda batch: batch.inputs
    if not (method.alignment.reads_layer or (method.scores is not None and method.scores.reads_layer)):
        return task(**changes)
    return noisy_task(**{"make_optimizer": partial(sgd, lr=0.1), "classes": 3, **changes})


def leaves(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping | list):
        for _, value in sorted(tree.items()) if isinstance(tree, Mapping) else enumerate(tree):
            yield from leaves(value)
    else:
        raise AssertionError(f"{tree!r} is neither a tensor nor a mapping nor a list")


def outcome(state: Any) -> list[Tensor]:
    parameters = [p.detach() for p in state.task.model.parameters()]
    return [t.clone() for t in (*parameters, state.weights.values, state.weights.scores, *leaves(state.pieces))]


@pytest.mark.parametrize("name", METHODS)
def test_state_is_a_tree_of_tensors_that_are_changed_in_place(name: str) -> None:
    method = METHODS[name]
    state = method.init(task_of(name))
    method.step(state, *batches(0))  # running means are made by the first batch
    before = {tensor.data_ptr() for tensor in leaves(state.pieces) if tensor.numel()}
    method.step(state, *batches(1))
    assert {tensor.data_ptr() for tensor in leaves(state.pieces) if tensor.numel()} == before
    examples = [its["examples"] for its in state.pieces.values() if isinstance(its, Mapping) and "examples" in its]
    assert all(len(entries) == N for one in examples for entries in one.values())


@pytest.mark.parametrize("name", METHODS)
def test_a_saved_state_continues_bit_for_bit(name: str, tmp_path: Path) -> None:
    method = METHODS[name]
    whole = method.init(task_of(name))
    for step in range(6):
        method.step(whole, *batches(step))
    first = method.init(task_of(name))
    for step in range(3):
        method.step(first, *batches(step))
    checkpoint.save(tmp_path, 3, {"method": first.state(), "optimizer": first.optimizer.state_dict()})
    found = checkpoint.load_last(tmp_path, lambda text: None)
    second = method.init(task_of(name))
    second.task.model.load_state_dict(copy.deepcopy(first.task.model.state_dict()))
    second.optimizer.load_state_dict(found[1]["optimizer"])
    second.load_state(found[1]["method"])
    for step in range(3, 6):
        method.step(second, *batches(step))
    assert all(torch.equal(a, b) for a, b in zip(outcome(second), outcome(whole), strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_give_what_the_whole_batch_gives(name: str) -> None:
    method = METHODS[name]
    states = [method.init(task_of(name)), method.init(task_of(name, sharing=Sharing(micro_batch_size=3)))]
    for state in states:
        for step in range(4):
            method.step(state, *batches(step))
    for one, other in zip(outcome(states[0]), outcome(states[1]), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
