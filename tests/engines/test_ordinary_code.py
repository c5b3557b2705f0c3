"""Code that trains with plain autograd: at every step ``auto`` equals ``loop``, or declines in one sentence.

The first table holds uses of parameters that PyTorch's functions differentiate by rules of their own; the second holds
models that are not what a proof has seen: a term that fades in, a batch unlike the first ones, hidden state.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto.engines import make_engine, trainable
from soseleto.errors import EngineError
from zoo import CLASSES, Lambda, cross_entropy

N, WIDTH = 8, 6
Loss = Callable[[nn.Module, Any], Tensor]
STEP = [0]  # of the training that runs


class Net(nn.Module):
    """A layer, ``middle`` with the module's own parameter w, and a head."""

    def __init__(self, middle: Callable[[Net, Tensor], Tensor], *shape: int, head: bool = True) -> None:
        super().__init__()
        self.layer, self.middle = nn.Linear(7, WIDTH), middle
        self.w = nn.Parameter(torch.randn(shape)) if shape else None
        self.head = nn.Linear(WIDTH, CLASSES) if head else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.middle(self, torch.tanh(self.layer(x)))
        return h if self.head is None else self.head(h)


def regression(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]).squeeze(-1) - batch[0][:, 0]).square()


def with_penalty(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model, batch) + 0.1 * model.layer.weight.square().sum()


def with_uncertainty(model: Any, batch: Any) -> Tensor:
    return cross_entropy(model, batch) * torch.exp(-model.w) + model.w


def deep_equilibrium(net: Any, x: Tensor) -> Tensor:
    """A fixed point without a graph; a hook on it solves for the gradient."""

    def step(z: Tensor) -> Tensor:
        return torch.tanh(0.3 * z @ net.w + x)

    with torch.no_grad():
        z = torch.zeros_like(x)
        for _ in range(60):
            z = step(z)
    z = step(z)
    if not z.requires_grad:
        return z
    again = z.clone().detach().requires_grad_()
    f = step(again)

    def solve(g: Tensor) -> Tensor:
        found = g
        for _ in range(60):
            found = torch.autograd.grad(f, again, found, retain_graph=True)[0] + g
        return found

    z.register_hook(solve)
    return z


def nested(net: Any, h: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor([h[: N // 2], h[N // 2 :]], layout=torch.jagged)
    return torch.cat([F.linear(rows, net.w).values()])


def per_sample(net: Any, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: torch.tanh(net.w * row))(h)


def energy(net: Any, h: Tensor) -> Tensor:
    return torch.vmap(torch.func.jacrev(lambda row: torch.tanh(net.w @ row).sum()))(h)


def pushed(net: Any, h: Tensor) -> Tensor:
    return torch.func.jvp(lambda rows: torch.tanh(rows @ net.w), (h,), (h,))[1]


def shared_weight(net: Any, h: Tensor) -> Tensor:
    return F.linear(h, net.layer.weight[:, :WIDTH].sum(0, keepdim=True)).squeeze(-1) + net.w


USES: dict[str, tuple[Callable[[], nn.Module], Loss]] = {
    "vector weight": (lambda: Net(lambda net, h: h @ net.w, WIDTH, head=False), regression),
    "squeeze and bias": (lambda: Net(shared_weight, 1, head=False), regression),
    "item biases": (lambda: Net(lambda net, h: h.sum(1) + net.w[h.argmax(1)], WIDTH, head=False), regression),
    "item vectors": (lambda: Net(lambda net, h: h * net.w[h.argmax(1)], WIDTH, WIDTH), cross_entropy),
    "cosine similarity": (lambda: Net(lambda net, h: F.cosine_similarity(h, net.w), 1, WIDTH, head=False), regression),
    "cosine of a vector": (lambda: Net(lambda net, h: F.cosine_similarity(h, net.w), WIDTH, head=False), regression),
    "penalty": (lambda: Net(lambda net, h: h), with_penalty),
    "uncertainty": (lambda: Net(lambda net, h: h, 1), with_uncertainty),
    "uncertainty of one number": (lambda: Net(lambda net, h: h + 0 * net.w, 1), with_uncertainty),
    "sum of a weight": (lambda: Net(lambda net, h: h + net.w.sum(), WIDTH), cross_entropy),
    "vmap": (lambda: Net(per_sample, WIDTH), cross_entropy),
    "jacrev": (lambda: Net(energy, WIDTH, WIDTH), cross_entropy),
    "jvp": (lambda: Net(pushed, WIDTH, WIDTH), cross_entropy),
    "deep equilibrium": (lambda: Net(deep_equilibrium, WIDTH, WIDTH), cross_entropy),
    "nested": (lambda: Net(nested, WIDTH, WIDTH), cross_entropy),
    "one linear layer": (lambda: nn.Linear(7, 1), regression),
    "scalar slope": (lambda: Slope(), regression),
}  # fmt: skip


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(7)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


def batches(n: int, seed: int) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    return torch.randn(n, 7, generator=seeded, dtype=torch.float64), torch.randint(CLASSES, (n,), generator=seeded)


def errors(model: nn.Module, loss: Loss, steps: int, make_batch: Callable[[int], Any], names: str = "") -> list[float]:
    """The relative error of ``auto`` at every step of a training; it ends with the first explicit error."""
    engine, optimizer, found = make_engine("auto"), torch.optim.SGD(model.parameters(), lr=0.05), list[float]()
    twin = copy.deepcopy(model)
    for step in range(steps):
        STEP[0] = step
        batch = make_batch(step)
        direction = {n: torch.randn_like(p) for n, p in trainable(model).items() if n.startswith(names)}
        _, right = make_engine("loop")(twin, loss, batch, direction)
        try:
            _, q = engine(model, loss, batch, direction)
        except EngineError:
            break
        found.append(float((q - right).norm() / right.norm().clamp_min(1e-300)))
        optimizer.zero_grad()
        for p, g in zip(model.parameters(), direction.values(), strict=False):
            p.grad = 0.1 * g if p.requires_grad and p.shape == g.shape else None
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(twin.parameters(), model.parameters(), strict=True):
                p.copy_(q) if q.requires_grad else None
    return found


@pytest.mark.parametrize("name", USES)
def test_every_use_of_a_parameter_is_exact_or_declined(name: str) -> None:
    torch.manual_seed(0)
    make, loss = USES[name]
    for error in errors(make().double(), loss, 3, lambda step: batches(N, step)):
        assert error <= 1e-8


# --- what the first steps of a training do not show ---


def late(after: int = 6) -> bool:
    return STEP[0] >= after


def faded(factor: Callable[[], Any]) -> Loss:
    """A term that acts between examples, times a factor that is 0 at first."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0])
        return F.cross_entropy(outputs, batch[1], reduction="none") + factor() * outputs.var(0).sum() * outputs[:, 0]

    return loss


def by_alpha(model: nn.Module, batch: Any) -> Tensor:
    outputs = model(batch[0])
    losses = F.cross_entropy(outputs, batch[1], reduction="none")
    return torch.add(losses, outputs[:, 0] * outputs.mean(), alpha=int(late()))


def same_identity(where: bool) -> Loss:
    """Pulls examples of one identity together; most batches have no such pair."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        outputs, identity = model(batch[0]), batch[2]
        pairs = (identity[:, None] == identity) & ~torch.eye(len(identity), dtype=torch.bool)
        apart = outputs @ outputs.T
        pull = torch.where(pairs, apart, 0.0) if where else apart * pairs
        return F.cross_entropy(outputs, batch[1], reduction="none") + pull.sum(1)

    return loss


def identities(step: int) -> Any:
    identity = torch.arange(N)
    if late():
        identity[5] = identity[1]
    return *batches(N, step), identity


def plain(middle: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(nn.Linear(7, WIDTH), middle or nn.Tanh(), nn.Linear(WIDTH, CLASSES))


class Teacher(nn.Module):
    """A momentum copy that is moved in the forward pass, and a batch statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(7, CLASSES), nn.Linear(7, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for mine, its in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                mine.mul_(0.8).add_(0.2 * its)
        h = self.student(x)
        return h - h.mean(0) + self.teacher(x).sigmoid() * h


class Stateful(nn.Module):
    """A recurrent layer that continues from its last state, kept as a plain attribute, and a count of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out, self.h, self.seen = nn.GRUCell(7, WIDTH), nn.Linear(WIDTH, CLASSES), None, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.seen[0] += 1
        h = self.cell(x, self.h)
        self.h = h.detach()
        return self.out(h - h.mean(0)) / self.seen[0]


def clip_outliers(h: Tensor) -> Tensor:
    """A hook that acts on examples with large gradients only, of which the first batches have none."""
    h = torch.tanh(h)
    if h.requires_grad:
        h.register_hook(lambda g: g.clamp(-2.0, 2.0))
    return h


def outliers(step: int) -> Any:
    x, y = batches(N, step)
    return x, y, torch.full((N,), 1.0 + 9.0 * late())


def scaled(model: nn.Module, batch: Any) -> Tensor:
    losses = cross_entropy(model, batch)
    return losses * batch[2] if len(batch) > 2 else losses


def annealed_mixing(h: Tensor) -> Tensor:
    factor = torch.sigmoid(torch.tensor(2.0 * (STEP[0] - 20.0), dtype=h.dtype))
    return torch.tanh(h + factor * h.mean(0))


def annealed_hook(h: Tensor) -> Tensor:
    h = torch.tanh(nn.functional.layer_norm(h, h.shape[1:]))
    factor = torch.sigmoid(torch.tensor(2.0 * (STEP[0] - 20.0), dtype=h.dtype))
    if h.requires_grad:
        h.register_hook(lambda g: g * (1 + factor))
    return h - h.mean(0)


class Experts(nn.Module):
    """Two experts in bfloat16, a router in float32, and a loss that balances the router over the batch."""

    def __init__(self, balance: float) -> None:
        super().__init__()
        self.router, self.experts, self.balance = nn.Linear(7, 2), nn.Linear(7, 2 * CLASSES), balance

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.router(x).softmax(1)
        with torch.autocast("cpu", torch.bfloat16):
            out = self.experts(x)
        return (out.float().view(-1, 2, CLASSES) * share.unsqueeze(2)).sum(1), share.mean(0).square().sum() * share[
            :, 0
        ]

    def loss(self, batch: Any) -> Tensor:
        out, balance = self(batch[0])
        return F.cross_entropy(out, batch[1], reduction="none") + self.balance * balance


class TinyBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.main, self.branch = nn.Linear(7, CLASSES), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.branch(x)
        return self.main(x) + 1e-5 * (h - h.mean(0)) * h.norm(dim=0)


def in_single(step: int) -> Any:
    x, y = batches(32, step)
    return x.float(), y


@dataclass(frozen=True)
class Late:
    make: Callable[[], nn.Module]
    loss: Loss = cross_entropy
    batch: Callable[[int], Any] = lambda step: batches(N, step)
    steps: int = 12
    names: str = ""
    tolerance: float = 1e-8


CASES: dict[str, Late] = {
    "int factor": Late(plain, faded(lambda: int(late()))),
    "bool factor": Late(plain, faded(lambda: late())),
    "numpy factor": Late(plain, faded(lambda: np.float64(late()))),
    "tensor factor": Late(plain, faded(lambda: torch.tensor(float(late()), dtype=torch.float64))),
    "alpha": Late(plain, by_alpha),
    "rare pairs, multiplied": Late(plain, same_identity(where=False), identities),
    "rare pairs, chosen": Late(plain, same_identity(where=True), identities),
    "roll": Late(lambda: plain(Lambda(lambda h: h + 0.5 * torch.roll(h, int(late()), 0)))),
    "momentum teacher": Late(Teacher, steps=5),
    "stateful": Late(Stateful, steps=5),
    "clipping of outliers": Late(lambda: plain(Lambda(clip_outliers)), scaled, outliers),
    "clipping of outliers, mixing": Late(
        lambda: plain(Lambda(lambda h: clip_outliers(h) - h.mean(0))), scaled, outliers
    ),
    "annealed mixing": Late(lambda: plain(Lambda(annealed_mixing)), steps=24),
    "annealed hook": Late(lambda: plain(Lambda(annealed_hook)), steps=24),
    "router": Late(
        lambda: Experts(0.02).float(), lambda model, batch: model.loss(batch), in_single, 5, "router", 0.02
    ),
    "tiny branch": Late(lambda: TinyBranch().float(), cross_entropy, in_single, 5, "branch", 1e-3),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_comes_late_is_exact_or_declined(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    model = case.make()
    model = model if case.batch is in_single else model.double()
    found = errors(model, case.loss, case.steps, case.batch, case.names)
    assert max(found, default=0.0) <= case.tolerance, [f"{error:.0e}" for error in found]
