"""The method that is used where none is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto import Soseleto, squared_error
from soseleto.data.feeding import make_prepare
from soseleto.errors import UsageError
from soseleto.pieces import beyond_noise, chain, label_doubt, normalized, running_mean, target_share
from soseleto.run_folder.folder import RunFolder
from soseleto.training import usual
from soseleto.training.settings import method_of
from soseleto.training.usual import LAST_LAYER, MANY, SIZED, Usual

STEP = 0.3  # in one epoch
FEW = chain(LAST_LAYER, *SIZED, beyond_noise(2.0))


def classes(n: int, wrong: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two separated clouds, with a share of wrong labels."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    x = torch.randn(n, 3, generator=draw) + 4.0 * (y[:, None] - 0.5)
    return x, torch.where(torch.rand(n, generator=draw) < wrong, 1 - y, y)


def used(tmp_path: Path, model: nn.Module, mode: str = "noisy", *, wrong: float = 0.0, **arguments: Any) -> Soseleto:
    given = {"source": classes(300, wrong), "target": classes(40, 0.0, 1), "epochs": 1, "out": tmp_path / "run"}
    soseleto.fit(model, mode=mode, **{**given, **arguments})  # type: ignore[arg-type]
    method = method_of(RunFolder.open(tmp_path / "run").config()["settings"])
    assert isinstance(method, Soseleto)
    return method


class Scaled(nn.Module):
    """Ends in a parameter of its own, so that the last linear layer is not the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


class Averaged(nn.Module):
    """Averages the outputs of the last linear layer over two positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(torch.stack([x, x.flip(1)], 1)).mean(1)


class Sharpened(nn.Linear):
    """Multiplies the outputs by a constant."""

    def forward(self, x: Tensor) -> Tensor:
        return 10.0 * super().forward(x)


def test_where_few_labels_are_wrong_weights_move_on_evidence_of_the_last_layer(tmp_path: Path) -> None:
    method = used(tmp_path, nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)))
    assert (method.weight_step, method.alignment, method.scores) == (STEP, FEW, None)
    assert (method.source_loss, method.gradients) == (label_doubt(), target_share(0.1))
    longer = used(tmp_path / "longer", nn.Linear(3, 2), epochs=10)
    assert (longer.weight_step, longer.alignment) == (0.09, FEW)


def test_no_engine_is_named_where_none_was_used() -> None:
    given: Any = {"source": classes(60, 0.0), "target": classes(40, 0.0, 1), "epochs": 1}
    last_layer, all_layers = (
        soseleto.fit(nn.Linear(3, 2), **given),
        soseleto.fit(nn.Linear(3, 2), method=Soseleto(), **given),
    )
    assert (last_layer.engine, all_layers.engine) == ("", "layerwise")
    assert not any("engine" in message for message in last_layer.messages)
    assert "alignments by the layerwise engine" in all_layers.messages


def test_where_many_are_wrong_they_move_fast_by_all_layers(tmp_path: Path) -> None:
    method = used(tmp_path, nn.Linear(3, 2), wrong=0.4)
    assert (method.weight_step, method.alignment, method.scores) == (0.3, chain(*SIZED), LAST_LAYER)
    assert (method.source_loss, method.gradients) == (label_doubt(), target_share(0.3))


def test_many_wrong_labels_and_a_network_with_convolutions(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.ReLU(), nn.Linear(4, 2))
    method = used(tmp_path / "small", model, wrong=0.4, epochs=10)  # 26 parameters, 300 examples
    assert (method.weight_step, method.initial_weight, method.alignment, method.scores) == (0.09, 0.7, FEW, None)
    assert (method.source_loss, method.gradients) == (label_doubt(), target_share(0.3))
    large = nn.Sequential(*list(model)[:3], nn.Linear(4, 600), nn.ReLU(), nn.Linear(600, 2))
    method = used(tmp_path / "large", large, wrong=0.4, epochs=10)
    assert (method.weight_step, method.initial_weight, method.scores) == (0.15, 1.0, None)
    assert method.alignment == chain(LAST_LAYER, *SIZED)
    assert (method.source_loss, method.gradients) == (label_doubt(), target_share(0.3))


def test_weights_of_a_pretrained_network_can_cross_in_one_visit() -> None:
    for convolutional, alignment in ((False, chain(*SIZED)), (True, chain(LAST_LAYER, *SIZED))):
        kind = {"convolutional": convolutional, "by_heart": not convolutional, "pretrained": True}
        method = Usual().method_for_classes(many_wrong=True, **kind)
        assert (method.weight_step, method.initial_weight, method.alignment) == (2.0, 1.0, alignment)
        few = Usual().method_for_classes(many_wrong=False, epochs=10, **kind)
        assert (few.weight_step, few.initial_weight) == (0.09, 1.0)


class Stacked(nn.Module):
    """As pretrained networks are: what reads the input, a list of blocks, and a classifier."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        part = type("Block", (nn.Linear,), {"__module__": "transformers.models.block"})
        self.first, self.blocks = nn.Linear(3, 4), nn.ModuleList(part(4, 4) for _ in range(blocks))
        self.classifier = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.relu(block(x))
        return self.classifier(x)  # type: ignore[no-any-return]


def test_weights_of_a_pretrained_network_move_by_its_last_blocks(tmp_path: Path) -> None:
    layers = ("blocks.1.", "blocks.2.", "classifier.weight", "classifier.bias")
    method = used(tmp_path / "three", Stacked(3), wrong=0.4)
    assert (method.direction, method.alignment) == (running_mean(layers=layers), chain(*SIZED))
    assert used(tmp_path / "two", Stacked(2), wrong=0.4).direction == running_mean()  # these are all
    assert used(tmp_path / "few", Stacked(3)).alignment == FEW


@pytest.mark.parametrize("asked", [Usual(all_layers=True), Usual(engine="layerwise")])
def test_all_layers_of_a_pretrained_network_where_they_are_asked_for(asked: Usual) -> None:
    kind: Any = {"many_wrong": True, "pretrained": True, "last_blocks": ("blocks.2.",)}
    assert Usual().method_for_classes(**kind).direction == running_mean(layers=("blocks.2.",))
    assert asked.method_for_classes(**kind).direction == running_mean()
    assert Usual().method_for_classes(**{**kind, "pretrained": False}).direction == running_mean()
    assert Usual().method_for_classes(convolutional=True, **kind).alignment.reads_layer


def test_labels_are_learned_by_heart_with_ten_parameters_an_example() -> None:
    model = nn.Sequential(nn.Linear(3, 10), nn.Linear(10, 2)).requires_grad_(False)
    model[1].requires_grad_(True)  # 22 parameters are trained
    assert usual.by_heart(model, soseleto.Examples(*classes(2, 0.0)))
    assert not usual.by_heart(model, soseleto.Examples(*classes(3, 0.0)))


def test_the_share_of_wrong_labels_is_estimated_before_the_training() -> None:
    def found(wrong: float, n_target: int = 40) -> float:
        source, target = soseleto.Examples(*classes(300, wrong)), soseleto.Examples(*classes(n_target, 0.0, 1))
        model = nn.Linear(3, 2)
        prepare = make_prepare(source, model, standardize=None)
        return usual.wrong_at_least(model, prepare, source, target, seed=0)

    assert found(0.0) < 0.05
    assert MANY < found(0.4) < 0.5
    assert found(0.4, n_target=10) == 0.0  # too few to estimate anything


def test_a_pretrained_network_sees_half_of_the_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usual, "wrong_at_least", lambda *_, **__: 0.08)
    assert used(tmp_path / "own", nn.Linear(3, 2)).gradients == target_share(0.1)
    part = type("Block", (nn.Linear,), {"__module__": "transformers.models.block"})(3, 4)
    method = used(tmp_path / "library", nn.Sequential(part, nn.Linear(4, 2)), epochs=5)
    assert (method.gradients, method.weight_step) == (target_share(0.3), 2.0)


def test_all_layers_of_a_model_that_does_not_end_in_a_linear_one(tmp_path: Path) -> None:
    method = used(tmp_path, Scaled())
    assert (method.alignment, method.scores) == (chain(*SIZED, beyond_noise(2.0)), None)
    assert method.source_loss == label_doubt()


@pytest.mark.parametrize("model", [Averaged(), Sharpened(3, 2)])
def test_all_layers_of_a_model_whose_outputs_are_not_those_of_the_last_one(model: nn.Module, tmp_path: Path) -> None:
    assert not used(tmp_path, model).alignment.reads_layer


def test_other_tasks_keep_the_papers_losses(tmp_path: Path) -> None:
    y = torch.randn(40, 1)
    numbers: dict[str, Any] = {"source": (torch.randn(40, 3), y), "target": (torch.randn(10, 3), y[:10])}
    assert used(tmp_path / "a", nn.Linear(3, 1), loss=squared_error, **numbers) == Soseleto()
    assert used(tmp_path / "b", nn.Linear(3, 4), "transfer") == Soseleto(gradients=target_share(0.5))


@pytest.mark.parametrize("many_wrong", [False, True])
def test_what_is_asked_for_is_done(many_wrong: bool) -> None:
    asked = Usual(weight_step=0.2, target_share=0.0, doubt=False, all_layers=True, engine="loop")
    method = asked.method_for_classes(many_wrong=many_wrong)
    assert (method.weight_step, method.engine) == (0.2, "loop")
    assert (method.gradients, method.source_loss) == (chain(), normalized())
    assert method.alignment == (chain(*SIZED) if many_wrong else chain(*SIZED, beyond_noise(2.0)))
    named = Usual(engine="layerwise").method_for_classes(many_wrong=many_wrong)
    assert not named.alignment.reads_layer  # an engine is for all layers
    last = Usual(all_layers=False).method_for_classes(many_wrong=many_wrong)
    assert last.alignment.reads_layer
    with pytest.raises(UsageError, match="without direction and engine"):
        Usual(engine="layerwise", all_layers=False).method_for_classes(many_wrong=many_wrong)


def test_a_run_is_continued_with_the_method_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the estimate comes out a little different, as on another machine."""

    class Stop(Exception):
        pass

    def stop(event: str, record: dict[str, Any]) -> None:
        if event == "epoch":
            raise Stop

    with pytest.raises(Stop):
        used(tmp_path, nn.Linear(3, 2), epochs=3, progress=stop)
    monkeypatch.setattr(usual, "wrong_at_least", lambda *given, **named: 0.4)
    assert used(tmp_path, nn.Linear(3, 2), epochs=3).alignment == FEW
