"""Which steps run without a CUDA graph so that the engine can be proved; no GPU is needed."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from soseleto.data.batches import Batch
from soseleto.engines.model_state import unchanged
from soseleto.engines.proof import Schedule
from soseleto.task.cuda_graph import WARM_UP, CapturedStep, as_if_recording


class Engine:
    """Counts its calls and holds a proof or check where one is due; replaced at the one numbered ``fails``."""

    def __init__(self, fails: int | None = None) -> None:
        self.name, self.schedule, self.fails = "layerwise", Schedule(), fails
        self.proofs: list[int] = []

    def __call__(self) -> None:
        if self.schedule.count() or self.schedule.needs_check:
            self.proofs.append(self.schedule.calls)
            self.schedule.proved((), is_new=False)
            if len(self.proofs) == self.fails:
                self.name = "forward"


class Recording(CapturedStep):
    """Without a GPU: a recording is only noted, and replays count."""

    replays = 0

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.recordings: list[str | None] = []

    def _capture(self, kind: Any, source: Batch, target: Batch) -> bool:
        def replay(*args: Any) -> dict[str, torch.Tensor]:
            self.replays += 1
            return {}

        self._recorded[kind] = SimpleNamespace(replay=replay)  # type: ignore[assignment]
        self.recordings.append(self._engine_name)
        return True


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> Batch:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return Batch(torch.arange(2), torch.zeros(2, 1), torch.zeros(2))


def test_steps_before_a_recording_run_as_if_it_had_begun(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    seen: list[bool] = []
    before, told = torch.cuda.is_current_stream_capturing, list[str]()
    for capturable in (True, False):
        look = lambda source: seen.append(torch.cuda.is_current_stream_capturing())  # noqa: E731
        recording(look, Engine(), told.append, capturable=capturable)(batch, batch)
    assert seen == [True, False]
    assert told == ["steps run one kernel at a time, since a CUDA graph needs an optimizer made with capturable=True"]
    assert torch.cuda.is_current_stream_capturing is before


def test_a_step_that_reads_what_the_optimizer_keeps_is_recorded_when_it_is_kept_and_on_the_device(batch: Batch) -> None:
    adam = torch.optim.Adam([torch.zeros(1)])
    adam.param_groups[0]["fused"] = True
    state, told = SimpleNamespace(engine=Engine(), optimizer=adam), list[str]()
    step = Recording(lambda *_, **__: {}, state, told.append, reads=("capturable", "fused"))
    for taken in (False, True):
        if taken:
            adam.state[adam.param_groups[0]["params"][0]] = {"step": torch.ones(())}
        for _ in range(WARM_UP + 1):
            step(batch, batch)
    assert len(step.recordings) == 2
    assert not told
    adam.param_groups[0]["fused"] = None
    Recording(lambda *_, **__: {}, state, told.append, reads=("capturable", "fused"))
    assert told[0].endswith("a CUDA graph needs an optimizer made with capturable=True or fused=True")


def test_what_has_no_side_effects_has_none_in_a_step_that_runs_as_if_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a proof would move BatchNorm's statistics, and dropout would draw other numbers after it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("soseleto.engines.model_state._is_capturing", lambda: False)
    model, before = nn.BatchNorm1d(2), torch.get_rng_state()
    with as_if_recording(), unchanged(model):
        model(torch.randn(4, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert model.num_batches_tracked == 0
    assert not model.running_mean.any()


def recording(step: Any, engine: Engine | None = None, log: Any = pytest.fail, **group: Any) -> Recording:
    """A recording of ``step(source)``, whose result is not used; a model that is the step belongs to the task."""
    model = step if isinstance(step, nn.Module) else None
    optimizer = SimpleNamespace(param_groups=[group] if group else [])
    state = SimpleNamespace(engine=engine, task=SimpleNamespace(model=model), optimizer=optimizer)
    return Recording(lambda source, target, **_: step(source) or {}, state, log)


def run(engine: Engine, batch: Batch, steps: int) -> Recording:
    step = recording(lambda source: engine(), engine)
    for _ in range(steps):
        step(batch, batch)
    return step


def test_steps_with_a_proof_run_on_the_host_and_replays_count(batch: Batch) -> None:
    engine = Engine()
    step = run(engine, batch, 200)
    assert engine.proofs[:4] == [1, 2, 3, 4]
    checks = engine.proofs[3:]
    assert all(25 <= later - earlier <= 50 for earlier, later in pairwise(checks))
    assert engine.schedule.calls == 200
    assert 200 - checks[-1] < 50
    assert step.recordings == ["layerwise"]
    assert step.replays == 200 - WARM_UP - len(checks)


def test_steps_are_recorded_again_when_the_engine_was_replaced(batch: Batch) -> None:
    assert run(Engine(fails=5), batch, 60).recordings == ["layerwise", "forward"]


def test_batches_of_each_shape_have_their_own_recording(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    """As texts padded to a few lengths; beyond the largest number of recordings steps run without one."""
    monkeypatch.setattr("soseleto.task.cuda_graph.MOST", 2)
    eager: list[int] = []
    step = recording(lambda source: eager.append(source.inputs.shape[1]))
    for turn in range(18):
        step(Batch(batch.index, torch.zeros(2, 16 + 8 * (turn % 3)), batch.labels), batch)
    assert len(step.recordings) == 2
    assert step.replays == 2 * (6 - WARM_UP)
    assert sorted(eager) == [16] * WARM_UP + [24] * WARM_UP + [32] * 6


class Dropping(nn.Module):
    """A model that decides on the host what it does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.steps, self.layer = how, 0, nn.Linear(1, 1)

    def forward(self, source: Batch) -> None:
        if self.how == "torch":
            torch.rand(())
        elif self.how == "numpy":
            np.random.rand()  # noqa: NPY002
        elif self.how == "random":
            random.random()
        elif self.how == "counts":
            self.steps += 1


@pytest.mark.parametrize(
    ("how", "words"),
    [("torch", "random numbers"), ("numpy", "random numbers"), ("random", "random numbers"), ("counts", "attributes")],
)
def test_a_model_that_decides_on_the_host_is_not_recorded(batch: Batch, how: str, words: str) -> None:
    model, told = Dropping(how), list[str]()
    step = recording(model, log=told.append)
    for _ in range(8):
        step(batch, batch)
    assert not step.recordings
    assert len(told) == 1
    assert words in told[0]


def test_a_model_whose_attributes_were_changed_is_recorded_again(batch: Batch) -> None:
    model = Dropping("not at all")
    step = recording(model)
    for change in (lambda: None, lambda: model.train(False), lambda: model.layer.bias.requires_grad_(False)):
        change()  # type: ignore[no-untyped-call]
        for _ in range(WARM_UP + 3):
            step(batch, batch)
    assert len(step.recordings) == 3
    assert step.replays == 9
