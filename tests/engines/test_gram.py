"""Linear layers use the cheapest form: Gram matrices with the target batch, per-example gradients, or the adjoint."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from soseleto.data.batches import Batch
from soseleto.engines import Passes, make_engine
from soseleto.engines.contract import Step
from soseleto.engines.layerwise import per_example
from soseleto.engines.proof import FIRST
from zoo import CLASSES, PROBLEMS, Problem, cross_entropy, head

SOURCE, TARGET, WIDTH, HIGH = 5, 3, 40, 36
KNOWN = torch.linspace(0.1, 1.0, SOURCE, dtype=torch.float64)
ToDirection = Callable[[dict[str, Tensor]], dict[str, Tensor]]


class OneLoss:
    """The loss of a problem of the zoo, with the interface of a training step."""

    def __init__(self, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        self.loss = loss

    def source(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.loss(model, (batch.inputs, batch.labels))

    target = source

    def can_join(self, source: Batch, target: Batch) -> bool:
        return True

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        inputs, labels = (torch.cat([getattr(b, name) for b in (source, target)]) for name in ("inputs", "labels"))
        return self.loss(model, (inputs, labels))


def itself(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return found


def doubled(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: 2 * g for name, g in found.items()}


class Trial:
    """One step's passes on the examples of ``inputs``, of which the last are the target's."""

    def __init__(self, model: nn.Module, inputs: Tensor, labels: Tensor, targets: int, loss: Any = cross_entropy):
        n = len(inputs) - targets
        self.model, self.losses = model, OneLoss(loss)
        self.source = Batch(torch.arange(n), inputs[:n], labels[:n])
        self.target = Batch(torch.arange(targets), inputs[n:], labels[n:])

    def __call__(self, engine: Any, to_direction: ToDirection = itself) -> Passes:
        coefficients = KNOWN[: len(self.source)]
        return engine.passes(Step(self.model, self.losses, self.source, self.target, to_direction, coefficients))

    def equals_loop(self) -> None:
        found, right = self(make_engine("layerwise")), self(make_engine("loop"))
        torch.testing.assert_close(found.alignment, right.alignment, rtol=1e-10, atol=1e-12)
        for name, g in right.source_gradient.items():
            torch.testing.assert_close(found.source_gradient[name], g, rtol=1e-10, atol=1e-12)

    def operations(self, to_direction: ToDirection) -> int:
        engine = make_engine("layerwise")
        for _ in range(FIRST):  # calls with a proof
            self(engine, to_direction)
        with FlopCounterMode(display=False) as counter:
            self(engine, to_direction)
        return counter.get_total_flops()


def wide(*between: int) -> Trial:
    """A wide layer on inputs of shape (*between, WIDTH), and a narrow one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, HIGH), nn.Tanh(), *head(HIGH * math.prod(between))).double()
    n = SOURCE + TARGET
    return Trial(model, torch.randn(n, *between, WIDTH, dtype=torch.float64), torch.randint(CLASSES, (n,)), TARGET)


@pytest.mark.parametrize("between", [(), (2,), (1, 3)], ids=["vectors", "sequences", "planes"])
def test_gram_matrices_are_used_where_they_are_less_work(between: tuple[int, ...]) -> None:
    step = wide(*between)
    step.equals_loop()
    places = math.prod(between)
    direct = 2 * SOURCE * places * WIDTH * HIGH
    gram = 2 * SOURCE * places * TARGET * places * (WIDTH + HIGH)
    assert gram < direct
    # the narrow last layer is treated directly both times
    assert step.operations(doubled) - step.operations(itself) == direct - gram


def test_long_sequences_are_treated_directly() -> None:
    long = wide(7)
    long.equals_loop()
    assert long.operations(itself) == long.operations(doubled)


@pytest.mark.parametrize("at_once", [1, 2 * WIDTH * HIGH, per_example.AT_ONCE], ids=["one", "two", "all"])
@pytest.mark.parametrize("between", [(200,), (14, 14)], ids=["sequences", "planes"])
def test_long_examples_pay_for_alignment_and_gradient_once(
    between: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The product with G is not needed: the inner product with each example's gradient replaces it."""
    monkeypatch.setattr(per_example, "AT_ONCE", at_once)
    step = wide(*between)
    step.equals_loop()
    together = step.operations(doubled)
    monkeypatch.setattr(per_example, "POSITIONS", math.inf)
    direct = 2 * SOURCE * math.prod(between) * WIDTH * HIGH
    inner = 2 * 2 * SOURCE * WIDTH * HIGH  # not counted as products of matrices by every version of torch
    assert 0 <= together - (step.operations(doubled) - direct) <= inner


class Tied(nn.Module):
    """One layer used twice, over many places and over one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh().mean(1))


def test_a_layer_used_over_many_places_and_over_one_equals_loop() -> None:
    torch.manual_seed(0)
    n = SOURCE + TARGET
    Trial(Tied().double(), torch.randn(n, 200, 6, dtype=torch.float64), torch.randint(6, (n,)), TARGET).equals_loop()


RUNS = [p for p in PROBLEMS if not {"loop", "layerwise"} & set(p.declines) and "dropout" not in p.name]


@pytest.mark.parametrize("problem", RUNS, ids=lambda p: p.name)
def test_a_step_with_one_target_example_equals_loop(problem: Problem) -> None:
    """With one target example Gram matrices pay even for the zoo's narrow layers, unless a layer is used twice."""
    model, (inputs, labels) = problem.build()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # loop runs other forward passes, which would draw other masks
    Trial(model, inputs, labels, 1, problem.loss).equals_loop()


class Products(TorchDispatchMode):
    """The shapes of all matrix products' results."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.shapes.append(tuple(out.shape))
        return out


@pytest.mark.parametrize(("width", "high"), [(4, 50), (50, 4)])
def test_the_intermediate_has_the_smaller_side_of_the_layer(width: int, high: int) -> None:
    torch.manual_seed(0)
    model = nn.Linear(width, high).double()
    batch = torch.randn(SOURCE, width, dtype=torch.float64), torch.randint(high, (SOURCE,))
    direction = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    engine = make_engine("layerwise")
    _, right = make_engine("loop")(model, cross_entropy, batch, direction)
    for _ in range(FIRST):  # calls with a proof
        engine(model, cross_entropy, batch, direction)
    with Products() as products:
        _, found = engine(model, cross_entropy, batch, direction)
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)
    assert products.shapes == [(SOURCE, 4)]
