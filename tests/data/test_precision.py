"""Values far from 0 and close together, such as Unix times, keep their differences."""

import json

import numpy as np
import pyarrow as pa
import pytest
import torch

from soseleto.data import FeatureViews, Preprocess, TablePreparation, as_examples
from soseleto.data.randomness import ExampleRandom

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


def test_gaps_and_constants_beside_times():
    table = np.concatenate([TIMES, np.full((400, 1), START + 0.1)], axis=1)
    table[3, 0] = np.nan
    made = Preprocess.of(torch.from_numpy(table))
    assert made.std[0] == pytest.approx(np.nanstd(table[:, 0]))
    assert made.std[2] == 1.0


def test_a_standardisation_of_an_earlier_version_computes_as_it_did():
    """It was fitted on numbers in float32."""
    fields = {"mean": [START + 64, 0.0], "std": [1.0, 1.0]}
    made = Preprocess.from_dict(fields)
    times = torch.from_numpy(TIMES)
    offset = torch.tensor([-START - 64, 0.0], dtype=torch.float64).float()
    assert torch.equal(made(times), times.float() + offset)
    assert made.to_dict() == fields


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


def test_a_dropped_time_is_the_mean_in_float64():
    rows = torch.from_numpy(TIMES)
    mean = Preprocess.of(rows).mean
    views = FeatureViews(drop=0.5, missing=mean, columns=(0, 1))
    _, strong, _ = views(rows, ExampleRandom.of(0, torch.arange(len(rows))))
    dropped = strong[:, 0] != rows[:, 0]
    assert 100 < int(dropped.sum()) < 300
    assert float(strong[dropped, 0][0]) == mean[0]


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


def test_a_table_of_an_earlier_version_is_read_as_it_was():
    fields = TablePreparation.fit(table()).to_dict()
    for column in fields["columns"]:
        del column["exact"]
    made = TablePreparation.from_dict(json.loads(json.dumps(fields)))
    assert not made.exact
    assert torch.equal(made.read(table()), torch.from_numpy(TIMES).float())


def test_other_tables_stay_float32():
    made = TablePreparation.fit(pa.table({"u": TIMES[:, 1], "constant": [START] * 399 + [START + 128]}))
    assert not made.exact
    assert made.read(pa.table({"u": TIMES[:, 1], "constant": [START] * 400})).dtype == torch.float32
