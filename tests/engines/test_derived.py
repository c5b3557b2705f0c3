"""Parameters that are transformed before they meet the data, beyond the models of the zoo."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import derived
from soseleto.data.batches import Batch
from soseleto.engines import make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.interface import Step
from soseleto.task.losses import NoisyLosses
from zoo import BY_NAME, CLASSES, cross_entropy, direction_for


@pytest.mark.parametrize("engine", ["layerwise", "forward", "double_backward"])
def test_the_tolerance_follows_casts_inside_the_model(engine: str) -> None:
    """A float64 model with norms in float32 agrees with autograd to the precision of float32."""
    torch.manual_seed(0)
    layers = (m for _ in range(3) for m in (nn.Linear(7, 7), derived.RmsNorm(7), nn.Tanh()))
    model = nn.Sequential(*layers, nn.Linear(7, CLASSES)).double()
    batch, direction = (torch.randn(6, 7, dtype=torch.float64), torch.arange(6) % CLASSES), direction_for(model)
    found, right = (make_engine(name)(model, cross_entropy, batch, direction)[1] for name in (engine, "loop"))
    assert 0 < float((found - right).norm() / right.norm()) < 1e-5


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
