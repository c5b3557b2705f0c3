"""Standardisation by the source's statistics."""

import pytest
import torch

from soseleto.data import Preprocess
from soseleto.errors import DataError


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
