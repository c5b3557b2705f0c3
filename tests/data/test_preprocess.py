"""Standardisation by the source's statistics, and images on another scale than those of the training."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto.data import Preprocess
from soseleto.data.feeding import match_input_range
from soseleto.errors import DataError, UsageError


def test_bytes_become_standardised_floats():
    images = torch.randint(0, 256, (5000, 3, 4, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    images[:, 1] //= 2
    made = Preprocess.of(images)
    scaled = images.double() / 255
    assert torch.tensor(made.mean) == pytest.approx(scaled.mean((0, 2, 3)), rel=1e-6)
    assert torch.tensor(made.std) == pytest.approx(scaled.std((0, 2, 3), correction=0), rel=1e-6)
    batch = made(images[:7])
    assert batch.dtype == torch.float32
    wanted = (scaled[:7] - scaled.mean((0, 2, 3), keepdim=True)) / scaled.std((0, 2, 3), correction=0)[:, None, None]
    assert (batch - wanted).abs().max() < 1e-5
    assert (made(images[:7].float() / 255) - batch).abs().max() < 1e-5  # floats are on the 0-to-1 scale already


def test_columns_of_a_table_with_constants():
    table = torch.tensor([[1.0, 5.0, 1e6], [3.0, 5.0, 1e6 + 2], [5.0, 5.0, 1e6 + 4]])
    made = Preprocess.of(table)
    assert made.mean == pytest.approx((3.0, 5.0, 1e6 + 2))
    assert made.std == pytest.approx(((8 / 3) ** 0.5, 1.0, (8 / 3) ** 0.5))
    assert made(table)[:, 1].tolist() == [0, 0, 0]
    with pytest.raises(UsageError, match="finite means"):
        Preprocess.of(torch.tensor([[1.0], [float("nan")]]))


def test_tokens_pass_through():
    tokens = torch.tensor([[4, 5], [6, 7]])
    assert Preprocess.of(tokens)(tokens) is tokens


def test_wrong_shapes_and_values_are_named():
    with pytest.raises(DataError, match="second dimension must be 3"):
        Preprocess((0.0,) * 3, (1.0,) * 3)(torch.zeros(2, 4))
    with pytest.raises(UsageError, match="2 means but 1"):
        Preprocess((0.0, 0.0), (1.0,))
    with pytest.raises(UsageError, match="above 0"):
        Preprocess((0.0,), (0.0,))


# Bytes, whole numbers and floats of the same images: the same answers, or one sentence

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
