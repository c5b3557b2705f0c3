"""Standardisation by the source's statistics, and images on another scale than those of the training."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto.data import Preprocess, TablePreparation, as_examples
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


def test_columns_of_a_table_with_gaps_and_constants():
    table = torch.tensor([[1.0, 5.0, float("nan")], [3.0, 5.0, 2.0], [5.0, 5.0, 4.0]])
    made = Preprocess.of(table)
    assert made.mean == pytest.approx((3.0, 5.0, 3.0))
    assert made.std == pytest.approx(((8 / 3) ** 0.5, 1.0, 1.0))
    assert made(table)[:, 1].tolist() == [0, 0, 0]


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


# Values far from 0 and close together, such as Unix times, keep their differences.
START = 1.7e9
SECONDS = np.random.default_rng(0).integers(0, 100, 400)
TIMES = np.stack([START + SECONDS, np.random.default_rng(1).normal(size=400)], axis=1)
LABELS = (SECONDS >= 50).astype(np.int64)


def standardised(values: np.ndarray) -> np.ndarray:
    return (values - values.mean(0)) / values.std(0)


def test_times_are_standardised_in_float64():
    made = Preprocess.of(torch.from_numpy(TIMES))
    assert made.exact
    assert made.std == pytest.approx(TIMES.std(0))
    found = made(torch.from_numpy(TIMES))
    assert found.dtype == torch.float32
    assert np.abs(found.numpy() - standardised(TIMES)).max() < 1e-5
    assert Preprocess.from_dict(json.loads(json.dumps(made.to_dict()))) == made


def test_only_what_needs_it_stays_float64():
    def dtype(values: np.ndarray) -> torch.dtype:
        return as_examples((values, np.arange(len(values)) % 2), name="source").inputs.dtype

    draw = np.random.default_rng(0)
    assert dtype(TIMES) == torch.float64
    assert dtype(TIMES[:1]) == torch.float64
    assert dtype(np.concatenate([TIMES, [[0.0, 0.0]]])) == torch.float64  # the spread is that of the outlier
    assert dtype(1e-3 + 1e-9 * draw.normal(size=(40, 2))) == torch.float64
    for plain in (draw.normal(size=(40, 2)), np.full((40, 2), 0.1), 50_000 + 999.9 * draw.normal(size=(40, 2))):
        assert dtype(plain) == torch.float32
        assert not Preprocess.of(torch.from_numpy(plain)).exact
    assert dtype(TIMES.astype(np.float32)) == torch.float32


def table(gaps: bool = False) -> pa.Table:
    times = pa.array(TIMES[:, 0], mask=np.arange(400) % 7 == 0 if gaps else None)
    return pa.table({"time": times, "u": pa.array(TIMES[:, 1])})


@pytest.mark.parametrize("gaps", [False, True])
def test_times_of_a_table_are_stored_and_encoded_in_float64(gaps: bool):
    made = TablePreparation.fit(table(gaps))
    assert made.exact
    stored = made.read(table(gaps))
    known = np.arange(400) % 7 != 0 if gaps else np.full(400, True)
    assert np.array_equal(stored[:, 0].numpy()[known], TIMES[known, 0])
    encoded = made(stored)
    assert encoded.dtype == torch.float32
    wanted = (TIMES[:, 0] - TIMES[known, 0].mean()) / TIMES[known, 0].std()
    assert np.abs(encoded[:, 0].numpy() - wanted)[known].max() < 1e-5
    edges = made.columns[0].edges
    assert len(edges) > 5
    pieces = encoded[:, 1 : len(edges)].sum(1).numpy()
    assert np.abs(pieces - np.interp(TIMES[:, 0], edges, np.arange(len(edges))))[known].max() < 1e-5
    assert torch.equal(made(made.read(table(gaps).slice(5, 1))), encoded[5:6])
    assert TablePreparation.from_dict(json.loads(json.dumps(made.to_dict()))) == made


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
