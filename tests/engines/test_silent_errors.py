"""Models on which an engine could be wrong without an error: ``auto`` equals ``loop`` at every step of a training."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soseleto
from random_models import LAYERS, STEMS, WIDTH, Clock
from soseleto.data.batches import Batch
from soseleto.engines import layerwise, make_engine, trainable
from soseleto.engines.interface import SourceStep, Step
from soseleto.engines.layerwise import LayerwiseEngine
from soseleto.engines.proof import Inexact, Kinds, ProofDue, Schedule
from soseleto.errors import EngineError, UsageError
from soseleto.task.losses import NoisyLosses
from zoo import CLASSES, Lambda, Recurrent, cross_entropy

STEPS = 5
Loss = Callable[[nn.Module, Any], Tensor]


def vectors(n: int = 8) -> Tensor:
    return torch.randn(n, 7, dtype=torch.float64)


def tokens(n: int = 8) -> Tensor:
    return torch.randint(11, (n, 6))


def by_confidence(model: nn.Module, batch: Any) -> Tensor:
    """A factor of the loss that is computed under no_grad."""
    outputs = model(batch[0])
    with torch.no_grad():
        factor = 1.0 - outputs.softmax(1).gather(1, batch[1].unsqueeze(1)).squeeze(1)
    return factor * F.cross_entropy(outputs, batch[1], reduction="none")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.Tanh(), nn.Linear(6, CLASSES)).double()


def batch_norm(**settings: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6, **settings), nn.Tanh(), nn.Linear(6, CLASSES))


def similarity(model: nn.Module, batch: Any) -> Tensor:
    """SimSiam: the target is the same network under no_grad."""
    one = model(batch[0])
    with torch.no_grad():
        other = model(batch[0].flip(1))
    return -F.cosine_similarity(one, other, dim=1) + F.cross_entropy(one, batch[1], reduction="none")


def with_parameter_hook(model: nn.Module) -> nn.Module:
    next(iter(model.parameters())).register_hook(lambda g: 0.1 * g)
    return model


CLOCK = Clock()


def layer(name: str, start: int = 0) -> nn.Module:
    """A layer that an engine could miss, from a step of the training on."""
    return LAYERS[name](CLOCK, start)


def around(name: str, *before: nn.Module, start: int = 0) -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), *before, nn.Tanh(), layer(name, start), nn.Linear(6, CLASSES))


def zero_head(*middle: nn.Module, body: nn.Module | None = None) -> nn.Module:
    """Nothing below the head has a gradient at the first step."""
    head = nn.Linear(6, CLASSES)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Linear(7, 6) if body is None else body, *middle, nn.Tanh(), head)


def sides() -> tuple[Batch, Batch]:
    target = Batch(torch.arange(4), vectors(4) + 1, torch.randint(CLASSES, (4,)))
    return Batch(torch.arange(8), vectors(), torch.randint(CLASSES, (8,))), target


class RunningMean(nn.Module):
    """A buffer that is updated under no_grad and used in the same pass."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(7, 6), nn.BatchNorm1d(6), nn.Linear(6, CLASSES)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.norm(self.one(x)))
        with torch.no_grad():
            self.mean.mul_(0.9).add_(0.1 * h.mean(0))
        return self.two(h - self.mean)


def transformer() -> nn.Module:
    """Positions of one row for all examples as in BERT, and a token expanded over the batch as in ViT."""
    return nn.Sequential(STEMS["attention"].make(), Lambda(lambda h: h.mean(1)), nn.Linear(WIDTH, CLASSES))


def by_frequency() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 6, scale_grad_by_freq=True), nn.Tanh(), nn.Flatten(), nn.Linear(36, CLASSES))


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    loss: Loss = cross_entropy
    inputs: Callable[[], Tensor] = vectors


CASES = [
    Case("no_grad_transformer", transformer, by_confidence, lambda: STEMS["attention"].inputs(8)),
    Case("no_grad_lstm", lambda: Recurrent(nn.LSTM), by_confidence, tokens),
    Case("no_grad_batch_norm", batch_norm, by_confidence),
    Case("simsiam", batch_norm, similarity),
    Case("tensor_hook", lambda: around("scaled_gradient", nn.BatchNorm1d(6))),
    Case("parameter_hook", lambda: with_parameter_hook(mlp())),
    Case("parameter_hook_batch_norm", lambda: with_parameter_hook(batch_norm().double())),
    Case("scale_grad_by_freq", by_frequency, inputs=tokens),
    Case("zero_head_batch_norm", lambda: zero_head(nn.BatchNorm1d(6, affine=False))),
    Case("zero_head_centred", lambda: zero_head(layer("centre"))),
    Case("zero_head_own_function", lambda: zero_head(layer("own_scale"))),
    Case("zero_head_scripted_trunk", lambda: zero_head(body=torch.jit.script(nn.Linear(7, 6)))),
    Case("rezero", lambda: around("rezero_mixes")),
    Case("layer_scale", lambda: around("layer_scale_mixes")),
    Case("mixup_later", lambda: around("mixup", start=3)),
    Case("mixup_half", lambda: around("mixup_half", start=1)),
    Case("gate_behind_zero_head", lambda: zero_head(layer("layer_scale_mixes"))),
    Case("hook_later", lambda: around("scaled_gradient", nn.BatchNorm1d(6), start=2)),
    Case("reversal_later", lambda: around("reversed", nn.BatchNorm1d(6), start=2)),
    Case("scripted", lambda: torch.jit.script(mlp())),
    Case("buffer", RunningMean),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_auto_equals_loop_at_every_step(case: Case) -> None:
    torch.manual_seed(0)
    model = case.make().double() if case.name != "scripted" else case.make()
    engine, optimizer = make_engine("auto"), torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        CLOCK.step = step
        batch = case.inputs(), torch.randint(CLASSES, (8,))
        direction = {n: torch.randn_like(p) for n, p in trainable(model).items()}
        buffers = {name: b.clone() for name, b in model.named_buffers()}
        random = torch.get_rng_state()
        _, right = make_engine("loop")(model, case.loss, batch, direction)
        torch.set_rng_state(random)
        for name, b in model.named_buffers():
            b.copy_(buffers[name])
        _, found = engine(model, case.loss, batch, direction)
        assert float((found - right).norm()) <= 1e-6 * float(right.norm()), (engine.name, step)
        loss = case.loss(model, batch).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


class OnlyOnce(torch.autograd.Function):
    """A user's function with a backward that is not linear: it clips."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> Tensor:  # type: ignore[override]
        return delta.sum(0, keepdim=True).clamp(-0.01, 0.01) + 0 * delta


def clipped(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(OnlyOnce.apply(model(batch[0])), batch[1], reduction="none")  # type: ignore[no-untyped-call]


def test_a_backward_that_is_not_linear_is_left_to_loop() -> None:
    torch.manual_seed(0)
    model, engine = nn.Linear(7, CLASSES).double(), make_engine("auto")
    batch = vectors(), torch.randint(CLASSES, (8,))
    engine(model, clipped, batch, {n: torch.randn_like(p) for n, p in trainable(model).items()})
    assert engine.name == "loop"


def test_sparse_gradients_are_refused_in_one_sentence() -> None:
    model = nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Flatten(), nn.Linear(36, CLASSES)).double()
    batch = tokens(), torch.randint(CLASSES, (8,))
    direction = {n: torch.randn_like(p) for n, p in trainable(model).items()}
    for engine in ("auto", "loop"):
        with pytest.raises(UsageError, match=r"'0.weight' is sparse, .* make the embedding with sparse=False\.$"):
            soseleto.alignment(model, cross_entropy, batch, direction, engine=engine)


def test_detached_statistics_are_those_of_the_source_batch() -> None:
    torch.manual_seed(0)
    model = around("centre_detached").double()
    step = Step(model, NoisyLosses(), *sides(), lambda found: found, torch.ones(8, dtype=torch.float64))
    found, right = make_engine("layerwise").passes(step), make_engine("loop").passes(step)
    torch.testing.assert_close(found.source_losses, right.source_losses)
    torch.testing.assert_close(found.alignment, right.alignment)


@pytest.mark.parametrize(("norm", "joined"), [(nn.BatchNorm1d(7, affine=False), False), (nn.LayerNorm(7), True)])
def test_a_model_with_dropout_shares_a_pass_only_without_statistics_of_the_batch(norm: nn.Module, joined: bool) -> None:
    """Its draws differ between passes of different sizes, and must not hide that its losses do."""
    torch.manual_seed(0)
    model = nn.Sequential(norm, nn.Dropout(0.5), nn.Linear(7, CLASSES)).double()
    engine = LayerwiseEngine()
    engine.passes(Step(model, NoisyLosses(), *sides(), lambda found: found, torch.ones(8, dtype=torch.float64)))
    assert (model not in engine._apart) is joined


@pytest.mark.parametrize("engine", ["layerwise", "forward", "loop"])
def test_only_the_target_gradients_asked_for_are_returned(engine: str) -> None:
    torch.manual_seed(0)
    every = Step(mlp(), NoisyLosses(), *sides(), lambda found: found, torch.ones(8, dtype=torch.float64))
    whole, part = (make_engine(engine).passes(step) for step in (every, replace(every, wanted={"2.bias"})))
    assert len(whole.target_gradient) == 4
    torch.testing.assert_close(part.target_gradient, {"2.bias": whole.target_gradient["2.bias"]})
    torch.testing.assert_close(part.alignment, whole.alignment)
    torch.testing.assert_close(part.source_gradient, whole.source_gradient)


class LayerDrop(nn.Module):
    """Layers are dropped at random: thousands of graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(8))
        self.out = nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if torch.rand(()) < 0.5:
                x = x + torch.tanh(layer(x))
        return self.out(x)


def test_a_graph_proved_in_part_is_proved_again() -> None:
    schedule = Schedule(calls=101, at=1 << 30)
    schedule.proved({"p"}, is_new=True)
    held = []
    for _ in range(40):
        if schedule.count():
            held.append(schedule.calls)
            schedule.proved({"p"}, is_new=False)
    assert held == [*range(102, 109), 116, 132]  # at each of the first eight calls, then when it is twice as old
    kinds = Kinds()
    kinds.add(["a", "b"])
    assert [kinds.is_new(calls) for calls in (["a", "b"], ["a"])] == [False, True]


@pytest.mark.parametrize("engine", ["layerwise", "forward"])
def test_between_the_calls_that_hold_a_proof_there_is_none(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a parameter stays unproved; a CUDA graph is recorded there."""
    torch.manual_seed(0)
    model, held = mlp(), []
    with torch.no_grad():
        model[2].weight.zero_()  # the layer below has no gradient
    proved = Schedule.proved
    monkeypatch.setattr(
        Schedule, "proved", lambda self, *given, **more: [held.append(self.calls), proved(self, *given, **more)]
    )
    made, direction = make_engine(engine), {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for _ in range(40):
        step = SourceStep(model, cross_entropy, (vectors(), torch.arange(8) % CLASSES), direction, torch.ones(8))
        made.source_pass(step)
    assert held == [*range(1, 9), 16, 32]


@pytest.mark.parametrize("engine", ["layerwise", "forward"])
def test_a_check_at_random_steps_finds_what_no_call_shows(engine: str) -> None:
    """Within fifty steps: a backward that changes without a trace among the functions that the model calls."""
    torch.manual_seed(0)
    model, factor = mlp(), [1.0]
    next(iter(model.parameters())).register_hook(lambda g: factor[0] * g)
    made, batch = make_engine(engine), (vectors(), torch.randint(CLASSES, (8,)))
    direction = {n: torch.randn_like(p) for n, p in trainable(model).items()}

    def train(steps: int) -> None:
        for _ in range(steps):
            made(model, cross_entropy, batch, direction)

    train(60)
    factor[0] = 0.5
    with pytest.raises(EngineError, match=rf"the {engine} engine is not exact for this model .*engine='auto'"):
        train(50)


@pytest.mark.parametrize("engine", ["layerwise", "forward"])
def test_a_step_that_is_recorded_holds_no_proof(engine: str) -> None:
    torch.manual_seed(0)
    model, made = mlp(), make_engine(engine)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    step = SourceStep(model, cross_entropy, (vectors(), torch.arange(8) % CLASSES), direction, torch.ones(8))
    for _ in range(5):
        made.source_pass(step)
    schedule = made.schedule  # type: ignore[attr-defined]
    schedule.recording = True
    made.source_pass(step)  # proved before
    model[1] = nn.Sigmoid()  # another graph
    with pytest.raises(ProofDue):
        made.source_pass(step)
    schedule.recording = False
    made.source_pass(step)
    schedule.recording = True
    made.source_pass(step)


def test_a_hook_registered_later_is_noticed() -> None:
    torch.manual_seed(0)
    model, engine = batch_norm().double(), make_engine("auto")
    batch = vectors(), torch.randint(CLASSES, (8,))
    for step in range(3):
        if step == 2:
            with_parameter_hook(model)
        direction = {n: torch.randn_like(p) for n, p in trainable(model).items()}
        _, right = make_engine("loop")(model, cross_entropy, batch, direction)
        _, found = engine(model, cross_entropy, batch, direction)
        torch.testing.assert_close(found, right)


def test_a_model_with_very_many_graphs_is_not_proved_at_every_step() -> None:
    torch.manual_seed(0)
    model, engine = LayerDrop().double(), LayerwiseEngine()
    batch = vectors(), torch.randint(CLASSES, (8,))
    for _ in range(100):
        direction = {n: torch.randn_like(p) for n, p in trainable(model).items()}
        engine(model, cross_entropy, batch, direction)
    early = engine.proofs
    for _ in range(100):
        engine(model, cross_entropy, batch, direction)
    assert early < 60
    assert engine.proofs - early <= 5


@pytest.mark.parametrize(("precision", "kept"), [(torch.bfloat16, True), (torch.float32, False)])
def test_in_half_precision_a_proof_that_fails_is_held_once_more(
    precision: torch.dtype, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding that passes for a mistake does not repeat with other coefficients; a mistake does."""
    prove, failures = layerwise._prove, [0]

    def failing(*given: Any, **more: Any) -> Any:
        failures[0] += 1
        if failures[0] == 1:
            raise Inexact("by rounding")
        return prove(*given, **more)

    monkeypatch.setattr(layerwise, "_prove", failing)
    model, engine = mlp().to(precision), LayerwiseEngine()
    batch = vectors().to(precision), torch.randint(CLASSES, (8,))
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with nullcontext() if kept else pytest.raises(EngineError, match="by rounding"):
        engine(model, cross_entropy, batch, direction)
    assert (failures[0] > 1) is kept
