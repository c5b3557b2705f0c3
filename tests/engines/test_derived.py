"""Parameters that are transformed before they meet the data, beyond the models of the zoo."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import derived
from soseleto.data.batches import Batch
from soseleto.engines import make_engine, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.contract import Step
from soseleto.engines.layerwise.tape import Tape
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


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weight_norm_by_a_hook() -> None:
    torch.manual_seed(0)
    model = derived.normed(torch.nn.utils.weight_norm).double()
    direction = {name: torch.randn_like(p) for name, p in trainable(model).items()}
    found, right = (make_engine(e)(model, cross_entropy, images(), direction)[1] for e in ("layerwise", "loop"))
    torch.testing.assert_close(found, right, rtol=1e-10, atol=1e-12)


class CheckpointedGates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates = derived.Gates()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.gates, x, use_reentrant=False)
        return out


def test_gates_inside_a_checkpoint() -> None:
    """The second forward of a checkpoint must save tensors of the same shapes, so no copies are made there."""
    torch.manual_seed(0)
    model = CheckpointedGates().double()
    model.gates.gate.requires_grad_(False)  # used in place
    model.gates.step.requires_grad_(False)
    assert error(model, vectors(), "layerwise") < 1e-12


class MixedPrecisionGate(nn.Module):
    """A number without dimensions does not change the dtype of what it multiplies."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate, self.out = nn.Linear(7, 7), nn.Parameter(torch.tensor(0.7)), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).float() * self.gate
        assert h.dtype == torch.float32
        return self.out(torch.tanh(h.double()))


def test_a_number_of_another_precision() -> None:
    torch.manual_seed(0)
    assert error(MixedPrecisionGate().double(), vectors(), "layerwise") < 1e-5


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


@pytest.mark.parametrize("name", ["derived_shared", "derived_gates", "derived_products", "derived_tokens"])
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


def test_derived_tensors_leave_nothing_for_the_garbage_collector() -> None:
    model, batch = BY_NAME["derived_tokens"].build()
    direction, engine = {n: torch.randn_like(p) for n, p in trainable(model).items()}, make_engine("layerwise")
    engine(model, cross_entropy, batch, direction)
    gc.collect()
    gc.disable()
    try:
        before = sum(type(o) is Tensor for o in gc.get_objects())
        engine(model, cross_entropy, batch, direction)
        assert sum(type(o) is Tensor for o in gc.get_objects()) == before
    finally:
        gc.enable()


def test_a_copy_per_example_is_shared_and_takes_no_memory() -> None:
    model = derived.Biases(fused=False).double()
    tape = Tape(model)
    with tape:
        for _ in range(2):
            F.relu(model.log_scale * torch.ones(4, 2, 3, 3, dtype=torch.float64).tanh_())
    assert len(tape.calls) == 0  # a product with a constant is a derived tensor
    data = torch.randn(4, 2, 3, 3, dtype=torch.float64)
    with tape:
        for scale in (model.log_scale, model.log_scale, model.log_scale.expand_as(data)):
            scale * data
    assert len(tape.calls) == len(tape._copies) == 2  # of the parameter, and of the parameter expanded to one example
    assert {copy.untyped_storage().nbytes() for copy in tape._copies.values()} == {2 * 8}
