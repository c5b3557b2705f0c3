"""``Soseleto.paper()`` against the paper's page, transcribed line by line."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_tasks import heads_task, noisy_task
from soseleto import Soseleto
from soseleto.data.batches import Batch
from soseleto.models import TrunkAndHeads

N_SOURCE, L, LAMBDA_P, LAMBDA_ALPHA = 12, 5, 0.3, 200.0
Batches = list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]  # b, x_s, y_s, x_t, y_t


def algorithm_1(
    theta: nn.Module, phi_s: nn.Module, phi_t: nn.Module, alpha: Tensor, batches: Batches, weights_first: bool
) -> Iterator[Tensor]:
    """The paper's page, one line of it a line; α after every step. ``phi_t is phi_s`` is noisy-label mode.

    weights_first: as the notebook has it, the parameters take the step with the new α
    """
    noisy = phi_t is phi_s
    shared = [*theta.parameters(), *(phi_s.parameters() if noisy else [])]
    own_s, own_t = ([], []) if noisy else (list(phi_s.parameters()), list(phi_t.parameters()))
    for b, x_s, y_s, x_t, y_t in batches:  # while not converged: sample source batch b
        alpha_b = alpha[b]
        losses = [F.cross_entropy(phi_s(theta(x[None])), y[None]) / N_SOURCE for x, y in zip(x_s, y_s, strict=True)]
        Q = [torch.autograd.grad(loss, shared, retain_graph=True) for loss in losses]
        R = [torch.autograd.grad(loss, own_s, retain_graph=True) if own_s else () for loss in losses]
        L_t = F.cross_entropy(phi_t(theta(x_t)), y_t)
        of_theta, of_phi_t = (torch.autograd.grad(L_t, p, retain_graph=True) if p else () for p in (shared, own_t))
        QT_g = torch.stack([sum((q * g).sum() for q, g in zip(q_l, of_theta, strict=True)) for q_l in Q])  # type: ignore[misc]
        with torch.no_grad():
            alpha[b] = (alpha_b + LAMBDA_ALPHA * LAMBDA_P * QT_g).clamp(0, 1)  # α_b ← CLIP[0,1](…)
            alpha_b = alpha[b] if weights_first else alpha_b
            for parameters, columns in ((shared, Q), (own_s, R)):
                for k, p in enumerate(parameters):  # θ ← θ − λ_p Q α_b,  φˢ ← φˢ − λ_p R α_b
                    p -= LAMBDA_P * sum(a * column[k] for a, column in zip(alpha_b, columns, strict=True))
            for p, g in zip(own_t, of_phi_t, strict=True):  # φᵗ ← φᵗ − λ_p ∂L_t/∂φᵗ
                p -= LAMBDA_P * g
        yield alpha.clone()


def sampled(steps: int) -> Batches:
    draw = torch.Generator().manual_seed(0)
    x, x_t = (torch.randn(n, 4, generator=draw, dtype=torch.float64) for n in (N_SOURCE, 7))
    y, y_t = (torch.randint(3, (n,), generator=draw) for n in (N_SOURCE, 7))
    picked = [torch.randperm(N_SOURCE, generator=draw)[:L] for _ in range(steps)]
    return [(b, x[b], y[b], x_t, y_t) for b in picked]


@pytest.mark.parametrize("engine", ["loop", "double_backward", "forward", "layerwise", "auto"])
@pytest.mark.parametrize(("mode", "weights_first"), [("noisy", False), ("transfer", False), ("noisy", True)])
def test_every_step_is_that_of_the_papers_page(mode: str, weights_first: bool, engine: str) -> None:
    torch.manual_seed(1)
    theta, phi_s = nn.Sequential(nn.Linear(4, 6), nn.Tanh()).double(), nn.Linear(6, 3).double()
    phi_t = phi_s if mode == "noisy" else nn.Linear(6, 3).double()
    ours: nn.Module = nn.Sequential(theta, phi_s) if mode == "noisy" else TrunkAndHeads(theta, phi_s, phi_t)
    ours = copy.deepcopy(ours)
    of_target = len(list(phi_t.parameters())) if mode == "transfer" else 0

    def sgd(parameters: object) -> torch.optim.Optimizer:
        """The page's 1/nˢ is 1/L here, so that θ and φˢ take λ_p·L/nˢ where φᵗ takes λ_p."""
        found = list(parameters)  # type: ignore[call-overload]
        cut = len(found) - of_target
        groups = [{"params": found[:cut], "lr": LAMBDA_P * L / N_SOURCE}, {"params": found[cut:], "lr": LAMBDA_P}]
        return torch.optim.SGD([group for group in groups if group["params"]])

    task = (noisy_task if mode == "noisy" else heads_task)(ours, n_source=N_SOURCE, steps=6, make_optimizer=sgd)
    step = LAMBDA_ALPHA * LAMBDA_P / N_SOURCE
    method = Soseleto.paper(weight_step=step, engine=engine, weights_first=weights_first)
    state, batches = method.init(task), sampled(steps=6)
    alpha = torch.full((N_SOURCE,), 0.5, dtype=torch.float64)
    page = algorithm_1(theta, phi_s, phi_t, alpha, batches, weights_first)
    for (b, x_s, y_s, x_t, y_t), alpha in zip(batches, page, strict=True):
        method.step(state, Batch(b, x_s, y_s), Batch(torch.arange(len(y_t)), x_t, y_t))
        torch.testing.assert_close(state.weights.values.double(), alpha, rtol=0, atol=1e-6)  # weights are float32
        theirs = [*theta.parameters(), *phi_s.parameters(), *(phi_t.parameters() if mode == "transfer" else [])]
        for mine, its in zip(ours.parameters(), theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-7)
    assert float(state.weights.values.min()) == 0.0  # the clip was reached
    assert float(state.weights.values.max()) == 1.0
