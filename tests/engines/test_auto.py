"""Choices of ``engine="auto"``: kept between calls, and made again when they may no longer hold."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto.data.batches import Batch
from soseleto.engines import auto, make_engine
from soseleto.engines.auto import ProvedEngine
from soseleto.engines.autograd import loop
from soseleto.engines.interface import Step
from soseleto.errors import EngineError
from soseleto.task.losses import NoisyLosses
from zoo import BY_NAME, CLASSES, cross_entropy, direction_for, require_exact


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the engines that were tried."""
    tried: list[str] = []

    def counting(name: str) -> Any:
        tried.append(name)
        return make_engine(name)

    monkeypatch.setattr(auto, "make_engine", counting)
    return tried


class Owner:
    """A loss that is a method: a new object at every access."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return cross_entropy(model, batch)


@pytest.mark.parametrize("loss_of", [lambda owner: cross_entropy, lambda owner: owner.loss])
def test_the_second_call_does_no_search(loss_of: Any, trials: list[str]) -> None:
    model, batch = BY_NAME["mlp"].build()
    owner = Owner()
    for _ in range(3):
        require_exact(model, batch, loss_of(owner))
    assert trials == ["layerwise"]


def aligned_once() -> weakref.ref[nn.Module]:
    """A weak reference to a model after one call, with a loss that refers to the model."""
    model, batch = BY_NAME["mlp"].build()
    attributes = set(vars(model))
    require_exact(model, batch, lambda _, batch: cross_entropy(model, batch))
    assert set(vars(model)) == attributes
    return weakref.ref(model)


def test_the_model_can_be_collected() -> None:
    reference = aligned_once()
    gc.collect()
    assert reference() is None


def test_a_switch_from_eval_to_train_is_noticed(trials: list[str]) -> None:
    model, batch = BY_NAME["batchnorm_mlp_eval"].build()
    require_exact(model, batch)
    assert trials == ["layerwise"]
    require_exact(model.train(), batch)
    assert trials[1:] == ["layerwise", "forward"]
    require_exact(model.eval(), batch)  # the first choice holds again
    require_exact(model.train(), batch)
    assert len(trials) == 3


class Memory(nn.Module):
    """Compares each example with the batch, held constant, and with rows of its own that are joined to it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.memory, self.out = nn.Linear(7, 6), nn.Parameter(torch.randn(2, 6)), nn.Linear(7, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x))
        return self.out(h @ torch.cat([h.detach(), self.memory]).T)


def test_other_trainable_parameters_are_tried_again(trials: list[str]) -> None:
    torch.manual_seed(0)
    model = Memory().double()
    batch = torch.randn(5, 7, dtype=torch.float64), torch.randint(CLASSES, (5,))
    require_exact(model, batch)
    assert trials == ["layerwise", "forward"]
    model.memory.requires_grad_(False)  # which only forward could treat
    require_exact(model, batch)
    assert trials[2:] == ["layerwise"]


def mixed(model: nn.Module, batch: Any) -> Tensor:
    losses = cross_entropy(model, batch)
    return losses * losses.mean()


def test_another_loss_is_tried_again(trials: list[str]) -> None:
    """The second loss mixes the examples, so that layerwise is not exact for it; the choice for the first one holds."""
    model, batch = BY_NAME["mlp"].build()
    require_exact(model, batch)
    require_exact(model, batch, mixed)
    require_exact(model, batch)
    assert trials == ["layerwise", "layerwise", "forward"]


def test_an_engine_that_fails_late_does_not_pass_its_target_gradient_on_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late:
        name = "layerwise"

        def passes(self, step: Step) -> Any:
            step.to_direction({"weight": torch.ones(CLASSES, 7, dtype=torch.float64)})
            raise EngineError("too late")

    monkeypatch.setattr(auto, "make_engine", lambda name: Late() if name == "layerwise" else make_engine(name))
    seen: list[str] = []

    def to_direction(found: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.extend(found)
        return found

    model = nn.Linear(7, CLASSES).double()
    batch = Batch(torch.arange(4), torch.randn(4, 7, dtype=torch.float64), torch.arange(4) % CLASSES)
    step = Step(model, NoisyLosses(), batch, batch, to_direction, torch.ones(4, dtype=torch.float64))
    make_engine("auto").passes(step)
    assert sorted(seen) == ["bias", "weight"]


def test_alignments_that_are_wrong_for_one_example_are_not_proved() -> None:
    def nearly(*given: Any) -> tuple[Tensor, Tensor]:
        losses, q = loop(*given)
        return losses, torch.cat([2.0 * q[:1], q[1:]])

    model, batch = BY_NAME["mlp"].build()
    with pytest.raises(EngineError, match="its alignments differ from one backward per example"):
        ProvedEngine("nearly", nearly)(model, cross_entropy, batch, direction_for(model))


def test_a_choice_made_on_one_example_is_checked_on_more() -> None:
    """A single example cannot show that examples act on each other."""
    model, (inputs, labels) = BY_NAME["mixing"].build()
    require_exact(model, (inputs[:1], labels[:1]))
    require_exact(model, (inputs, labels))


@pytest.mark.parametrize(
    ("error", "is_taken"),
    [(ValueError("odd"), True), (RuntimeError("odd"), True), (torch.OutOfMemoryError("out of memory"), False)],
)
def test_any_failure_but_a_lack_of_memory_is_left_to_the_next_engine(
    error: Exception, is_taken: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has passed the batch through the model then, and leaves no statistics behind."""

    class Fails:
        name = "layerwise"

        def source_pass(self, step: Any) -> Any:
            step.loss(step.model, step.batch)
            raise error

    monkeypatch.setattr(auto, "make_engine", lambda name: Fails() if name == "layerwise" else make_engine(name))
    (model, batch), (once, _) = (BY_NAME["residual_batchnorm_train"].build() for _ in range(2))
    engine = auto.AutoEngine()
    if not is_taken:
        with pytest.raises(torch.OutOfMemoryError):
            engine(model, cross_entropy, batch, direction_for(model))
        return
    engine(model, cross_entropy, batch, direction_for(model))
    assert engine.name == "forward"
    assert f"the layerwise engine failed ({type(error).__name__}: odd)" in caplog.text
    cross_entropy(once, batch)
    torch.testing.assert_close(dict(model.named_buffers()), dict(once.named_buffers()))


def test_an_error_of_the_model_itself_is_raised_as_it_is() -> None:
    def broken(model: nn.Module, batch: Any) -> Tensor:
        raise KeyError("labels")

    model, batch = BY_NAME["mlp"].build()
    with pytest.raises(KeyError, match="labels"):
        soseleto.alignment(model, broken, batch, direction_for(model))


def test_an_engine_by_name_keeps_its_proofs() -> None:
    model, batch = BY_NAME["mlp"].build()
    passes: list[int] = []

    def counting(model: nn.Module, batch: Any) -> Tensor:
        passes.append(1)
        return cross_entropy(model, batch)

    counts = []
    for _ in range(6):
        passes.clear()
        soseleto.alignment(model, counting, batch, direction_for(model), engine="forward")
        counts.append(len(passes))
    assert counts[0] > 1
    assert counts[-2:] == [1, 1]
