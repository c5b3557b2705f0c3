"""No silent errors: on random models ``auto`` is exact at every step of a training, or raises a clear error."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from random_models import CLASSES, DRAWS, LAYERS, LOSSES, OPTIMIZERS, SOURCE, STEMS, TARGET, Clock, RandomModel
from soseleto.data.batches import Batch
from soseleto.engines import trainable
from soseleto.engines.auto import AutoEngine
from soseleto.engines.interface import SourcePass, SourceStep, Step
from soseleto.errors import EngineError, UsageError

pytestmark = [
    pytest.mark.filterwarnings("ignore:mkldnn_matmul"),  # on a CPU without bfloat16
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),  # rms_norm under autocast
]
LONG = bool(os.environ.get("SOSELETO_LONG_RANDOM"))
STEPS = 6
# Relative to the sum of the sizes of an alignment's parts, one for each parameter; a few times the tolerances of
# proofs, since what was too small to be seen may grow until the next proof.
TOLERANCES = {"float64": 1e-6, "float32": 3e-3, "bf16": 0.3}


@dataclass(frozen=True)
class Recipe:
    """All that is drawn."""

    stem: str
    layers: tuple[tuple[str, int], ...]  # with the step at which a changing layer begins
    zero_head: bool
    loss: str
    precision: str
    optimizer: str
    joint: bool  # a step on source and target; else the source alone, along a given direction
    frozen: bool  # whether the stem is
    seed: int

    def build(self, clock: Clock) -> RandomModel:
        layers = [LAYERS[name](clock, start) for name, start in self.layers]
        stem = STEMS[self.stem].make().requires_grad_(not self.frozen)
        return RandomModel(stem, layers, self.zero_head).to(self.dtype)

    @property
    def half(self) -> bool:
        """Under autocast; PyTorch has no LSTM and GRU in bfloat16 on every CPU."""
        return self.precision == "bf16" and self.stem not in ("lstm", "gru")

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "float64" else torch.float32

    @property
    def draws(self) -> bool:
        return any(name in DRAWS for name, _ in self.layers)

    def batch(self, n: int) -> Batch:
        inputs = STEMS[self.stem].inputs(n)
        inputs = inputs.to(self.dtype) if inputs.is_floating_point() else inputs
        return Batch(torch.arange(n), inputs, torch.randint(CLASSES, (n,)))


@dataclass
class Losses:
    recipe: Recipe
    clock: Clock

    def source(self, model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.recipe.half):
            outputs = model(batch.inputs)
        outputs = outputs.float() if outputs.dtype == torch.bfloat16 else outputs
        return LOSSES[self.recipe.loss](outputs, batch.labels, self.clock.step)

    target = source

    def can_join(self, source: Batch, target: Batch) -> bool:
        return not self.recipe.draws  # a joint pass draws other numbers, and could not be compared

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        whole = (torch.cat([getattr(source, k), getattr(target, k)]) for k in ("index", "inputs", "labels"))
        return self.source(model, Batch(*whole))


recipes = st.builds(
    Recipe,
    stem=st.sampled_from(list(STEMS)),
    layers=st.lists(st.tuples(st.sampled_from(list(LAYERS)), st.integers(0, 4)), max_size=3).map(tuple),
    zero_head=st.booleans(),
    loss=st.sampled_from(list(LOSSES)),
    precision=st.sampled_from(list(TOLERANCES)),
    optimizer=st.sampled_from(list(OPTIMIZERS)),
    joint=st.booleans(),
    frozen=st.sampled_from([False, False, True]),
    seed=st.integers(0, 2**16),
)


@dataclass(frozen=True)
class Right:
    """By ordinary autograd: alignments, the sum of their parts' sizes, and the source gradient."""

    alignment: Tensor
    scale: float
    gradient: dict[str, Tensor]


def oracle(losses: Tensor, model: nn.Module, direction: dict[str, Tensor], c: Tensor) -> Right:
    parameters = trainable(model)
    rows = []
    for loss in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), retain_graph=True, allow_unused=True)
        pairs = zip(parameters, gradients, strict=True)
        rows.append(torch.stack([_dot(g, direction.get(name), like=loss) for name, g in pairs]))
    parts = torch.stack(rows)
    found = torch.autograd.grad(losses, list(parameters.values()), c.to(losses.dtype), allow_unused=True)
    gradient = {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
    return Right(parts.sum(1), float(parts.abs().sum(1).norm()), gradient)


def _dot(gradient: Tensor | None, direction: Tensor | None, like: Tensor) -> Tensor:
    if gradient is None or direction is None:
        return torch.zeros((), dtype=torch.float64)
    return (gradient.double() * direction.double()).sum()


class Training:
    """A training in which every step is compared with the oracle at the same parameters, buffers and random state."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(recipe.seed)
        self.recipe, self.clock = recipe, Clock()
        self.model = recipe.build(self.clock)
        self.losses = Losses(recipe, self.clock)
        self.engine = AutoEngine()
        self.optimizer = OPTIMIZERS[recipe.optimizer]([*trainable(self.model).values()])

    def step(self, number: int) -> None:
        self.clock.step = number
        source, target = self.recipe.batch(SOURCE), self.recipe.batch(TARGET)
        c = torch.rand(SOURCE if number % 2 else 1, dtype=torch.float64).div(SOURCE).expand(SOURCE)
        direction = {n: torch.randn_like(p) for n, p in trainable(self.model).items()}
        before = {name: b.clone() for name, b in self.model.named_buffers()}, torch.get_rng_state()
        right = self.right(source, target, direction, c)
        torch.set_rng_state(before[1])
        for name, b in self.model.named_buffers():
            b.data.copy_(before[0][name])
        self.compare(self.found(source, target, direction, c), right)
        for name, p in trainable(self.model).items():
            p.grad = right.gradient.get(name)
        self.optimizer.step()

    def right(self, source: Batch, target: Batch, direction: dict[str, Tensor], c: Tensor) -> Right:
        if self.recipe.joint:
            parameters = trainable(self.model)
            mean = self.losses.target(self.model, target).mean()
            found = torch.autograd.grad(mean, list(parameters.values()), allow_unused=True)
            direction = {name: g for name, g in zip(parameters, found, strict=True) if g is not None}
        return oracle(self.losses.source(self.model, source), self.model, direction, c)

    def found(self, source: Batch, target: Batch, direction: dict[str, Tensor], c: Tensor) -> SourcePass:
        if not self.recipe.joint:
            return self.engine.source_pass(SourceStep(self.model, self.losses.source, source, direction, c))
        passes = self.engine.passes(Step(self.model, self.losses, source, target, lambda found: found, c))
        return SourcePass(passes.source_losses, passes.alignment, passes.source_gradient)

    def compare(self, found: SourcePass, right: Right) -> None:
        bound, where = TOLERANCES[self.recipe.precision], f"by {self.engine.name} at step {self.clock.step}"
        off = float((found.alignment.double() - right.alignment).norm())
        assert off <= bound * right.scale + 1e-12, f"alignments {where}: {off:.1e} of {right.scale:.1e}"
        largest = max((float(g.norm()) for g in right.gradient.values()), default=0.0)
        for name, g in right.gradient.items():
            apart = float((found.gradient[name] - g).norm()) if name in found.gradient else float(g.norm())
            assert apart <= bound * (float(g.norm()) + 0.1 * largest) + 1e-12, f"gradient of {name} {where}"


def train(recipe: Recipe) -> None:
    training = Training(recipe)
    for number in range(STEPS):
        try:
            training.step(number)
        except (EngineError, UsageError):  # said, and clear
            return
    assert training.engine.name == "layerwise" or training.engine.messages


def strict(**more: Any) -> Any:
    return settings(deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=False, **more)


@strict(max_examples=500 if LONG else 50, derandomize=not LONG)
@given(recipe=recipes)
def test_auto_is_exact_at_every_step(recipe: Recipe) -> None:
    train(recipe)
