"""Bytes, whole numbers and floats of the same images: the same answers, or one sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto.data.feeding import match_input_range
from soseleto.errors import DataError

N = 80


def images() -> tuple[Tensor, Tensor]:
    y = torch.arange(N) % 2
    draw = torch.randint(0, 120, (N, 1, 4, 4), generator=torch.Generator().manual_seed(0))
    return (draw + 120 * y[:, None, None, None]).to(torch.uint8), y


def trained(source: Tensor, target: Tensor, y: Tensor, **settings: object) -> soseleto.Result:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    half = N // 2
    return soseleto.fit(model, (source, y), (target[:half], y[:half]), epochs=2, seed=0, device="cpu", **settings)


@pytest.mark.parametrize("change", [Tensor.float, Tensor.long, Tensor.double, lambda x: x.float() / 255])
def test_a_model_of_bytes_answers_alike(change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    x, y = images()
    result = trained(x, x, y, out=tmp_path / "run")
    loaded = soseleto.load(tmp_path / "run", model=result.model, device="cpu")
    for made in (result, loaded):
        assert made.evaluate((x, y))["accuracy"] == 100.0
        torch.testing.assert_close(made.predict_proba(change(x)), made.predict_proba(x))
    again = trained(x, change(x), y)
    torch.testing.assert_close(again.weights, result.weights)


@pytest.mark.parametrize("change", [lambda x: x + 0.5, lambda x: (x - 128.0) / 60, lambda x: x.long() + 20])
def test_other_scales_than_bytes_are_refused(change: Callable[[Tensor], Tensor]) -> None:
    x, y = images()
    with pytest.raises(DataError, match=r"the target has values from .* trained on bytes: give bytes \(uint8\), or"):
        trained(x, change(x), y)
    with pytest.raises(DataError, match=r"the data has values from"):
        trained(x, x, y).predict(change(x))


def test_bytes_for_a_model_of_floats() -> None:
    x, y = images()
    floats = x.float() / 255
    with pytest.raises(DataError, match="the target has bytes, but the model is trained on floats"):
        trained(floats, x, y)
    with pytest.raises(DataError, match="the data has bytes, but the model is trained on floats"):
        trained(floats, floats, y).predict(x)
    rows = match_input_range(x[:, 0, 0], torch.float32, "the data")  # features have one scale: their own
    assert torch.equal(rows, x[:, 0, 0].float())
