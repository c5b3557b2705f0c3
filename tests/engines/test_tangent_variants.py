"""The ways in which a GPU computes tangents of convolutions and BatchNorm, on a CPU in float64.

The two CUDA kernels that they call are replaced by what they compute, as SyncBatchNorm uses them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soseleto
from soseleto.engines import layer_tangents, norm_tangents, tangents
from soseleto.engines.contract import trainable
from soseleto.engines.forward import by_hand
from zoo import CLASSES, cross_entropy


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with BatchNorm; the last γ starts at 0, as in zero-initialised ResNets."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        inner = after // 2
        self.body = nn.Sequential(
            nn.Conv2d(before, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(inplace=True),
            nn.Conv2d(inner, inner, 3, stride, 1), nn.BatchNorm2d(inner, affine=False), nn.ReLU(),
            nn.Conv2d(inner, after, 1), nn.BatchNorm2d(after),
        )  # fmt: skip
        nn.init.zeros_(self.body[-1].weight)  # type: ignore[arg-type]
        self.short: nn.Module = nn.Identity()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.short(x))


def network() -> nn.Module:
    torch.manual_seed(0)
    stem = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    blocks = [Bottleneck(8, 8, 1), Bottleneck(8, 16, 2), nn.BatchNorm2d(16)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES)).double()


def reduce_kernel(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Any, *wanted: bool) -> Any:
    assert dy.stride() == x.stride()
    centred = x - mean.view(1, -1, 1, 1)
    return dy.sum((0, 2, 3)), (dy * centred).sum((0, 2, 3)), None, None


def element_kernel(
    dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, total: Tensor, product: Tensor, n: Tensor
) -> Tensor:
    mean, invstd, weight, total, product = (v.view(1, -1, 1, 1) for v in (mean, invstd, weight, total, product))
    return (dy - total / n - (x - mean) * invstd.square() * product / n) * weight * invstd


VARIANTS = {
    "fused, accumulated": {"_FUSED": True, "_ACCUMULATES": True},
    "fused, concatenated": {"_FUSED": True, "_ACCUMULATES": False, "_CONCATENATES": True},
    "compiled, separate": {"_COMPILED": True, "_ACCUMULATES": False},
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_variant_equals_loop(variant: str, layout: torch.memory_format, monkeypatch: pytest.MonkeyPatch) -> None:
    model = network().to(memory_format=layout)  # type: ignore[call-overload]
    inputs = torch.randn(5, 3, 9, 9, dtype=torch.float64).to(memory_format=layout)
    batch = inputs, torch.arange(5) % CLASSES
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}
    _, right = soseleto.alignment(model, cross_entropy, batch, direction, engine="loop")
    for module in (norm_tangents, layer_tangents):
        monkeypatch.setattr(module, "_DEVICES", {"cpu"})
    for name, value in VARIANTS[variant].items():
        monkeypatch.setattr(norm_tangents if hasattr(norm_tangents, name) else layer_tangents, name, value)
    calls = count_calls(monkeypatch, variant)
    _, found = by_hand(model, cross_entropy, batch, direction)
    assert float((found - right).norm() / right.norm()) < 1e-9
    assert calls["reduce"] == 9
    assert calls["fused" if "fused" in variant else "combine"] > 0


def count_calls(monkeypatch: pytest.MonkeyPatch, variant: str) -> dict[str, int]:
    calls = {"reduce": 0, "fused": 0, "combine": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return function(*args)

        return call

    monkeypatch.setattr(torch, "batch_norm_backward_reduce", counted("reduce", reduce_kernel))
    monkeypatch.setattr(torch, "batch_norm_backward_elemt", counted("fused", element_kernel))
    monkeypatch.setattr(norm_tangents, "_kernel", lambda: counted("combine", norm_tangents.combine))
    return calls


def test_tangents_have_the_memory_format_of_their_activations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = network().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    inputs = torch.randn(5, 3, 9, 9, dtype=torch.float64).to(memory_format=torch.channels_last)
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}
    made: list[tuple[Tensor, Tensor]] = []
    paired = tangents._paired

    def noting(out: Any, tangent: Any, duals: Any) -> Any:
        if isinstance(out, Tensor) and isinstance(tangent, Tensor):
            made.append((out, tangent))
        return paired(out, tangent, duals)

    monkeypatch.setattr(tangents, "_paired", noting)
    by_hand(model, cross_entropy, (inputs, torch.arange(5) % CLASSES), direction)
    images = [(primal, tangent) for primal, tangent in made if primal.ndim == 4 and primal.shape[2] > 1]
    assert len(images) > 20
    assert all(tangent.stride() == primal.stride() for primal, tangent in images)
