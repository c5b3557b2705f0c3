"""beyond_noise against its equation, example by example."""

from __future__ import annotations

import pytest
import torch

from small_tasks import N, batches, noisy_task
from soseleto.errors import UsageError
from soseleto.pieces import beyond_noise
from soseleto.pieces.alignment import PRIOR
from soseleto.pieces.piece import Alignment, Step


def test_the_evidence_is_the_mean_minus_its_standard_error() -> None:
    problem, z = noisy_task(), 0.8
    piece = beyond_noise(z)
    state, draw = piece.init(problem), torch.Generator().manual_seed(0)
    seen: list[list[float]] = [[] for _ in range(N)]
    for number in range(9):
        source, target = batches(number)
        q = torch.randn(len(source.index), generator=draw, dtype=torch.float64) + 0.3 * source.index - 1.5
        found = piece.update(Alignment(q, unit=2.0), state, Step(problem, source, target))
        for j, value in zip(source.index.tolist(), (2.0 * q).tolist(), strict=True):
            seen[j].append(value)
        squares = [float(((u := torch.tensor(one, dtype=torch.float64)) - u.mean()).square().sum()) for one in seen]
        usual = sum(squares) / max(1, sum(len(one) - 1 for one in seen if one))
        for j, evidence in zip(source.index.tolist(), found.evidence.tolist(), strict=True):
            n, mean = len(seen[j]), sum(seen[j]) / len(seen[j])
            error = ((PRIOR * usual + squares[j]) / (PRIOR + n - 1) / n) ** 0.5
            expected = max(abs(mean) - z * error, 0.0) * (1 if mean > 0 else -1)
            assert evidence == pytest.approx(expected, abs=1e-5)
        assert torch.equal(found.scaled, 2.0 * q)  # scores follow the alignment as it is


def test_scatter_moves_no_weight_and_a_steady_sign_does() -> None:
    problem, piece = noisy_task(), beyond_noise(3.0)
    state, draw = piece.init(problem), torch.Generator().manual_seed(1)
    moved = torch.zeros(N)
    source, target = batches(0)
    for _ in range(40):
        q = torch.randn(len(source.index), generator=draw)
        q[0] -= 2.0
        evidence = piece.update(Alignment(q), state, Step(problem, source, target)).evidence
        moved[source.index] += evidence
    assert moved[source.index[0]] < -20
    # most of it by the first visit, which has no estimate of noise
    assert float(moved[source.index[1:]].abs().max()) < 3


def test_a_threshold_of_zero_is_refused() -> None:
    with pytest.raises(UsageError, match="leave the piece out"):
        beyond_noise(0.0)
