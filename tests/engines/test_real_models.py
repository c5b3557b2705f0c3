"""Real architectures: the engine that ``auto`` takes, exact alignments and gradients, and the memory of a step."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from benchmarks.memory import peak_bytes
from real_models import LARGER, MODELS, TIMM, TINY, RealLosses, RealModel, joined
from soseleto.data.batches import Batch
from soseleto.engines import Passes, make_engine, trainable
from soseleto.engines.auto import AutoEngine
from soseleto.engines.autograd import gradient
from soseleto.engines.interface import Engine, Step
from soseleto.engines.layerwise import LayerwiseEngine

pytestmark = pytest.mark.filterwarnings("default")  # transformers, peft and timm emit warnings of their own
MEMORY = MODELS if os.environ.get("SOSELETO_LONG_ZOO") else [m for m in MODELS if m.name in ("bert", "vit", "llama")]
AT_MOST_MEMORY = 1.25
ERRORS = {torch.float64: 1e-9, torch.float32: 2e-5}
SINGLE_INSIDE = 2e-6  # in float64, with parts that are computed in float32


def passes(engine: Engine, case: RealModel, model: nn.Module, source: Batch, target: Batch) -> Passes:
    c = torch.linspace(-1, 1, len(source), dtype=torch.float64)
    return engine.passes(Step(model, RealLosses(case.loss), source, target, lambda found: found, c))


def error(found: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest relative error of a parameter; small gradients are compared on the scale of the largest."""
    assert found.keys() == right.keys()
    scale = 1e-2 * max(float(g.norm()) for g in right.values())
    return max(float((found[name] - g).norm()) / (float(g.norm()) + scale) for name, g in right.items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("case", [*MODELS, *TIMM], ids=lambda case: case.name)
def test_the_engine_and_its_error(case: RealModel, dtype: torch.dtype) -> None:
    if case.only_single and dtype == torch.float64:
        pytest.skip("does not run in float64")
    if dtype == torch.float32 and not case.only_single and case not in MEMORY:
        pytest.skip("in float32 too with SOSELETO_LONG_ZOO=1")
    model, source, target = case.build(TINY, dtype)
    auto = AutoEngine()
    found, right = (passes(engine, case, model, source, target) for engine in (auto, make_engine("loop")))
    assert auto.name == case.engine, auto.messages
    bound = SINGLE_INSIDE if case.single_inside and dtype == torch.float64 else ERRORS[dtype]
    assert float((found.alignment - right.alignment).norm()) <= bound * float(right.alignment.norm())
    assert error(found.source_gradient, right.source_gradient) <= bound
    assert error(found.target_gradient, right.target_gradient) <= bound


@pytest.mark.parametrize("case", MEMORY, ids=lambda case: case.name)
def test_memory_of_a_step(case: RealModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of layerwise, without a proof, against an ordinary one on as many examples."""
    if case.engine != "layerwise":
        pytest.skip(f"{case.name} is not served by layerwise")
    model, source, target = case.build(LARGER, torch.float32)
    engine, both, cpu = make_engine("layerwise"), joined(source, target), torch.device("cpu")
    passes(engine, case, model, source, target)
    monkeypatch.setattr(LayerwiseEngine, "_check", lambda *arguments: None)
    ours = peak_bytes(lambda: passes(engine, case, model, source, target), cpu)
    ordinary = peak_bytes(lambda: gradient(case.loss(model, both).mean(), trainable(model)), cpu)
    assert ours <= AT_MOST_MEMORY * ordinary, f"{ours / ordinary:.2f}x"


def test_memory_counts_what_is_alive_at_one_time() -> None:
    kept = torch.zeros(1000)

    def run() -> Tensor:
        one = kept + 1  # 4,000 bytes
        two = one[:500].double()  # a view, and 4,000 bytes
        del one
        kept.mul_(2)  # held before
        return two.repeat(2)  # 8,000 bytes, beside those of ``two``

    assert peak_bytes(run, torch.device("cpu")) == 12_000
