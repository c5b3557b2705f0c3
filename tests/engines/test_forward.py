"""The forward engine, beyond the models of the zoo: checkpoints, parts of BatchNorm, and no tangent is kept."""

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
from soseleto.models.architectures import resnet18
from zoo import BY_NAME, cross_entropy, direction_for


def test_a_checkpointed_models_losses_can_be_differentiated() -> None:
    model, batch = BY_NAME["checkpointed"].build()
    with torch.random.fork_rng():
        losses, _ = forward(model, cross_entropy, batch, direction_for(model))
    assert gradient(losses.sum(), trainable(model)).keys() == trainable(model).keys()


@pytest.mark.parametrize("affine", [("weight",), ("bias",), ("weight", "bias")])
def test_batch_norm_with_directions_for_some_of_its_parameters(affine: tuple[str, ...]) -> None:
    model, batch = BY_NAME["residual_batchnorm_train"].build()
    wanted = {f"{block}.0.{k}" for block in ("one", "two") for k in affine} | {"stem.weight"}
    some = {k: v for k, v in direction_for(model).items() if k in wanted}
    _, right = soseleto.alignment(model, cross_entropy, batch, some, engine="loop")
    _, found = forward(model, cross_entropy, batch, some)
    assert float((found - right).norm() / right.norm()) < 1e-9


def test_no_tangent_is_kept() -> None:
    """At most a tenth more memory than an ordinary step."""
    model = resnet18(width=4, norm=nn.BatchNorm2d).train()
    batch = torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    direction, parameters = direction_for(model), trainable(model)

    def peak(losses: Callable[[], Tensor]) -> int:
        return peak_bytes(lambda: gradient(losses().mean(), parameters), batch[0].device)

    ordinary = peak(lambda: cross_entropy(model, batch))
    assert peak(lambda: forward(model, cross_entropy, batch, direction)[0]) < 1.1 * ordinary
