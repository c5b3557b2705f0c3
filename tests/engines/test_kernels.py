"""The GPU kernels against PyTorch's functions in float64; without a GPU these tests are skipped."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.engines import make_engine, trainable
from soseleto.engines.contract import SourceStep
from soseleto.engines.layerwise import kernels
from soseleto.engines.layerwise.per_example import each_example

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels run on GPUs only")
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", list(ERRORS))
@pytest.mark.parametrize("layout", ["contiguous", "channels last"])
@pytest.mark.parametrize("scaled", [True, False])
def test_dot_and_scale(dtype: torch.dtype, layout: str, scaled: bool) -> None:
    shape = (5, 24, 17, 19)
    memory_format = torch.channels_last if layout == "channels last" else torch.contiguous_format
    x, y = (torch.randn(shape, device="cuda").to(dtype).to(memory_format=memory_format) for _ in range(2))
    c = torch.rand(5, device="cuda").to(dtype)
    before = x.clone()
    assert kernels.usable(x, y)
    dot = kernels.dot_and_scale(x, y, c if scaled else None)
    _close(dot, (before.double() * y.double()).sum((1, 2, 3)), dtype)
    _close(x, y.double() * c.double().view(-1, 1, 1, 1) if scaled else before.double(), dtype)


def test_layouts_that_differ_are_not_used() -> None:
    x = torch.randn(5, 24, 17, 19, device="cuda")
    assert not kernels.usable(x, x.to(memory_format=torch.channels_last))
    assert not kernels.usable(x, x.flip(0).transpose(2, 3).contiguous().transpose(2, 3))
    assert not kernels.usable(x.double(), x.double())


def test_per_example_gradients() -> None:
    delta, a, along = (torch.randn(*s, device="cuda").bfloat16() for s in ((6, 400, 40), (6, 400, 72), (40, 72)))
    c = torch.rand(6, device="cuda").bfloat16()
    q, total = each_example(delta, a, along, c)
    each = torch.einsum("bpo,bpi->boi", delta.double(), a.double())
    _close(q, torch.einsum("boi,oi->b", each, along.double()), torch.bfloat16)
    _close(total, torch.einsum("b,boi->oi", c.double(), each), torch.bfloat16)


@pytest.mark.parametrize("one_for_all", [False, True])
@pytest.mark.parametrize("length", [32, 400])
def test_a_step_in_bfloat16(length: int, one_for_all: bool) -> None:
    """Short sequences take the fused kernel, long ones per-example gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64), nn.LayerNorm(64)).cuda()
    x = torch.randn(6, length, 64, device="cuda")
    w = torch.rand(1 if one_for_all else 6, device="cuda").expand(6)
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            out = model(batch)
        return F.mse_loss(out.float(), batch.flip(-1), reduction="none").mean((1, 2))

    found = make_engine("layerwise").source_pass(SourceStep(model, loss, x, direction, w))
    right = make_engine("loop").source_pass(SourceStep(model, loss, x, direction, w))
    _close(found.alignment, right.alignment, torch.bfloat16)
    for name, g in right.gradient.items():
        _close(found.gradient[name], g, torch.bfloat16)


def _close(found: Tensor, right: Tensor, dtype: torch.dtype) -> None:
    assert float((found.double() - right.double()).norm() / right.double().norm()) < ERRORS[dtype]
