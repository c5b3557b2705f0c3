"""Parameters that are transformed before they meet the data, beyond the models of the zoo."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import derived
from soseleto.data.batches import Batch
from soseleto.engines import make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.interface import Step
from soseleto.errors import EngineError
from soseleto.task.losses import NoisyLosses
from zoo import BY_NAME, CLASSES, cross_entropy

Loss = Callable[[nn.Module, Any], Tensor]


def vectors(n: int = 6) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(n, 7, dtype=torch.float64, generator=seeded), torch.randint(CLASSES, (n,), generator=seeded)


def images(n: int = 6) -> tuple[Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(0)
    return torch.randn(n, 3, 8, 8, dtype=torch.float64, generator=seeded), vectors(n)[1]


def error(model: nn.Module, batch: Any, engine: str) -> float:
    """Of an engine's alignments, relative to those of ``loop`` on a copy of the model."""
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}
    found = []
    for name, one in ((engine, model), ("loop", copy.deepcopy(model))):
        torch.manual_seed(5)
        found.append(make_engine(name)(one, cross_entropy, batch, direction)[1])
    return float((found[0] - found[1]).norm() / found[1].norm())


@pytest.mark.parametrize("engine", ["layerwise", "forward", "double_backward"])
def test_the_tolerance_follows_casts_inside_the_model(engine: str) -> None:
    """A float64 model with norms in float32 agrees with autograd to the precision of float32."""
    torch.manual_seed(0)
    layers = (m for _ in range(3) for m in (nn.Linear(7, 7), derived.RmsNorm(7), nn.Tanh()))
    model = nn.Sequential(*layers, nn.Linear(7, CLASSES)).double()
    assert 0 < error(model, vectors(), engine) < 1e-5


@pytest.mark.parametrize("norm", [torch.nn.utils.parametrizations.spectral_norm, torch.nn.utils.spectral_norm])
def test_spectral_norm_in_training_mode(norm: Callable[[nn.Module], nn.Module]) -> None:
    """Each forward pass updates the buffers that the weight is divided by the norm with."""
    torch.manual_seed(0)
    model = derived.normed(norm).double().train()
    state = copy.deepcopy(model.state_dict())
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}
    found = []
    for engine in ("layerwise", "loop"):
        model.load_state_dict(state)
        found.append(make_engine(engine)(model, cross_entropy, images(), direction)[1])
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-12)
    assert not all(torch.equal(state[name], value) for name, value in model.state_dict().items())


class Padded(nn.Module):
    """Data that are written into a tensor of zeros: it is no constant from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(7, 5), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.zeros(len(x), 6, dtype=x.dtype)
        h[:, :5] = torch.tanh(self.layer(x))
        return self.out(h)


def test_data_written_into_a_constant() -> None:
    torch.manual_seed(0)
    assert error(Padded().double(), vectors(), "layerwise") < 1e-12


class WrittenTo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Parameter(torch.randn(1, 7)), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.table.repeat(len(x), 1)
        h[:, 0] = x[:, 0]
        return self.out(torch.tanh(h))


def test_data_written_into_a_derived_tensor_is_refused() -> None:
    torch.manual_seed(0)
    model = WrittenTo().double()
    with pytest.raises(EngineError, match=r"'table'.* writes data"):
        error(model, vectors(), "layerwise")
    assert error(model, vectors(), "auto") < 1e-12


@pytest.mark.parametrize("name", ["derived_shared", "derived_biases_plain", "derived_products"])
def test_a_step_with_coefficients_from_the_alignment(name: str) -> None:
    """The weighted gradient of derived parameters, where its coefficients are known only at the end."""
    model, (inputs, labels) = BY_NAME[name].build()
    source, target = Batch(torch.arange(3), inputs[:3], labels[:3]), Batch(torch.arange(2), inputs[3:], labels[3:])
    step = Step(model, NoisyLosses(), source, target, lambda found: {n: 2 * g for n, g in found.items()}, torch.sigmoid)
    found = make_engine("layerwise").passes(step)
    right = gradient(cross_entropy(model, (inputs[3:], labels[3:])).mean(), trainable(model))
    torch.testing.assert_close(found.target_gradient, right, rtol=1e-9, atol=1e-12)
    losses = cross_entropy(model, (inputs[:3], labels[:3]))
    right = gradient(losses, trainable(model), torch.sigmoid(found.alignment))
    torch.testing.assert_close(found.source_gradient, right, rtol=1e-9, atol=1e-12)
