"""Every engine on every model of the zoo, compared with ``loop``, in float64."""

from __future__ import annotations

import copy
import gc
import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import derived
import soseleto
from benchmarks.memory import peak_bytes
from soseleto.engines import FASTEST_FIRST, make_engine, trainable
from soseleto.engines.autograd import double_backward, gradient
from soseleto.engines.forward import forward
from soseleto.errors import EngineError, UsageError
from soseleto.models.architectures import resnet18
from zoo import BY_NAME, CLASSES, PROBLEMS, Problem, cross_entropy, direction_for

TOLERANCE = 1e-6
ENGINES = ("loop", "double_backward", "forward", "layerwise")
EXACT = [p for p in PROBLEMS if "loop" not in p.declines]


def run(problem: Problem, engine: str, direction: dict[str, Tensor] | None = None) -> tuple[Tensor, Tensor]:
    """With a new model each time, so that engines cannot affect each other, and the same random state."""
    model, batch = problem.build()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return soseleto.alignment(model, problem.loss, batch, direction or direction_for(model), engine=engine)


def relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


def finite_difference(problem: Problem) -> Tensor:
    """Central differences of the loss vector along the direction: no autograd at all."""
    model, batch = problem.build()
    direction, step = direction_for(model), 1e-6

    def losses(sign: float) -> Tensor:
        moved = copy.deepcopy(model)
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(5)
            for name, p in moved.named_parameters():
                if name in direction:
                    p.add_(direction[name], alpha=sign * step)
            return problem.loss(moved, batch)

    return (losses(1.0) - losses(-1.0)) / (2 * step)


@pytest.mark.parametrize("problem", EXACT, ids=lambda p: p.name)
@pytest.mark.parametrize("engine", ENGINES[1:])
def test_engine_equals_loop(problem: Problem, engine: str) -> None:
    if engine in problem.declines:
        with pytest.raises(EngineError, match=problem.declines[engine]):
            run(problem, engine)
        return
    right_losses, right = run(problem, "loop")
    losses, found = run(problem, engine)
    assert losses.shape == found.shape == (len(right),)
    assert not losses.requires_grad
    assert not found.requires_grad
    assert relative(losses, right_losses) <= 1e-12
    assert relative(found, right) <= TOLERANCE


@pytest.mark.parametrize("problem", [p for p in EXACT if p.by_differences], ids=lambda p: p.name)
def test_loop_equals_finite_differences(problem: Problem) -> None:
    assert relative(run(problem, "loop")[1], finite_difference(problem)) <= 1e-5


@pytest.mark.parametrize("engine", ENGINES)
def test_reentrant_checkpointing_is_refused(engine: str) -> None:
    problem = BY_NAME["checkpointed_reentrant"]
    with pytest.raises(EngineError, match=problem.declines[engine]):
        run(problem, engine)


@pytest.mark.parametrize("problem", EXACT, ids=lambda p: p.name)
def test_auto_is_exact_and_takes_the_fastest(problem: Problem, caplog: pytest.LogCaptureFixture) -> None:
    model, batch = problem.build()
    direction = direction_for(model)
    engine = make_engine("auto")
    with caplog.at_level(logging.INFO, logger="soseleto"), torch.random.fork_rng():
        torch.manual_seed(5)
        _, found = engine(model, problem.loss, batch, direction)
        engine(model, problem.loss, batch, direction)
    expected = next(name for name in FASTEST_FIRST if name not in problem.declines)
    assert engine.name == expected
    said = [record for record in caplog.records if expected in record.getMessage()]
    assert len(said) == 1  # once, not at every call
    assert (said[0].levelno == logging.WARNING) == (expected != "layerwise")
    assert relative(found, run(problem, "loop")[1]) <= TOLERANCE


@pytest.mark.parametrize(
    ("name", "engine"),
    [
        (name, engine)
        for name in ("residual_groupnorm", "residual_batchnorm_train", "spectral_norm_train", "dropout")
        for engine in (*ENGINES, "auto")
        if engine not in BY_NAME[name].declines
    ],
)
def test_nothing_stays_on_the_model(engine: str, name: str) -> None:
    problem = BY_NAME[name]
    model, batch = problem.build()
    once, _ = problem.build()
    torch.manual_seed(5)
    problem.loss(once, batch)  # one ordinary forward is what buffers and random states may show
    random = torch.get_rng_state()
    before = {id(m): set(vars(m)) for m in model.modules()}
    torch.manual_seed(5)
    soseleto.alignment(model, problem.loss, batch, direction_for(model), engine=engine)
    assert torch.equal(torch.get_rng_state(), random)
    for module in model.modules():
        assert set(vars(module)) == before[id(module)]
        for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"):
            assert not getattr(module, hooks)
    assert all(p.grad is None and p._backward_hooks is None for p in model.parameters())
    for key, value in once.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


@pytest.mark.parametrize("named", ["one.0.weight two.2.bias out.weight", "two.0.weight stem.weight", "one.0.bias"])
@pytest.mark.parametrize(
    ("name", "engine"), [("residual_batchnorm_train", "forward"), *(("residual_groupnorm", one) for one in ENGINES)]
)
def test_a_direction_may_name_some_parameters_only(name: str, engine: str, named: str) -> None:
    problem = BY_NAME[name]
    model, _ = problem.build()
    some = {k: v for k, v in direction_for(model).items() if k in named.split()}
    assert relative(run(problem, engine, some)[1], run(problem, "loop", some)[1]) <= TOLERANCE


@pytest.mark.parametrize("engine", ["layerwise", "forward"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal_examples_are_no_reason_to_decline(engine: str, n: int) -> None:
    """Their gradients must not cancel in a proof."""
    problem = BY_NAME["mlp"]
    (model, batch), taken = problem.build(), make_engine(engine)
    equal = tuple(part[:1].expand(n, *part.shape[1:]) for part in batch)
    along = direction_for(model)
    for _ in range(8):
        _, q = taken(model, problem.loss, equal, along)
        torch.testing.assert_close(q, make_engine("loop")(model, problem.loss, equal, along)[1])


@pytest.mark.parametrize("engine", ["layerwise", "forward", "double_backward"])
def test_the_tolerance_follows_casts_inside_the_model(engine: str) -> None:
    """A float64 model with norms in float32 agrees with autograd to the precision of float32."""
    torch.manual_seed(0)
    layers = (m for _ in range(3) for m in (nn.Linear(7, 7), derived.RmsNorm(7), nn.Tanh()))
    model = nn.Sequential(*layers, nn.Linear(7, CLASSES)).double()
    batch, direction = (torch.randn(6, 7, dtype=torch.float64), torch.arange(6) % CLASSES), direction_for(model)
    found, right = (make_engine(name)(model, cross_entropy, batch, direction)[1] for name in (engine, "loop"))
    assert 0 < relative(found, right) < 1e-5


def test_a_checkpointed_models_losses_can_be_differentiated() -> None:
    model, batch = BY_NAME["checkpointed"].build()
    with torch.random.fork_rng():
        losses, _ = forward(model, cross_entropy, batch, direction_for(model))
    assert gradient(losses.sum(), trainable(model)).keys() == trainable(model).keys()


def test_the_forward_engine_keeps_no_tangent() -> None:
    """At most a tenth more memory than an ordinary step."""
    model = resnet18(width=4, norm=nn.BatchNorm2d).train()
    batch = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    direction, parameters = direction_for(model), trainable(model)

    def peak(losses: Callable[[], Tensor]) -> int:
        return peak_bytes(lambda: gradient(losses().mean(), parameters), batch[0].device)

    ordinary = peak(lambda: cross_entropy(model, batch))
    assert peak(lambda: forward(model, cross_entropy, batch, direction)[0]) < 1.1 * ordinary


@pytest.mark.parametrize("engine", ["double_backward", "forward", "layerwise"])
def test_mixed_precision_is_close(engine: str) -> None:
    """Under bf16 autocast an engine is as exact as bf16 allows, and its alignments are float32."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 3))
    batch = torch.randn(16, 3, 8, 8), torch.randint(3, (16,))
    direction = direction_for(model)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs.float(), batch[1], reduction="none")

    _, exact = soseleto.alignment(model, cross_entropy, batch, direction, engine="loop")
    _, found = soseleto.alignment(model, loss, batch, direction, engine=engine)
    assert found.dtype == torch.float32
    assert 0 < relative(found, exact) < 0.03


@pytest.mark.parametrize("name", ["attention_fused", "derived_shared"])
@pytest.mark.parametrize("engine", ["double_backward", "forward", "layerwise"])
def test_nothing_is_left_for_the_garbage_collector(name: str, engine: str) -> None:
    """Reference cycles would keep a step's activations until the collector runs."""
    problem = BY_NAME[name]
    model, batch = problem.build()
    direction, reused = direction_for(model), make_engine(engine)

    def tensors() -> int:
        return sum(type(o) is Tensor for o in gc.get_objects())

    reused(model, problem.loss, batch, direction)
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for _ in range(5):
            reused(model, problem.loss, batch, direction)
        assert tensors() == before
    finally:
        gc.enable()


BAD_DIRECTIONS = [
    ({}, "direction is empty"),
    ({"0.wieght": torch.ones(3, 7)}, r"did you mean '0.weight'"),
    ({"0.weight": torch.ones(2, 2)}, r"shape \(2, 2\)"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("direction", "words"), BAD_DIRECTIONS)
def test_bad_directions(engine: str, direction: dict[str, Tensor], words: str) -> None:
    model = nn.Sequential(nn.Linear(7, CLASSES))
    batch = torch.randn(4, 7), torch.randint(CLASSES, (4,))
    with pytest.raises(UsageError, match=words):
        soseleto.alignment(model, cross_entropy, batch, direction, engine=engine)


def test_a_frozen_parameter_in_the_direction_is_refused() -> None:
    model, batch = BY_NAME["frozen_parameters"].build()
    direction = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    with pytest.raises(UsageError, match=r"'0.weight', which is frozen"):
        soseleto.alignment(model, cross_entropy, batch, direction)


BAD_LOSSES = [
    (lambda m, b: cross_entropy(m, b).mean(), "reduction='none'"),
    (lambda m, b: cross_entropy(m, b).mean().expand(len(b[1])), "one number expanded to all examples"),
    (lambda m, b: cross_entropy(m, b).unsqueeze(1), r"flatten\(1\).mean\(1\)"),
    (lambda m, b: cross_entropy(m, b).tolist(), "returned list"),
    (lambda m, b: cross_entropy(m, b).detach(), "without a gradient"),
]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("loss", "words"), BAD_LOSSES)
def test_bad_losses(engine: str, loss: object, words: str) -> None:
    model = nn.Linear(7, CLASSES)
    batch = torch.randn(4, 7), torch.randint(CLASSES, (4,))
    with pytest.raises(UsageError, match=words):
        soseleto.alignment(model, loss, batch, direction_for(model), engine=engine)  # type: ignore[arg-type]


def test_check_gradients_of_auto_says_what_it_takes() -> None:
    for name, engine, message in (("mlp", "layerwise", ""), ("mixing", "forward", "slower forward engine, because")):
        problem = BY_NAME[name]
        (report,) = soseleto.check_gradients(*problem.build()[:1], problem.loss, problem.build()[1], engines=["auto"])
        assert report.engine == engine
        assert message in report.message


def test_check_gradients_compares_engines_and_leaves_the_model_alone() -> None:
    problem = BY_NAME["residual_batchnorm_train"]
    model, batch = problem.build()
    state = copy.deepcopy(model.state_dict())
    reports = {r.engine: r for r in soseleto.check_gradients(model, problem.loss, batch)}
    assert set(reports) == set(FASTEST_FIRST)
    assert reports["layerwise"].error is None
    assert "training mode" in reports["layerwise"].message
    assert reports["forward"].error is not None
    assert reports["forward"].error <= 1e-10
    assert reports["loop"].ratio is not None
    assert reports["loop"].ratio > 0
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())


def test_check_gradients_sees_an_engine_that_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = nn.Linear(7, CLASSES).double(), (torch.randn(4, 7).double(), torch.randint(CLASSES, (4,)))

    class Off:
        name = "off"

        def source_pass(self, step: Any) -> Any:
            right = make_engine("loop").source_pass(step)
            return replace(right, alignment=1.25 * right.alignment)

    made = {"off": Off(), "loop": make_engine("loop")}
    checking = importlib.import_module("soseleto.engines.check_gradients")  # the package has a function of this name
    monkeypatch.setattr(checking, "make_engine", made.__getitem__)
    off, loop = soseleto.check_gradients(model, cross_entropy, batch, engines=["off", "loop"])
    assert off.error == pytest.approx(0.25)
    assert loop.error == 0.0


@pytest.mark.parametrize("alignments", [double_backward, forward])
@pytest.mark.parametrize(("name", "recurrent"), [("mlp", False), ("lstm", True)])
def test_the_users_settings_of_cudnn_hold_inside(
    name: str, recurrent: bool, alignments: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Convolutions asked to be deterministic and in full precision are so; fused recurrent layers are left out."""
    chosen = {"deterministic": True, "benchmark": True, "allow_tf32": False}
    for setting, value in chosen.items():
        monkeypatch.setattr(torch.backends.cudnn, setting, value)
    seen: list[dict[str, bool]] = []

    def noting(model: nn.Module, batch: Any) -> Tensor:
        seen.append({setting: getattr(torch.backends.cudnn, setting) for setting in ("enabled", *chosen)})
        return cross_entropy(model, batch)

    model, batch = BY_NAME[name].build()
    alignments(model, noting, batch, direction_for(model))
    assert seen == [{"enabled": not recurrent, **chosen}]
    assert torch.backends.cudnn.enabled


class Hooked(nn.Module):
    """Hooks and in-place operations on outputs that are views, and a parameter that is added for each token."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.out = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3)
        self.places = nn.Parameter(torch.randn(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        h = self.one(x)
        h.register_hook(lambda g: 0.3 * g)
        h.mul_(1.2)
        h[:, 0].mul_(2.0)
        return self.out(self.norm(h) + self.places).mean(1)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_hooks_in_place_operations_and_inputs_with_a_gradient(requires_grad: bool) -> None:
    torch.manual_seed(0)
    model, x, labels = Hooked().double(), torch.randn(7, 5, 4, dtype=torch.float64), torch.randint(3, (7,))
    x.requires_grad_(requires_grad)
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    engine = make_engine("layerwise")
    found = [engine(model, loss, (x, labels), direction)[1] for _ in range(6)]  # with and without a proof
    right = make_engine("loop")(model, loss, (x, labels), direction)[1]
    for q in found:
        torch.testing.assert_close(q, right, rtol=1e-10, atol=1e-12)
    assert x.grad is None
