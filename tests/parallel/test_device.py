"""bfloat16 on a CPU without instructions for it: announced once, and no warning of PyTorch's that could be an error."""

from __future__ import annotations

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import soseleto
from soseleto.parallel.reducer import EMULATED, announcing_emulation, emulates

CPU = torch.device("cpu")
WARNING = "mkldnn_matmul failed, switching to BLAS gemm:mkldnn_matmul: mkldnn_matmul bf16 path needs a cpu with bf16"


@pytest.fixture(params=[True, False])
def supported(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace(_is_mkldnn_bf16_supported=lambda: request.param))
    return bool(request.param)


def test_only_bfloat16_on_such_a_cpu_is_emulated(supported: bool) -> None:
    assert emulates(torch.bfloat16, CPU) == (not supported)
    assert not emulates(torch.bfloat16, torch.device("cuda"))
    assert not emulates(torch.float32, CPU)
    assert not emulates(None, CPU)


def test_without_onednn_nothing_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops, "mkldnn", SimpleNamespace())
    assert not emulates(torch.bfloat16, CPU)


def test_it_is_announced_in_place_of_the_warnings(supported: bool) -> None:
    messages: list[str] = []
    with announcing_emulation(torch.bfloat16, CPU, messages.append):
        if supported:
            with pytest.raises(UserWarning, match="mkldnn_matmul failed"):
                warnings.warn(WARNING, UserWarning, stacklevel=1)
        else:
            warnings.warn(WARNING, UserWarning, stacklevel=1)
        with pytest.raises(UserWarning, match="another"):
            warnings.warn("another", UserWarning, stacklevel=1)
    assert messages == ([] if supported else [EMULATED])
    with pytest.raises(UserWarning, match="mkldnn_matmul failed"):
        warnings.warn(WARNING, UserWarning, stacklevel=1)


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_run_says_so_and_works_on_any_cpu(precision: torch.dtype | None) -> None:
    """With matrices so large that PyTorch would take oneDNN, and warnings as errors."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 2))
    inputs = torch.randn(96, 64)
    data = (inputs, (inputs[:, 0] > 0).long())
    result = soseleto.fit(
        model, data, data, epochs=1, batch_size=32, compute=soseleto.Compute(dtype=precision), device="cpu"
    )
    assert (EMULATED in result.messages) == emulates(precision, CPU)
    assert torch.isfinite(result.weights).all()
