"""Models in which the first dimension of a layer's output is not the batch: exact, and by which engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zoo
from rows import BY_NAME, PROBLEMS, WORDS
from soseleto.data.batches import Batch
from soseleto.engines import FASTEST_FIRST, make_engine
from soseleto.engines.auto import AutoEngine
from soseleto.engines.interface import Passes, PerExampleLoss, SourcePass, SourceStep, Step
from soseleto.engines.layerwise import LayerwiseEngine
from soseleto.engines.proof import Schedule
from zoo import CLASSES, B, Problem, direction_for, require_exact

LAYERWISE = [p for p in PROBLEMS if not p.declines]
DERIVED = [zoo.BY_NAME[name] for name in ("derived_shared", "derived_biases_plain", "derived_products")]
LAYOUTS = ("gru_cell", "flattened_tokens", "frames", "packed_scatter_reduce", "embedding_bag")


def require_equal(found: Passes | SourcePass, right: Passes | SourcePass) -> None:
    torch.testing.assert_close(found.alignment, right.alignment, rtol=1e-8, atol=1e-10)
    for name in ("source_gradient", "target_gradient", "gradient"):
        for key, g in getattr(right, name, {}).items():
            torch.testing.assert_close(getattr(found, name)[key], g, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_auto_is_exact_and_takes_the_fastest(problem: Problem) -> None:
    model, batch = problem.build()
    engine = AutoEngine()
    require_exact(model, batch, problem.loss, engine)
    assert engine.name == next(name for name in FASTEST_FIRST if name not in problem.declines)


class Joined:
    """The losses of a step whose source and target batches are joined for one pass."""

    def __init__(self, loss: PerExampleLoss) -> None:
        self.loss = loss

    def source(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.loss(model, (batch.inputs, batch.labels))

    target = source

    def can_join(self, source: Batch, target: Batch) -> bool:
        return True

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        both = torch.cat([source.inputs, target.inputs]), torch.cat([source.labels, target.labels])
        return self.loss(model, both)


def step_of(problem: Problem, coefficients: Tensor, targets: int = 2) -> Step:
    model, (inputs, labels) = problem.build()
    n = len(labels) - targets
    source = Batch(torch.arange(n), inputs[:n], labels[:n])
    target = Batch(torch.arange(targets), inputs[n:], labels[n:])
    return Step(model, Joined(problem.loss), source, target, lambda found: found, coefficients)


GIVEN = torch.linspace(0.1, 1, B - 2, dtype=torch.float64)
ONE_FOR_ALL = torch.tensor(0.3, dtype=torch.float64).expand(B - 2)


@pytest.mark.parametrize("coefficients", [GIVEN, ONE_FOR_ALL], ids=["given", "one for all"])
@pytest.mark.parametrize("problem", LAYERWISE, ids=lambda p: p.name)
def test_steps_equal_loop(problem: Problem, coefficients: Tensor) -> None:
    step = step_of(problem, coefficients)
    require_equal(make_engine("layerwise").passes(step), make_engine("loop").passes(step))


@pytest.mark.parametrize("problem", [*(BY_NAME[name] for name in LAYOUTS), *DERIVED], ids=lambda p: p.name)
def test_parts_of_steps_equal_loop(problem: Problem) -> None:
    """One problem for each layout, and derived parameters; the direction is from elsewhere, as for micro-batches."""
    step, engine = step_of(problem, GIVEN), make_engine("layerwise")
    for c in (GIVEN, ONE_FOR_ALL):
        part = SourceStep(step.model, step.losses.source, step.source, direction_for(step.model), c)
        require_equal(engine.source_pass(part), make_engine("loop").source_pass(part))


@pytest.mark.parametrize("name", ["flattened_tokens", "packed_index_add", "packed_shifted"])
def test_rows_of_other_batches_are_found_without_another_proof(name: str) -> None:
    """The index from rows to examples is that of each batch, not that of the proof."""
    problem = BY_NAME[name]
    model, _ = problem.build()
    engine = proved_once()
    for _ in range(4):
        require_exact(model, (torch.randint(WORDS, (B, 6)), torch.randint(CLASSES, (B,))), problem.loss, engine)
    assert engine.proofs == 1


def proved_once() -> LayerwiseEngine:
    """An engine without repeated proofs, which would hide what is wrong between them."""
    engine = LayerwiseEngine()
    engine.schedule = Schedule(calls=100, at=1 << 30, check_at=1 << 30)
    return engine


def test_another_layout_of_the_same_model_is_proved() -> None:
    """One row for all tokens of one example, then packed rows of several: the same calls, other rows."""
    problem = BY_NAME["packed_index_add"]
    model, _ = problem.build()
    engine = proved_once()
    for n, proofs in ((2, 1), (1, 2)):
        require_exact(model, (torch.randint(WORDS, (n, 6)), torch.randint(CLASSES, (n,))), problem.loss, engine)
        assert engine.proofs == proofs


@pytest.mark.parametrize("name", ["packed_index_add", "frames"])
def test_mixed_precision_keeps_the_rows(name: str) -> None:
    model, batch = BY_NAME[name].build()
    model, batch = model.float(), tuple(part.float() if part.is_floating_point() else part for part in batch)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return BY_NAME[name].loss(model, batch)

    _, right = make_engine("loop")(model, BY_NAME[name].loss, batch, direction_for(model))
    _, found = make_engine("layerwise")(model, loss, batch, direction_for(model))
    assert 0 < float((found - right).norm() / right.norm()) < 0.03
