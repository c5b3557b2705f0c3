"""On a GPU: the same answers as on the CPU, and captured steps that do what plain steps do."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rows
import soseleto
from experiments.methods import METHODS
from experiments.settings import DivideMix, FixMatch, ProMix, StrongPair
from ranks import free_port
from small_tasks import noisy_task
from soseleto.algorithm import Soseleto
from soseleto.data import Augment, Examples
from soseleto.data.batches import Batch
from soseleto.engines import make_engine, trainable
from soseleto.errors import EngineError
from soseleto.methods import Strong
from soseleto.models.architectures import group_norm, quick, resnet18
from soseleto.pieces import (
    at_temperature,
    chain,
    hold_when_vanished,
    label_doubt,
    last_batch,
    last_layer,
    per_error,
    pooled_by_class,
    preconditioned,
    scale_by_rms,
    target_share,
    unit_length,
    whitened,
    without_own_error,
)
from soseleto.schedules import linear
from soseleto.task.cuda_graph import CapturedStep
from soseleto.task.optimizers import adamw, sgd
from soseleto.task.task import LossGuard, Task, after_step
from soseleto.training.options import Inputs
from zoo import PROBLEMS, Problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
EXACT = [p for p in PROBLEMS if "loop" not in p.declines]
ROWS = [p for p in rows.PROBLEMS if not p.declines]
FUSED_CELLS = ("lstm", "gru")  # on a GPU their fused cells have no forward-mode rule
CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("problem", "engine"),
    [
        pytest.param(problem, engine, id=f"{engine}-{problem.name}")
        for engine in ("double_backward", "forward", "layerwise")
        for problem in (EXACT if engine != "layerwise" else EXACT + ROWS)
        if engine not in problem.declines
    ],
)
def test_engine_equals_loop_on_the_gpu(problem: Problem, engine: str) -> None:
    if engine == "forward" and problem.name in FUSED_CELLS:
        with pytest.raises(EngineError, match="forward AD with _thnn_fused"):
            on_gpu(problem, engine)
        return
    right = on_gpu(problem, "loop")
    try:
        found = on_gpu(problem, engine)
    except EngineError as error:  # checkpoints had no forward-mode rule before torch 2.13
        assert (engine, problem.name) in {("forward", "checkpointed"), ("layerwise", "gru_cell")}  # a fused kernel
        assert "no rule" in str(error)  # noqa: PT017
        return
    assert float((found - right).norm() / right.norm()) < 1e-6


def on_gpu(problem: Problem, engine: str) -> Tensor:
    model, batch = problem.build()
    model, batch = model.to(CUDA), tuple(part.to(CUDA) for part in batch)
    seeded = torch.Generator().manual_seed(1)
    direction = {n: torch.randn(p.shape, dtype=p.dtype, generator=seeded).to(CUDA) for n, p in trainable(model).items()}
    torch.manual_seed(5)
    return make_engine(engine)(model, problem.loss, batch, direction)[1]


def quick_task(model: nn.Module) -> Task:
    return noisy_task(
        model, n_source=64, steps=40, make_optimizer=partial(sgd, lr=0.01, weight_decay=5e-4), make_schedule=linear,
        device=CUDA, classes=10, guard=LossGuard(CUDA),
    )  # fmt: skip


def following(method: Soseleto, task: Task) -> Task:
    """With AdamW where the direction follows the optimizer."""
    is_adaptive = isinstance(method.direction, preconditioned)
    return replace(task, make_optimizer=partial(adamw, lr=1e-3)) if is_adaptive else task


RANKING = last_layer(whitened(), unit_length(), at_temperature(), without_own_error())


def random_batch(n: int, seed: int) -> Batch:
    seeded = torch.Generator().manual_seed(seed)
    inputs = torch.randn(n, 3, 32, 32, generator=seeded)
    labels = torch.randint(10, (n,), generator=seeded)
    return Batch(torch.randperm(64, generator=seeded)[:n].to(CUDA), inputs.to(CUDA), labels.to(CUDA))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"direction": last_batch()},
        {"weight_step": None},
        {"source_loss": label_doubt()},
        {"scores": pooled_by_class(), "alignment": chain(per_error(), scale_by_rms(), hold_when_vanished())},
        {"gradients": target_share(0.3)},
        {"engine": "auto", "alignment": chain(last_layer(), scale_by_rms())},
        {"scores": RANKING},
        {"direction": preconditioned()},
    ],
)
def test_captured_steps_equal_plain_steps(settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    start = quick().to(CUDA)
    states, told = [], []
    for captured in (False, True):
        method = Soseleto(**{"engine": "layerwise", **settings})
        state = method.init(following(method, quick_task(copy.deepcopy(start))))
        step: Any = (
            CapturedStep(partial(method.step, state), state, told.append)
            if captured
            else lambda s, t, m=method, st=state: m.step(st, s, t)
        )
        for m in range(12):
            source, target = random_batch(32 if m != 8 else 20, m), random_batch(8, 100 + m)
            step(source, target)
            after_step(state)
            assert state.schedule is not None
            state.schedule.step()
        states.append(state)
    assert not told
    plain, replayed = states
    for name, value in plain.weights.state().items():
        # twelve steps on noise amplify the order of a GPU's sums
        assert torch.allclose(replayed.weights.state()[name], value, rtol=2e-2, atol=5e-3), name
    assert apart(plain.task.model, replayed.task.model, start) < 0.3


def apart(one: nn.Module, other: nn.Module, start: nn.Module) -> float:
    """How far two networks are from each other, as a share of the way that the first has come.

    A few steps on noise amplify the order of a GPU's sums: 0.12 was seen.
    """
    first, second, before = (torch.nn.utils.parameters_to_vector(m.parameters()) for m in (one, other, start))
    return float(((first - second).norm() / (first - before).norm()).detach())


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(
    ("norm", "method"),
    [
        (group_norm, Soseleto()),
        (nn.BatchNorm2d, Soseleto()),
        (nn.BatchNorm2d, Soseleto(alignment=last_layer(), scores=RANKING)),
        (group_norm, Soseleto(direction=preconditioned())),
    ],
    ids=["layerwise", "forward", "last layer", "preconditioned"],
)
def test_a_step_never_waits_for_the_gpu(norm: Any, method: Soseleto) -> None:
    model = resnet18(width=8, norm=norm).to(CUDA).train()
    state = method.init(following(method, quick_task(model)))
    step = CapturedStep(partial(method.step, state), state, lambda text: pytest.fail(text))
    for m in range(6):  # the engine is chosen and proved, and proved again at steps 2, 4 and 8 where it is due
        step(random_batch(32, m), random_batch(8, 100 + m))
    batches = [(random_batch(32, m), random_batch(8, 100 + m)) for m in range(6)]
    step(*batches[0])
    step(*batches[1])  # recorded before
    try:
        torch.cuda.set_sync_debug_mode("error")
        for source, target in batches[2:]:
            step(source, target)
            state.schedule.step()
        method.step(state, *batches[0])  # and one kernel at a time
    finally:
        torch.cuda.set_sync_debug_mode("default")


def two_views(n: int, seed: int) -> Batch:
    batch = random_batch(n, seed)
    return replace(batch, inputs=(batch.inputs, batch.inputs + 0.1))


STRONG = {
    "cutmix": Strong(by_class=True),
    "pair": StrongPair(),
    "fixmatch": FixMatch(threshold=0.12),
    "divide_mix": DivideMix(),  # its warm-up has four steps
    "promix": ProMix(agree_after=0.2, confidence=0.12),
}


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("method", STRONG.values(), ids=STRONG)
def test_steps_on_views_are_captured_and_never_wait(method: Any) -> None:
    torch.manual_seed(0)
    start, states = resnet18(width=8).to(CUDA).train(), []
    for captured in (False, True):
        torch.manual_seed(1)  # of a second network, and of the key of its random numbers
        slow = replace(quick_task(copy.deepcopy(start)), make_optimizer=partial(sgd, lr=1e-3))
        state = method.init(slow)  # at larger rates the order of a GPU's sums shows
        before = copy.deepcopy(state.answering)
        step: Any = CapturedStep(partial(method.step, state), state, lambda text: pytest.fail(text))
        for m in range(12):
            pair = two_views(32, m), two_views(8, 100 + m)
            if m == 8:
                torch.cuda.set_sync_debug_mode("error")
            try:
                step(*pair) if captured else method.step(state, *pair)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert int(state.taken) == state.steps == 12
        states.append(state)
    plain, replayed = states
    torch.testing.assert_close(replayed.weights.values, plain.weights.values, rtol=0.02, atol=0.02)
    assert apart(plain.answering, replayed.answering, before) < 0.3


@pytest.mark.parametrize("method", [Soseleto(), METHODS["reweight"]()], ids=["soseleto", "reweight"])
def test_captured_steps_are_proved_at_intervals(method: Any) -> None:
    told: list[str] = []
    state = method.init(quick_task(quick().to(CUDA)))
    step = CapturedStep(partial(method.step, state), state, told.append)
    for m in range(20):
        step(random_batch(32, m), random_batch(8, 100 + m))
    assert not told
    assert state.engine.schedule.calls == 20
    assert state.engine.schedule.at > 20  # the proof at step 16 was held
    assert step._recorded


FEATURES = torch.randn(64, 20, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("dtype", "features"), [(None, None), (torch.bfloat16, None), (None, FEATURES)])
def test_a_loop_of_the_users_own_as_a_cuda_graph(
    dtype: torch.dtype | None, features: Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    start, loss = quick().to(CUDA), lambda m, b: F.cross_entropy(m(b["x"]).float(), b["y"], reduction="none")
    runs = []
    for cuda_graph in (False, True):
        model = copy.deepcopy(start)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        given = {"n_source": 64, "loss": loss, "optimizer": optimizer, "cuda_graph": cuda_graph, "features": features}
        selection = soseleto.Selection(model, **given)
        losses = []
        for m in range(20):
            pair = [random_batch(32, m), random_batch(8, 100 + m)]
            batches = [{"x": one.inputs, "y": one.labels} for one in pair]
            with torch.autocast("cuda", dtype, enabled=dtype is not None), caplog.at_level("INFO"):
                losses.append(selection.backward(*batches, index=pair[0].index, scale=0.5)["source_loss"])
            if m % 2:
                optimizer.step()
                optimizer.zero_grad(set_to_none=m % 4 == 1)
        runs.append((model, selection, torch.stack(losses)))
    assert not [record for record in caplog.messages if "one kernel at a time" in record]
    (plain, one, eager), (recorded, other, replayed) = runs
    assert all(step._recorded for step in other._recorded.values())
    torch.testing.assert_close(replayed, eager, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(other.weights, one.weights, rtol=2e-2, atol=2e-2)
    assert apart(plain, recorded, start) < 0.3


def examples(n: int, seed: int) -> Examples:
    seeded = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (n,), generator=seeded)
    inputs = torch.randint(0, 100, (n, 3, 32, 32), generator=seeded, dtype=torch.uint8)
    inputs[labels == 1, 0] += 100
    truth = labels.clone()
    labels[: n // 4] = 1 - labels[: n // 4]
    return Examples(inputs, labels, truth=truth)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_fit_on_the_gpu_separates_the_labels(precision: torch.dtype | None) -> None:
    source, target = examples(1000, 0), examples(400, 1)
    target = Examples(target.inputs, target.truth)  # type: ignore[arg-type]
    given: dict[str, Any] = {"epochs": 6, "batch_size": 256, "lr": 0.01, "method": Soseleto(), "device": "cuda"}
    given["compute"] = soseleto.Compute(dtype=precision)
    given["inputs"] = Inputs(augment=(Augment(crop=2, flip=True), None))
    result = soseleto.fit(quick(2), source, target, **given)
    wrong = torch.arange(1000) < 250
    assert result.engine == "layerwise"
    assert not any("CUDA graph" in message for message in result.messages)
    assert float(result.scores[wrong].mean()) < float(result.scores[~wrong].mean())
    assert result.evaluate(target)["accuracy"] > 95


def test_one_nccl_rank_trains_what_one_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    launched |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    source, target = random_batch(64, 0), random_batch(16, 1)
    given: dict[str, Any] = {
        "source": (source.inputs.double(), source.labels), "target": (target.inputs.double(), target.labels),
        "epochs": 2, "batch_size": 24, "target_batch_size": 8, "lr": 0.01, "method": Soseleto(engine="layerwise"),
    }  # fmt: skip
    torch.manual_seed(0)
    alone, ranked = quick().double(), quick().double()
    ranked.load_state_dict(alone.state_dict())
    one = soseleto.fit(alone, **given, compute=soseleto.Compute(cuda_graph=False))
    with soseleto.ranks() as reducer:
        assert torch.distributed.get_backend_config() == "cpu:gloo,cuda:nccl"
        other = soseleto.fit(ranked, **given, compute=soseleto.Compute(cuda_graph=False, reducer=reducer))
    torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=1e-6)
    torch.testing.assert_close(alone.state_dict(), ranked.state_dict(), rtol=0, atol=1e-6)


def per_example(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch.inputs), batch.labels, reduction="none")


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("features", [None, FEATURES])
def test_selection_never_waits_for_the_gpu(features: Tensor | None) -> None:
    model = quick().to(CUDA)
    selection = soseleto.Selection(model, n_source=64, loss=per_example, features=features)
    batches = [(random_batch(32, m), random_batch(16, 100 + m)) for m in range(12)]
    for source, target in batches[:8]:  # the engine is chosen and proved
        selection.backward(source, target, index=source.index)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for source, target in batches[8:]:
            selection.backward(source, target, index=source.index)
    finally:
        torch.cuda.set_sync_debug_mode("default")
