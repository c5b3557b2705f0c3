"""whitened_layers against the slow oracle: one backward per example over the layers' weights in the new coordinates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from soseleto import Soseleto
from soseleto.data.batches import Batch
from soseleto.engines import alignment, trainable
from soseleto.errors import UsageError
from soseleto.pieces import chain, label_doubt, whitened_layers
from soseleto.task.losses import NoisyLosses
from soseleto.task.task import Task
from soseleto.training.optimizers import sgd

N, SHRINK = 20, 0.3
LAYERS = ("0", "2", "5")  # a convolution with bias, one without, a linear layer


def network() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        convolutions = nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 2, stride=2, bias=False)
        return nn.Sequential(*convolutions, nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()


def task(model: nn.Module) -> Task:
    return Task(
        model=model, losses=NoisyLosses(), n_source=N, steps=10, shared=frozenset(trainable(model)),
        target_head=frozenset(), make_optimizer=sgd(0.3), classes=3,
    )  # fmt: skip


def batches(step: int) -> tuple[Batch, Batch]:
    draw = torch.Generator().manual_seed(step)
    sides = []
    for places in (torch.randperm(N, generator=draw)[:9], torch.arange(5)):
        x = torch.randn(len(places), 2, 4, 4, generator=draw, dtype=torch.float64) + 0.7
        sides.append(Batch(places, x, torch.randint(3, (len(places),), generator=draw)))
    return sides[0], sides[1]


def patches(layer: nn.Module, a: Tensor) -> Tensor:
    """(B, positions, channels, places of the kernel): the inputs of a layer as rows that its weight multiplies."""
    if isinstance(layer, nn.Linear):
        return a[:, None, :, None]
    assert isinstance(layer, nn.Conv2d)
    found = F.unfold(a, layer.kernel_size, padding=layer.padding, stride=layer.stride)  # type: ignore[arg-type]
    return found.transpose(1, 2).unflatten(2, (layer.in_channels, -1))


class Changed(nn.Module):
    """Every named layer with y + W̃ ã beside it, at W̃ = 0 and ã = A(a − m): its gradient is that of the coordinates."""

    def __init__(self, model: nn.Sequential, known: dict[str, tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.model, self.known = model, known
        self.extra = nn.ParameterDict()
        for name in LAYERS:
            weight = model.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            self.extra[name] = nn.Parameter(
                torch.zeros_like(weight.flatten(2) if weight.ndim > 2 else weight[..., None])
            )

    def forward(self, x: Tensor) -> Tensor:
        for name, layer in self.model.named_children():
            y = layer(x)
            if name in LAYERS:
                mean, root = self.known[name]
                new = torch.einsum("dc,bpck->bpdk", root, patches(layer, x) - mean[:, None])
                moved = torch.einsum("odk,bpdk->bop", self.extra[name], new)
                y = y + moved.view_as(y)
            x = y
        return x


def moments(model: nn.Sequential, x: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """Of every layer's inputs: the mean over rows and the second moment."""
    found = {}
    for name, layer in model.named_children():
        if name in LAYERS:
            rows = x.movedim(1, -1).reshape(-1, x.shape[1])
            found[name] = rows.mean(0), rows.T @ rows / len(rows)
        x = layer(x)
    return found


def coordinates(model: nn.Sequential, found: dict[str, tuple[Tensor, Tensor]]) -> dict[str, tuple[Tensor, Tensor]]:
    known = {}
    for name, (mean, squares) in found.items():
        m = mean if getattr(model.get_submodule(name), "bias", None) is not None else torch.zeros_like(mean)
        c = squares - torch.outer(m, m)
        values, vectors = torch.linalg.eigh(c + SHRINK * c.trace() / len(c) * torch.eye(len(c), dtype=c.dtype))
        known[name] = m, vectors @ torch.diag(values.rsqrt()) @ vectors.T
    return known


@pytest.mark.parametrize("doubted", [{}, {"source_loss": label_doubt(), "initial_weight": 0.6}], ids=["", "doubted"])
@pytest.mark.parametrize("engine", ["layerwise", "forward"])
def test_alignments_are_those_of_the_layers_in_whitened_coordinates(engine: str, doubted: dict[str, Any]) -> None:
    model, direction = network(), whitened_layers(LAYERS, decay=0.0, shrink=SHRINK)
    method = Soseleto(direction=direction, alignment=chain(), engine=engine, **doubted)
    state = method.init(task(model))
    loss = lambda m, b: F.cross_entropy(m(b.inputs), b.labels, reduction="none")  # noqa: E731
    identity = {n: (torch.zeros(c).double(), torch.eye(c).double()) for n, c in zip(LAYERS, (2, 3, 16), strict=True)}
    known = identity
    for number in range(3):
        source, target = batches(number)
        changed = Changed(model, known)
        names = [name for name, _ in changed.named_parameters() if name.startswith("extra.")]
        wanted = F.cross_entropy(changed(target.inputs), target.labels)
        found = torch.autograd.grad(wanted, [changed.get_parameter(name) for name in names])
        _, expected = alignment(changed, loss, source, dict(zip(names, found, strict=True)), engine="loop")
        if known is identity:
            known = coordinates(model, moments(model, source.inputs))  # inverted once, then refreshed between steps
        before = state.weights.rows(source.index)
        method.step(state, source, target)
        seen = (state.weights.scores[source.index] - before[1]) * (before[2] + 1) + before[1]
        torch.testing.assert_close(seen.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: whitened_layers(()), "tuple of names"),
        (lambda: whitened_layers("0"), "tuple of names"),  # type: ignore[arg-type]
        (lambda: whitened_layers(("0",), shrink=0.0), "shrink of whitened_layers"),
        (lambda: whitened_layers(("0",), decay=1.0), "decay of running_mean"),
        (lambda: whitened_layers(("1",)).init(task(network())), "'1' is no linear layer"),
    ],
)
def test_what_cannot_be_whitened_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        make()
