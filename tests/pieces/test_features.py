"""from_features against a ridge regression written down from its definition, and in loops that give features."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from small_tasks import noisy_task
from soseleto import Selection, Soseleto
from soseleto.data.batches import Batch, generator
from soseleto.defaults import DefaultMethod
from soseleto.engines.interface import Passes
from soseleto.errors import UsageError
from soseleto.pieces import chain, from_features, label_doubt, preconditioned, running_mean, scale_by_rms
from soseleto.pieces.features import CUT, LARGEST, OWN, RIDGE, _coefficients
from soseleto.pieces.piece import Alignment, Step

N, B, D = 60, 10, 4


def features(n: int = N, d: int = D) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3.0 + 5.0


def ridge_by_definition(x: np.ndarray, u: np.ndarray) -> Any:
    """min Σ(b + ⟨w, (x − x̄)/s⟩ − u)² + λ‖w‖²"""
    mean, size = x.mean(0), x.std(0)
    z = (x - mean) / size
    w = np.linalg.solve(z.T @ z + RIDGE * x.shape[1] * np.eye(x.shape[1]), z.T @ (u - u.mean()))
    return lambda new: u.mean() + (new - mean) / size @ w


def visit(piece: from_features, state: Any, step: Step, q: Tensor) -> tuple[Tensor, Alignment]:
    """The weights of a batch before its passes, and its alignments after them."""
    rows = torch.ones(3, len(step.source), dtype=torch.float64)
    piece.before(rows, state, step.source, step.task)
    return rows[0], piece.update(Alignment(q), state, step)


def steps(x: Tensor) -> tuple[Any, list[Step]]:
    problem = noisy_task(n_source=len(x), features=lambda batch: x[batch.index])
    empty = torch.zeros(0)
    found = []
    for index in torch.arange(len(x)).split(B):
        batch = Batch(index, x[index], torch.zeros(len(index)))
        found.append(Step(problem, batch, batch, passes=Passes(empty, empty, empty, {}, {})))
    return problem, found


def test_weights_are_expected_by_the_regression_on_all_earlier_visits() -> None:
    x, piece = features(), from_features()
    problem, visits = steps(x)
    q = torch.randn(N, generator=torch.Generator().manual_seed(2), dtype=torch.float64) + (x - 5.0).sum(1) / 3.0
    q[7] = 100.0  # heavy tails are cut
    state, u, squares, total = piece.init(problem), np.zeros(0), 0.0, 0.0
    for at, step in enumerate(visits):
        index = step.source.index
        weights, aligned = visit(piece, state, step, q[index])
        own = (q[index] / q[index].square().mean().sqrt()).clamp(-CUT, CUT).numpy()
        expected = np.zeros(B)
        if at:
            expected = ridge_by_definition(x[: at * B].numpy(), u)(x[index].numpy())
            positive = np.maximum(expected, 0.0)
            squares, total = squares + (positive**2).sum(), total + positive.sum()
            np.testing.assert_allclose(weights, np.minimum(positive * total / squares, 1.0), atol=1e-9)
        else:
            assert bool((weights == 1.0).all())
        np.testing.assert_allclose(aligned.q, OWN * own + (1.0 - OWN) * expected, atol=1e-9)
        assert aligned.gate == 0.0
        u = np.concatenate([u, own])


def test_many_correlated_features_are_regressed_closely() -> None:
    n, d = 2000, 60
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    x = draw(n, d) @ draw(d, d)  # condition number 1e5 and more
    u, w = x @ draw(d) / d + draw(n), torch.zeros(d, dtype=torch.float64)
    moments = torch.zeros(d + 2, d + 2, dtype=torch.float64)
    for rows in torch.cat([torch.ones(n, 1), x, u[:, None]], dim=1).split(50):
        moments += rows.T @ rows
        w = _coefficients(moments, w)
    expected = ridge_by_definition(x.numpy(), u.numpy())(x.numpy())
    found = ((x - x.mean(0)) @ w + u.mean()).numpy()
    assert np.abs(found - expected).max() < 0.02 * expected.std()


def test_more_features_than_the_largest_number_are_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[int] = []
    monkeypatch.setattr("soseleto.pieces.features.generator", lambda *of: drawn.append(1) or generator(*of))
    x, piece = features(N, LARGEST + 1), from_features()
    problem, visits = steps(x)
    state = piece.init(problem)
    for step in visits[:2]:
        visit(piece, state, step, x[step.source.index].sum(1) - x.sum(1).mean())
    assert state["moments"]["all"].shape == (LARGEST + 2, LARGEST + 2)
    rows = torch.ones(3, B, dtype=torch.float64)
    piece.before(rows, state, visits[2].source, problem)
    assert bool(rows.isfinite().all())
    assert rows[0].std() > 0
    assert len(drawn) <= 1  # every step has the same directions


def test_features_that_never_differ_and_batches_that_all_hurt() -> None:
    """Weights of 0 for a whole batch: a step by nothing, and a way back."""
    x, piece = torch.ones(N, D, dtype=torch.float64), from_features()
    problem, visits = steps(x)
    state = piece.init(problem)
    for step, sign in zip(visits, (-1.0, -1.0, 1.0, 1.0, 1.0, 1.0), strict=True):
        weights, _ = visit(piece, state, step, torch.full((B,), sign, dtype=torch.float64))
    assert float(weights.min()) > 0.99  # the mean is 1/5
    again = piece.init(problem)
    for step in visits[:3]:
        weights, _ = visit(piece, again, step, -torch.ones(B, dtype=torch.float64))
    assert bool((weights == 0.0).all())


def squared(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (model(batch[0])[:, 0] - batch[1]).square()


def loop(n: int, **arguments: Any) -> tuple[Selection, Tensor]:
    """After one pass, in the order returned, over examples of four groups, of which the first is the target's task."""
    drawn = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=drawn)
    group = torch.arange(n) % 4
    x, own, other = draw(n, 10), draw(10), 2.0 * draw(10)
    y = torch.where(group == 0, x @ own, x @ other)
    model = nn.Linear(10, 1)
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    of_groups = draw(4, 20)[group] + 0.5 * draw(n, 20)
    selection = Selection(model, n_source=n, loss=squared, features=of_groups, optimizer=optimizer, **arguments)
    trusted = draw(100, 10)
    order = torch.randperm(n, generator=drawn)
    for index in order.split(32):
        places = torch.randint(100, (8,), generator=drawn)
        selection.backward((x[index], y[index]), (trusted[places], trusted[places] @ own), index=index)
        optimizer.step()
        optimizer.zero_grad()
    return selection, order


def test_one_pass_over_the_source_is_enough() -> None:
    selection, order = loop(2000)
    of_task, late = order % 4 == 0, torch.arange(2000) >= 1200
    assert selection.settings.line() == "alignments of all layers, weights expected from features"
    weights, scores = selection.weights[order], selection.scores[order]
    assert float(weights[late & of_task].mean()) > 0.9
    assert float(weights[late & ~of_task].mean()) < 0.1
    assert float(scores[of_task].mean()) > 0.3 > float(scores[~of_task].mean())


def test_a_saved_selection_goes_on_with_the_same_weights() -> None:
    first, _ = loop(64)
    saved = first.state_dict()
    again = Selection(
        nn.Linear(10, 1), n_source=64, loss=squared, features=torch.zeros(64, 20),
        optimizer=torch.optim.Adam([nn.Parameter(torch.zeros(1))]),
    )  # fmt: skip
    again.load_state_dict(saved)
    torch.testing.assert_close(again.state_dict()["pieces"], saved["pieces"], rtol=0, atol=0)


def test_the_default_with_features_follows_the_optimizer() -> None:
    selection, _ = loop(64)
    assert selection.settings.method == Soseleto(direction=preconditioned(), alignment=from_features())
    model = nn.Linear(10, 1)
    given = {"n_source": 64, "loss": squared, "features": torch.zeros(64, 2)}
    plain = Selection(model, **given, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    assert plain.settings.method == Soseleto(direction=running_mean(), alignment=from_features())


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="leave label_doubt out"):
        Soseleto(alignment=chain(scale_by_rms(), from_features()), source_loss=label_doubt())
    with pytest.raises(UsageError, match="with features DefaultMethod takes the engine alone"):
        loop(4, method=DefaultMethod(target_share=0.3))
    with pytest.raises(UsageError, match="needs features of the source examples"):
        from_features().init(noisy_task())
    with pytest.raises(UsageError, match=r"shape \(3, 2\): give one row for each of the 64"):
        Selection(nn.Linear(10, 1), n_source=64, loss=squared, features=torch.zeros(3, 2))
    problem = noisy_task(features=lambda batch: torch.zeros(3))
    with pytest.raises(UsageError, match="one row of numbers per example"):
        from_features().before(torch.ones(3, 4), {"moments": {"all": 1}}, Batch(torch.arange(4), None, None), problem)
    assert chain(from_features(), scale_by_rms()).slot == "alignment"
