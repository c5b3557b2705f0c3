"""ProMix: each equation and whole steps against slow loops in float64; its trainings are in test_rivals.py."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.methods.divide_mix import mixed_alike, partners
from experiments.methods.promix import ProMix, small_losses
from soseleto.data.batches import ExampleRandom
from soseleto.methods.teacher import quantiles
from two_views import EYE, B, C, T, batch, close, entropy, net, task


@pytest.mark.parametrize("most", [1, 6, 40])
def test_small_losses_of_every_class_are_selected(most: int) -> None:
    seeded = torch.Generator().manual_seed(0)
    labels = torch.cat([torch.zeros(2, dtype=torch.int64), torch.randint(1, C, (38,), generator=seeded)])
    losses = 3 * torch.rand(40, generator=seeded, dtype=torch.float64)
    losses[5] = losses[9]  # a tie
    expected = [False] * 40
    for c in range(C):
        rows = sorted((row for row in range(40) if labels[row] == c), key=lambda row: float(losses[row]))
        for row in rows[:most]:
            expected[row] = True
    assert small_losses(losses, labels, C, most).tolist() == expected
    assert most == 40 or not all(expected)


def test_rows_are_mixed_with_rows_of_their_side() -> None:
    x, y = torch.randn(8, 3, dtype=torch.float64), torch.rand(8, C, dtype=torch.float64)
    side = torch.tensor([True, False, False, True, True, False, True, True])
    seen = set()
    for key in range(20):
        order, u = ExampleRandom.of(key, torch.arange(8)).uniform(2)
        partner = partners(order, side)
        assert sorted(partner.tolist()) == list(range(8))
        assert torch.equal(side[partner], side)
        seen.add(tuple(partner.tolist()))
        found, classes = mixed_alike(x, y, ExampleRandom.of(key, torch.arange(8)), 0.5, side)
        b = float(quantiles(u[0], 0.5))
        for made, given in ((found, x), (classes, y)):
            expected = max(b, 1 - b) * given + (1 - max(b, 1 - b)) * given[partner]
            torch.testing.assert_close(made, expected, rtol=1e-6, atol=1e-6)
    assert len(seen) > 10
    order = ExampleRandom.of(0, torch.arange(8)).uniform(1)[0]
    assert torch.equal(partners(order, torch.ones(8, dtype=torch.bool)), order.argsort())


def slow_networks(state: object) -> list[list[nn.Module]]:
    networks = copy.deepcopy(state.networks)
    return [[network, head] for network, head in zip(networks.both, networks.heads, strict=True)]


def slow_scores(network: nn.Module, head: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    features = network[:3](x)
    return network[3](features), head(features)


def test_steps_against_a_loop() -> None:
    method = ProMix(warm_up=0.1, ramp=0.2, share=0.4, confidence=0.3, agree_after=0.35, labelled=0.8, memory=0.9)
    with torch.random.fork_rng():
        torch.manual_seed(1)  # one of those by which all cases occur
        state = method.init(task(net()))
    slow = slow_networks(state)
    shares = torch.full((2, 2, C), 1 / C, dtype=torch.float64)
    kept = torch.ones(2, B, dtype=torch.bool)
    added = cut = others = 0
    for step in range(6):
        source, target = batch(B, step), batch(T, 100 + step)
        method.step(state, source, target, monitor=step % 2 == 0)

        z = []
        for network, _ in slow:
            network.eval()
            with torch.no_grad():
                z.append(network(source.inputs[0]))
            network.train()
        p = torch.stack(z).softmax(2)
        labelled, labels, before = [], [], shares.clone()
        for k in range(2):
            own = [bool(kept[k, i]) or float(p[k, i, source.labels[i]]) > 0.3 for i in range(B)]
            sure = []
            for i in range(B):
                surest = [float(p[j, i].max()) for j in range(2)]
                same = int(p[0, i].argmax()) == int(p[1, i].argmax())
                if not own[i] and same and min(surest) > 0.3 and step >= 3.5:
                    sure.append((-sum(surest), i))
            new = [i for _, i in sorted(sure)][: max(0, math.floor(0.8 * B) - sum(own))]
            labelled.append([own[i] or i in new for i in range(B)])
            guesses = [int((z[k][i] - 0.8 * before[k, 0].log()).argmax()) for i in range(B)]
            labels.append([int(source.labels[i]) if own[i] else guesses[i] for i in range(B)])
            if step >= 1:
                added, cut, others = added + len(new), cut + len(sure) - len(new), others + B - sum(labelled[k])
            for side in (0, 1) if step >= 1 else ():
                rows = [i for i in range(B) if labelled[k][i] == (side == 0)]
                if rows:
                    shares[k, side] = 0.9 * shares[k, side] + 0.1 * p[k, rows].mean(0)
        for k in range(2):
            weak = torch.cat([source.inputs[0], target.inputs[0]])
            if step < 1:
                given = torch.cat([source.labels, target.labels])
                loss = F.cross_entropy(slow_scores(*slow[k], weak)[0], given)
            else:
                y = []
                for i in range(B):
                    d = (z[k][i] - 0.8 * before[k, 1].log()).softmax(0)
                    y.append(EYE[labels[k][i]] if labelled[k][i] else d**2 / (d**2).sum())
                y = torch.stack([*y, *EYE[target.labels]])
                sides = torch.tensor([*labelled[k], *[True] * T])
                rows = torch.arange(B + T)
                draws = ExampleRandom.of(state.key, rows, torch.full_like(rows, step), torch.full_like(rows, k))
                mixed, mixed_y = mixed_alike(weak, y, draws, 4.0, sides)
                views = torch.cat([weak, source.inputs[1], target.inputs[1], mixed])
                loss = torch.zeros((), dtype=torch.float64)
                gamma, beta = min(1.0, step / 2), 0.1 * step / 4 if step < 4 else 0.0
                for a, scores in enumerate(slow_scores(*slow[k], views)):
                    for i in range(3 * (B + T)):
                        view, row = divmod(i, B + T)
                        of_side = before[k, int(not sides[row])]
                        one = entropy((mixed_y if view == 2 else y)[row], (scores[i] + 0.8 * of_side.log()).softmax(0))
                        one = one if view == 0 else gamma * one
                        if sides[row]:
                            loss = loss + one / int(sides.sum())
                        elif a and view < 2:
                            loss = loss + beta * one / int((~sides).sum())
            parameters = [*slow[k][0].parameters(), *slow[k][1].parameters()]
            with torch.no_grad():
                for parameter, slope in zip(
                    parameters, torch.autograd.grad(loss, parameters, materialize_grads=True), strict=True
                ):
                    parameter -= 0.1 * slope
        torch.testing.assert_close(state.weights.values, p.mean(0).gather(1, source.labels[:, None]).squeeze(1).float())
        if step % 2 == 0:
            of_label = p.gather(2, source.labels.expand(2, -1)[..., None]).squeeze(2)
            kept = torch.stack([small_losses(-q.log(), source.labels, C, math.ceil(0.4 * B / C)) for q in of_label])
    assert added
    assert cut
    assert others
    for k in range(2):
        close(state.networks.both[k], slow[k][0])
        close(state.networks.heads[k], slow[k][1])
    torch.testing.assert_close(state.shares, shares)
