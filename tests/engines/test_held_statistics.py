"""Alignments with BatchNorm's statistics held fixed, compared in float64 with a model of fixed affine maps."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import soseleto
from soseleto.engines import make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.contract import Losses, Step
from soseleto.errors import EngineError
from zoo import BY_NAME, CLASSES, cross_entropy

HELD = ("held_statistics", "held_statistics_and_gradient")


def problem(name: str) -> tuple[nn.Module, Any]:
    model, (inputs, labels) = BY_NAME[name.removesuffix(", channels last")].build()
    if name.endswith(", channels last"):
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.to(memory_format=torch.channels_last)
    return model, (inputs, labels)


NAMES = ("residual_batchnorm_train", "batchnorm_mlp_train", "residual_batchnorm_train, channels last")


def with_fixed_statistics(model: nn.Module, batch: Any) -> nn.Module:
    """A copy whose BatchNorms are in evaluation mode, with the statistics that this batch has."""
    fixed = copy.deepcopy(model)

    def keep(module: Any, inputs: tuple[Tensor]) -> None:
        axes = [0, *range(2, inputs[0].ndim)]
        module.running_mean = inputs[0].detach().mean(axes)
        module.running_var = inputs[0].detach().var(axes, correction=0)

    norms = [m for m in fixed.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    hooks = [norm.register_forward_pre_hook(keep) for norm in norms]
    with torch.no_grad():
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 0.0  # the statistics just written stay
        fixed(batch[0])
    for norm, momentum, hook in zip(norms, momenta, hooks, strict=True):
        norm.momentum = momentum
        hook.remove()
        norm.eval()
    return fixed


def direction_for(model: nn.Module) -> dict[str, Tensor]:
    seeded = torch.Generator().manual_seed(1)
    return {n: torch.randn(p.shape, dtype=p.dtype, generator=seeded) for n, p in trainable(model).items()}


def relative(found: Tensor, right: Tensor) -> float:
    return float((found - right).norm() / right.norm())


@pytest.mark.parametrize("name", NAMES)
def test_alignments_are_those_of_fixed_affine_maps(name: str) -> None:
    model, batch = problem(name)
    direction = direction_for(model)
    losses, right = soseleto.alignment(with_fixed_statistics(model, batch), cross_entropy, batch, direction, "loop")
    _, exact = soseleto.alignment(copy.deepcopy(model), cross_entropy, batch, direction, "loop")
    once = copy.deepcopy(model)
    ordinary = cross_entropy(once, batch)
    found_losses, found = soseleto.alignment(model, cross_entropy, batch, direction, "held_statistics")
    assert relative(found, right) < 1e-9
    assert relative(found, exact) > 1e-3  # another quantity
    assert relative(found_losses, losses) < 1e-9
    assert torch.equal(found_losses, ordinary.detach())  # bit for bit
    for key, value in once.state_dict().items():
        assert torch.equal(model.state_dict()[key], value), key


class BothSides(Losses):
    def source(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch)

    target = source

    def can_join(self, source: Any, target: Any) -> bool:
        return True


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("engine", HELD)
def test_gradients_of_a_step(name: str, engine: str) -> None:
    model, source = problem(name)
    target = source[0].flip(0) * 0.7 + 0.1, source[1]
    c = torch.linspace(0, 1, len(source[1]), dtype=torch.float64)
    wanted = {
        "held_statistics": lambda: _gradient(copy.deepcopy(model), source, c),
        "held_statistics_and_gradient": lambda: _gradient(with_fixed_statistics(model, source), source, c),
    }[engine]()
    target_gradient = _gradient(copy.deepcopy(model), target, torch.full_like(c, 1 / len(c)))
    passes = make_engine(engine).passes(Step(model, BothSides(), source, target, lambda g: g, lambda q: c))
    right = soseleto.alignment(with_fixed_statistics(model, source), cross_entropy, source, target_gradient, "loop")[1]
    assert relative(passes.alignment, right) < 1e-8
    for key, g in wanted.items():
        scale = max(float(one.norm()) for one in wanted.values())
        assert float((passes.source_gradient[key] - g).norm()) < 1e-9 * scale, key
        torch.testing.assert_close(passes.target_gradient[key], target_gradient[key], rtol=1e-9, atol=1e-12)


def _gradient(model: nn.Module, batch: Any, c: Tensor) -> dict[str, Tensor]:
    return gradient(cross_entropy(model, batch), trainable(model), c)


def test_a_run_names_the_quantity() -> None:
    x = torch.randn(16, 4)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
    method = soseleto.Soseleto(engine="held_statistics_and_gradient")
    result = soseleto.fit(
        model, (x, torch.arange(16) % 3), (x[:6], torch.arange(6) % 3), method=method, epochs=1, lr=0.1
    )
    assert any("another quantity" in text and "source gradient" in text for text in result.messages)


def test_auto_never_takes_it(caplog: pytest.LogCaptureFixture) -> None:
    model, batch = problem("batchnorm_mlp_train")
    engine = make_engine("auto")
    with caplog.at_level(logging.INFO, logger="soseleto"):
        engine(model, cross_entropy, batch, direction_for(model))
    assert engine.name == "forward"


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.out = nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6)), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.body, x, use_reentrant=False))


def test_checkpointed_statistics_are_refused() -> None:
    model = Checkpointed().double()
    batch = torch.randn(4, 7, dtype=torch.float64), torch.arange(4) % CLASSES
    with pytest.raises(EngineError, match=r"inside torch\.utils\.checkpoint"):
        soseleto.alignment(model, cross_entropy, batch, direction_for(model), "held_statistics")


def test_a_loss_that_mixes_examples_is_still_refused() -> None:
    model, batch = problem("batchnorm_mlp_train")

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = cross_entropy(model, batch)
        return losses * losses.mean()

    with pytest.raises(EngineError, match="not exact"):
        soseleto.alignment(model, loss, batch, direction_for(model), "held_statistics")


def test_autocast_keeps_the_alignments_close() -> None:
    model, batch = problem("residual_batchnorm_train")
    model, batch = model.float(), (batch[0].float(), batch[1])
    direction = direction_for(model)

    def half(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(batch[0])
        return nn.functional.cross_entropy(outputs.float(), batch[1], reduction="none")

    _, right = soseleto.alignment(copy.deepcopy(model), cross_entropy, batch, direction, "held_statistics")
    _, found = soseleto.alignment(model, half, batch, direction, "held_statistics")
    assert 0 < relative(found, right) < 0.1
