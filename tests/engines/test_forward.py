"""The forward engine: what it follows, what it refuses, and that no tangent is kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import soseleto
from benchmarks.memory import peak_bytes
from soseleto.engines.autograd import gradient
from soseleto.engines.forward import forward
from soseleto.engines.interface import trainable
from soseleto.errors import EngineError
from soseleto.models.architectures import resnet18
from zoo import BY_NAME, CLASSES, cross_entropy


def random_direction(model: nn.Module) -> dict[str, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, dtype=p.dtype, generator=seeded) for n, p in trainable(model).items()}


class InPlace(nn.Module):
    """Writes to activations, in place of them and of constants, and takes some out of the graph."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.one, self.two, self.token = nn.Linear(7, 6), nn.Linear(6, CLASSES), nn.Parameter(torch.ones(6))
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        return self.two(getattr(self, self.kind)(self.one(x)))

    def sums(self, h: Tensor) -> Tensor:
        h += torch.tanh(h)
        h *= 2
        return nn.functional.silu(h.clamp_(min=-1), inplace=True)

    def rows_of_a_constant(self, h: Tensor) -> Tensor:
        total, rows = torch.zeros_like(h).detach(), torch.arange(len(h))
        total.index_add_(0, rows, h)
        total.index_add_(0, rows, torch.tanh(h))
        return total

    def mask(self, h: Tensor) -> Tensor:
        h[h[:, 0] > 0] = self.token
        return h

    def constants(self, h: Tensor) -> Tensor:
        with torch.no_grad():
            gate = torch.tanh(h)
        return h * gate + h.detach()

    def several_results(self, h: Tensor) -> Tensor:
        first, *others = h.unbind(1)
        return h + h.topk(2).values.sum(1, keepdim=True) + (first + others[0]).unsqueeze(1).T.T


@pytest.mark.parametrize("kind", ["sums", "rows_of_a_constant", "mask", "constants", "several_results"])
def test_what_is_written_in_place_is_followed(kind: str) -> None:
    torch.manual_seed(0)
    model, batch = InPlace(kind).double(), (torch.randn(5, 7, dtype=torch.float64), torch.arange(5) % CLASSES)
    direction = random_direction(model)
    right_losses, right = soseleto.alignment(model, cross_entropy, batch, direction, engine="loop")
    losses, found = forward(model, cross_entropy, batch, direction)
    torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(losses.detach(), right_losses, rtol=1e-14, atol=0.0)


class View(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        h = self[0](x)
        h.view(-1).mul_(2.0)
        return self[1](h)


def test_what_cannot_be_followed_is_refused() -> None:
    """A change in place of a view of an activation: the proof sees that the losses differ."""
    model = View(nn.Linear(7, 6), nn.Linear(6, CLASSES)).double()
    batch = torch.randn(5, 7, dtype=torch.float64), torch.arange(5) % CLASSES
    with pytest.raises(EngineError, match="its losses differ"):
        soseleto.alignment(model, cross_entropy, batch, random_direction(model), engine="forward")


def test_a_checkpointed_models_losses_can_be_differentiated() -> None:
    model, batch = BY_NAME["checkpointed"].build()
    with torch.random.fork_rng():
        losses, _ = forward(model, cross_entropy, batch, random_direction(model))
    assert gradient(losses.sum(), trainable(model)).keys() == trainable(model).keys()


@pytest.mark.parametrize("affine", [("weight",), ("bias",), ("weight", "bias")])
def test_batch_norm_with_directions_for_some_of_its_parameters(affine: tuple[str, ...]) -> None:
    model, batch = BY_NAME["residual_batchnorm_train"].build()
    wanted = {f"{block}.0.{k}" for block in ("one", "two") for k in affine} | {"stem.weight"}
    some = {k: v for k, v in random_direction(model).items() if k in wanted}
    _, right = soseleto.alignment(model, cross_entropy, batch, some, engine="loop")
    _, found = forward(model, cross_entropy, batch, some)
    assert float((found - right).norm() / right.norm()) < 1e-9


def test_no_tangent_is_kept() -> None:
    """At most a tenth more memory than an ordinary step."""
    model = resnet18(width=4, norm=nn.BatchNorm2d).train()
    batch = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    direction, parameters = random_direction(model), trainable(model)

    def peak(losses: Callable[[], Tensor]) -> int:
        return peak_bytes(lambda: gradient(losses().mean(), parameters), batch[0].device)

    ordinary = peak(lambda: cross_entropy(model, batch))
    assert peak(lambda: forward(model, cross_entropy, batch, direction)[0]) < 1.1 * ordinary
