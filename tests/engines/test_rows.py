"""Models in which the first dimension of a layer's output is not the batch: layerwise equals ``loop``, or declines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rows import BY_NAME, PROBLEMS, WORDS, GroupedExperts, MixtureOfExperts, Packed, Recurrent, pack
from soseleto.data.batches import Batch
from soseleto.engines import make_engine, trainable
from soseleto.engines.contract import Passes, PerExampleLoss, SourcePass, SourceStep, Step
from soseleto.engines.layerwise.engine import LayerwiseEngine
from soseleto.engines.proof import Schedule
from soseleto.errors import EngineError
from zoo import CLASSES, B, Problem, cross_entropy

EXACT = [p for p in PROBLEMS if not p.declines]
STEPS = [p for p in EXACT if p.name != "every_token"]  # a step has one weight per example, not per token
LATE = (
    "gru_cell",
    "ctc",
    "flattened_tokens",
    "frames",
    "two_views",
    "mixture_of_experts",
    "packed_split",
    "embedding_bag",
)


def direction_for(model: nn.Module) -> dict[str, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, dtype=p.dtype, generator=seeded) for n, p in trainable(model).items()}


def require_exact(engine: Any, model: nn.Module, loss: PerExampleLoss, batch: Any) -> None:
    direction = direction_for(model)
    losses, found = engine(model, loss, batch, direction)
    right_losses, right = make_engine("loop")(model, loss, batch, direction)
    torch.testing.assert_close(losses, right_losses, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found, right, rtol=1e-8, atol=1e-10)


def require_equal(found: Passes | SourcePass, right: Passes | SourcePass) -> None:
    torch.testing.assert_close(found.alignment, right.alignment, rtol=1e-8, atol=1e-10)
    for name in ("source_gradient", "target_gradient", "gradient"):
        for key, g in getattr(right, name, {}).items():
            torch.testing.assert_close(getattr(found, name)[key], g, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_alignments_equal_loop_or_are_declined(problem: Problem) -> None:
    model, batch = problem.build()
    if problem.declines:
        with pytest.raises(EngineError, match=problem.declines["layerwise"]):
            make_engine("layerwise")(model, problem.loss, batch, direction_for(model))
    else:
        require_exact(make_engine("layerwise"), model, problem.loss, batch)


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


def step_of(problem: Problem, coefficients: Tensor | Callable[[Tensor], Tensor], targets: int = 2) -> Step:
    model, (inputs, labels) = problem.build()
    n = len(labels) - targets
    source = Batch(torch.arange(n), inputs[:n], labels[:n])
    target = Batch(torch.arange(targets), inputs[n:], labels[n:])
    return Step(model, Joined(problem.loss), source, target, lambda found: found, coefficients)


GIVEN = torch.linspace(0.1, 1, B - 2, dtype=torch.float64)
ONE_FOR_ALL = torch.tensor(0.3, dtype=torch.float64).expand(B - 2)


@pytest.mark.parametrize("coefficients", [GIVEN, ONE_FOR_ALL], ids=["given", "one for all"])
@pytest.mark.parametrize("problem", STEPS, ids=lambda p: p.name)
def test_steps_equal_loop(problem: Problem, coefficients: Tensor) -> None:
    step = step_of(problem, coefficients)
    require_equal(make_engine("layerwise").passes(step), make_engine("loop").passes(step))


@pytest.mark.parametrize("name", LATE)
def test_steps_with_coefficients_of_the_alignment_and_parts_of_steps_equal_loop(name: str) -> None:
    """One problem for each layout. A part of a step has a direction from elsewhere, as micro-batches have."""
    step = step_of(BY_NAME[name], lambda q: GIVEN + q.tanh())
    engine = make_engine("layerwise")
    require_equal(engine.passes(step), make_engine("loop").passes(step))
    step = replace(step, coefficients=lambda q: (2 + q.sum()).expand_as(q))
    require_equal(engine.passes(step), make_engine("loop").passes(step))
    for c in (GIVEN, ONE_FOR_ALL):
        part = SourceStep(step.model, step.losses.source, step.source, direction_for(step.model), c)
        require_equal(engine.source_pass(part), make_engine("loop").source_pass(part))


@pytest.mark.parametrize(
    "name", ["mixture_of_experts", "stacked_experts", "valid_tokens", "packed_index_add", "packed_shifted"]
)
def test_rows_of_other_batches_are_found_without_another_proof(name: str) -> None:
    """The index from rows to examples is that of each batch, not that of the proof."""
    problem = BY_NAME[name]
    model, _ = problem.build()
    engine = proved_once()
    for _ in range(4):
        require_exact(engine, model, problem.loss, (torch.randint(WORDS, (B, 6)), torch.randint(CLASSES, (B,))))
    if "experts" not in name:  # where other experts are other graphs
        assert engine.proofs == 1


def proved_once() -> LayerwiseEngine:
    """An engine without repeated proofs, which would hide what is wrong between them."""
    engine = LayerwiseEngine()
    engine.schedule = Schedule(calls=100, at=1 << 30)
    return engine


@pytest.mark.parametrize(
    "name", ["flattened_tokens_time_major", "rnn_deep", "gru_time_major_packed", "transformer_sequence_first"]
)
def test_a_time_major_model_at_any_length(name: str) -> None:
    """Also where there are as many times as examples, in the proof or after it."""
    from zoo import BY_NAME as PLAIN

    problem = BY_NAME.get(name) or PLAIN[name]
    for lengths in ([4, B], [B, 3, 1]):
        model, _ = problem.build()
        engine = proved_once()
        for length in lengths:
            batch = torch.randint(WORDS, (B, length)), torch.randint(CLASSES, (B,))
            require_exact(engine, model, problem.loss, batch)


def sliced_loss(model: nn.Module, batch: Any) -> Tensor:
    """Packed sequences whose losses are cut out one by one: no index tells the examples of the tokens."""
    tokens, owner = pack(batch[0])
    per_token = F.cross_entropy(model(tokens, owner)[0], tokens[0], reduction="none")
    ends = [0, *owner.bincount().cumsum(0).tolist()]
    return torch.stack([per_token[a:b].mean() for a, b in pairwise(ends)])


def test_packed_rows_without_an_index_are_declined() -> None:
    model = Packed().double()
    tokens = torch.randint(WORDS, (B, 6))
    with pytest.raises(EngineError, match=r"Embedding 'embed'.*1 rows where the batch has 5 losses"):
        make_engine("layerwise")(model, sliced_loss, (tokens, tokens[:, 0]), direction_for(model))


def test_experts_in_one_grouped_product() -> None:
    """In float32, since PyTorch has no such product in float64."""
    torch.manual_seed(0)
    model, engine = MixtureOfExperts(GroupedExperts), proved_once()
    for _ in range(3):
        step = Step(model, Joined(cross_entropy), batch_of(4), batch_of(2), lambda found: found, torch.rand(4))
        found, right = engine.passes(step), make_engine("loop").passes(step)
        torch.testing.assert_close(found.alignment, right.alignment, rtol=1e-4, atol=1e-4)
        for name, g in right.source_gradient.items():
            torch.testing.assert_close(found.source_gradient[name], g, rtol=1e-4, atol=1e-4)
    assert engine.proofs == 1


def batch_of(n: int) -> Batch:
    return Batch(torch.arange(n), torch.randint(WORDS, (n, 6)), torch.randint(CLASSES, (n,)))


@pytest.mark.parametrize("name", ["lstm_deep_packed", "gru_time_major_packed", "frames", "ctc"])
def test_mixed_precision_keeps_the_rows(name: str) -> None:
    model, batch = BY_NAME[name].build()
    model, batch = model.float(), tuple(part.float() if part.is_floating_point() else part for part in batch)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch[0])
        return BY_NAME[name].loss(lambda _: outputs.float(), batch)  # type: ignore[arg-type]

    _, right = make_engine("loop")(model, BY_NAME[name].loss, batch, direction_for(model))
    _, found = make_engine("layerwise")(model, loss, batch, direction_for(model))
    assert 0 < float((found - right).norm() / right.norm()) < 0.03


class Shuffled(nn.Module):
    """Rows gathered by a permutation that is not undone: losses mix with other examples' rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(7, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return self.out(h + h[torch.arange(len(x)).roll(1)])


class Reordered(nn.Module):
    """Rows are gathered in another order, treated, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.out = nn.Linear(7, 7), nn.Linear(7, 6), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        order = x[:, 0].argsort()
        h = torch.tanh(self.layer(x[order]))
        return self.out(h[order.argsort()])


class Prototypes(nn.Module):
    """Rows of a table of constants, gathered by the labels' numbers, are not rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(7, 6), nn.Linear(6, CLASSES)
        self.register_buffer("table", torch.randn(B, 7))  # as many rows as the batch has

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(self.table[(x[:, 0] > 0).long() + 2] * x)))


def test_gathered_rows_that_mix_are_declined() -> None:
    model, batch = Shuffled().double(), (torch.randn(B, 7, dtype=torch.float64), torch.randint(CLASSES, (B,)))
    with pytest.raises(EngineError, match="not exact"):
        make_engine("layerwise")(model, cross_entropy, batch, direction_for(model))


@pytest.mark.parametrize("kind", [Reordered, Prototypes])
def test_gathered_rows_in_order_or_of_constants(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model, engine = kind().double(), proved_once()
    for _ in range(3):
        batch = torch.randn(B, 7, dtype=torch.float64), torch.randint(CLASSES, (B,))
        require_exact(engine, model, cross_entropy, batch)


def test_a_recurrent_layer_costs_one_product_for_all_times() -> None:
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM).double()
    products = []
    for length in (6, 8):
        batch = torch.randint(WORDS, (B, length)), torch.randint(CLASSES, (B,))
        engine = proved_once()
        engine(model, cross_entropy, batch, direction_for(model))
        with Products() as after:
            engine(model, cross_entropy, batch, direction_for(model))
        products.append(after.count)
    forward_and_backward = 2  # per time: W_hh·h, and its backward to h
    assert products[1] - products[0] == 2 * forward_and_backward


class Products(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts matrix products."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
        return func(*args, **(kwargs or {}))


def test_dropout_between_recurrent_layers_is_drawn_as_by_pytorch() -> None:
    """In training the outputs are a mean over masks; without training they are PyTorch's."""
    torch.manual_seed(0)
    model = Recurrent(nn.LSTM, num_layers=2, dropout=0.5).double()
    batch = torch.randint(WORDS, (B, 6)), torch.randint(CLASSES, (B,))
    engine, direction = make_engine("layerwise"), direction_for(model)
    one, other = (engine(model, cross_entropy, batch, direction)[0] for _ in range(2))
    assert not torch.equal(one, other)
    require_exact(engine, model.eval(), cross_entropy, batch)
