"""One set of defaults: what ``resolve`` chooses, and that every caller gets the same for the same knowledge."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import soseleto
from soseleto import Soseleto, squared_error
from soseleto.defaults import LAST_LAYER, SIZED, DefaultMethod, Settings, resolve
from soseleto.errors import UsageError
from soseleto.methods import Strong
from soseleto.pieces import beyond_noise, chain, label_doubt, normalized, running_mean, target_share
from soseleto.run_folder.folder import RunFolder
from soseleto.schedules import cosine, linear, warmup_cosine
from soseleto.task.optimizers import adamw, describe, sgd
from soseleto.training import fit as fit_module
from tiny_pictures import Stop
from typing_in import run

FEW = chain(LAST_LAYER, *SIZED, beyond_noise(2.0))
CONVOLUTIONS = nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.ReLU(), nn.Linear(4, 2))
LARGE = nn.Sequential(*list(CONVOLUTIONS)[:3], nn.Linear(4, 600), nn.ReLU(), nn.Linear(600, 2))


def from_library(library: str, *, images: bool = False) -> type[nn.Linear]:
    """A layer whose class comes from a library of pretrained models."""
    layer: type[nn.Linear] = type("Block", (nn.Linear,), {"__module__": f"{library}.models.block"})
    if images:
        layer.config = type("Config", (), {"num_channels": 3})  # type: ignore[attr-defined]
    return layer


def pretrained(library: str = "transformers", *, images: bool = False) -> nn.Module:
    return nn.Sequential(from_library(library, images=images)(3, 4), nn.Linear(4, 2))


def stacked(blocks: int) -> nn.Module:
    """As pretrained networks are: what reads the input, a list of blocks, and a classifier."""
    part = from_library("transformers")
    many = nn.ModuleList(part(4, 4) for _ in range(blocks))
    return nn.ModuleDict({"first": nn.Linear(3, 4), "blocks": many, "classifier": nn.Linear(4, 2)})


def chosen(model: nn.Module, **known: Any) -> Soseleto:
    known = {"classes": True, "ends_in_linear": True, "n_source": 300, **known}
    method = resolve(model, **known).method
    assert isinstance(method, Soseleto)
    return method


@pytest.mark.parametrize(
    ("model", "known", "epochs", "batch", "optimizer", "schedule"),
    [
        (nn.Linear(3, 2), {}, 30, 64, partial(sgd, lr=0.03, weight_decay=0.0), linear),
        (pretrained(), {}, 3, 64, partial(adamw, lr=3e-5, weight_decay=0.0), warmup_cosine),
        (pretrained("timm"), {}, 10, 64, partial(adamw, lr=1e-4, weight_decay=0.0), warmup_cosine),
        (pretrained(images=True), {}, 10, 64, partial(adamw, lr=1e-4, weight_decay=0.0), warmup_cosine),
        (pretrained("peft"), {}, 3, 64, partial(adamw, lr=1e-4, weight_decay=0.0), warmup_cosine),
        (pretrained(), {"n_source": 50_000}, 3, 64, partial(adamw, lr=3e-5, weight_decay=0.0), warmup_cosine),
        (nn.Linear(3, 2), {"lr": 0.2}, 30, 64, partial(sgd, lr=0.2, weight_decay=0.0), linear),
        (nn.Linear(3, 2), {"optimizer": (adamw, cosine), "epochs": 5}, 5, 64, adamw, cosine),
        (nn.Linear(3, 2), {"optimizer": adamw}, 30, 64, adamw, linear),
    ],
)
def test_the_table_of_models(
    model: nn.Module, known: dict[str, Any], epochs: int, batch: int, optimizer: Any, schedule: Any
) -> None:
    settings = resolve(model, **{"n_source": 3000, "n_target": 40, **known})
    assert (settings.epochs, settings.batch_size, settings.target_batch_size) == (epochs, batch, 32)
    assert settings.schedule is schedule
    assert _parts(settings.optimizer) == _parts(optimizer)


def _parts(make: Any) -> Any:
    return (make.func, make.keywords) if isinstance(make, partial) else make


@pytest.mark.parametrize(
    ("inputs", "model", "epochs", "target_batch", "lr", "weight_decay"),
    [
        ("images", nn.Linear(3, 2), 100, 64, 0.1, 5e-4),
        ("images", pretrained("timm"), 10, 64, 1e-4, 0.0),
        ("tokens", pretrained(), 3, 32, 6e-5, 0.0),
        ("tokens", pretrained("peft"), 3, 32, 1e-4, 0.0),
    ],
)
def test_the_strong_recipe(
    inputs: Any, model: nn.Module, epochs: int, target_batch: int, lr: float, weight_decay: float
) -> None:
    settings = resolve(model, inputs=inputs, n_source=3000, n_target=80, method=Strong())
    assert (settings.epochs, settings.target_batch_size) == (epochs, target_batch)
    described = settings.describe()
    assert (described["lr"], described["weight_decay"]) == (lr, weight_decay)
    suited = {"mixup": 0.0, "by_class": 1.0, "target_share": 0.5} if inputs == "tokens" else {}
    assert settings.method == Strong(**suited)
    with pytest.raises(UsageError, match="leave method out in transfer mode"):
        resolve(model, mode="transfer", inputs=inputs, method=Strong())


@pytest.mark.parametrize(
    ("model", "known", "step", "alignment", "share", "first"),
    [
        (nn.Linear(3, 2), {}, 0.03, FEW, 0.1, 1.0),
        (nn.Linear(3, 2), {"wrong_share": 0.1, "epochs": 10}, 0.09, FEW, 0.1, 1.0),
        (nn.Linear(3, 2), {"wrong_share": 0.2}, 0.3, chain(*SIZED), 0.3, 1.0),
        (nn.Linear(3, 2), {"ends_in_linear": False}, 0.03, chain(*SIZED, beyond_noise(2.0)), 0.1, 1.0),
        (CONVOLUTIONS, {"wrong_share": 0.2, "epochs": 10}, 0.09, FEW, 0.3, 0.7),  # 26 parameters, 300 examples
        (LARGE, {"wrong_share": 0.2, "epochs": 10}, 0.15, chain(LAST_LAYER, *SIZED), 0.3, 1.0),
        (pretrained(), {"wrong_share": 0.05}, 2.0, chain(*SIZED), 0.3, 1.0),
        (pretrained(), {"wrong_share": 0.03, "epochs": 10}, 0.09, FEW, 0.1, 1.0),
        (pretrained(), {"wrong_share": 0.3, "judged": True, "epochs": 10}, 0.09, FEW, 0.3, "beliefs"),
    ],
)
def test_the_table_of_methods(
    model: nn.Module, known: dict[str, Any], step: float, alignment: Any, share: float, first: float | str
) -> None:
    method = chosen(model, **known)
    assert method.weight_step == pytest.approx(step)
    assert (method.alignment, method.initial_weight) == (alignment, first)
    assert (method.source_loss, method.gradients) == (label_doubt(), target_share(share))
    scored = known.get("ends_in_linear", True) and not alignment.reads_layer
    assert method.scores == (LAST_LAYER if scored else None)


def test_weights_of_a_pretrained_network_move_by_its_last_blocks() -> None:
    layers = ("blocks.1.", "blocks.2.", "classifier.weight", "classifier.bias")
    assert chosen(stacked(3), wrong_share=0.4).direction == running_mean(layers=layers)
    assert chosen(stacked(2), wrong_share=0.4).direction == running_mean()  # these are all
    for change in (DefaultMethod(all_layers=True), DefaultMethod(engine="layerwise")):
        assert chosen(stacked(3), wrong_share=0.4, method=change).direction == running_mean()


@pytest.mark.parametrize("wrong_share", [0.0, 0.4])
def test_changes_of_the_default_method(wrong_share: float) -> None:
    changes = DefaultMethod(weight_step=0.2, target_share=0.0, doubt=False, all_layers=True, engine="loop")
    method = chosen(nn.Linear(3, 2), wrong_share=wrong_share, method=changes)
    assert (method.weight_step, method.engine) == (0.2, "loop")
    assert (method.gradients, method.source_loss) == (chain(), normalized())
    assert not method.alignment.reads_layer
    assert chosen(
        nn.Linear(3, 2), wrong_share=wrong_share, method=DefaultMethod(all_layers=False)
    ).alignment.reads_layer


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({"optimizer": (sgd, "cosine")}, "or a pair of it and a schedule"),
        ({"method": Strong()}, r"Strong\(\) takes uint8 images"),
        ({"augment": (None, None, None)}, "augment must be one Augment for both sides, or a pair"),
        ({"augment": soseleto.data.Views()}, "the method 'soseleto' takes one view of an image"),
        ({"method": Strong(), "inputs": "images", "augment": soseleto.Augment(flip=True)}, "needs two views"),
    ],
)
def test_a_choice_that_cannot_be_is_one_sentence(choice: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        resolve(nn.Linear(3, 2), **choice)


# Every caller


def classes(n: int, wrong: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two separated clouds, with a share of wrong labels."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % 2
    x = torch.randn(n, 3, generator=draw) + 4.0 * (y[:, None] - 0.5)
    return x, torch.where(torch.rand(n, generator=draw) < wrong, 1 - y, y)


SOURCE, TARGET = classes(300, 0.0), classes(10, 0.0, 1)  # a target too small to estimate the share of wrong labels


def of_fit(model: nn.Module, folder: Path) -> Settings | None:
    return soseleto.fit(model, SOURCE, TARGET, epochs=2, device="cpu", out=folder / "run").settings


def of_estimator(model: nn.Module, folder: Path) -> Settings | None:
    estimator = pytest.importorskip("soseleto.estimator").SoseletoClassifier(model, epochs=2, device="cpu")
    x, y = (part.numpy() for part in SOURCE)
    settings: Settings = estimator.fit(x, y, X_target=TARGET[0].numpy(), y_target=TARGET[1].numpy()).settings_
    return settings


def of_selection(model: nn.Module, folder: Path) -> Settings | None:
    def loss(network: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(network(batch[0]), batch[1], reduction="none")

    selection = soseleto.Selection(model, n_source=300, loss=loss, classes=2, epochs=2)
    selection.backward((SOURCE[0][:20], SOURCE[1][:20]), TARGET, index=torch.arange(20))
    return selection.settings


Caller = Callable[[nn.Module, Path], Settings | None]
CALLERS: list[Caller] = [of_fit, of_estimator, of_selection]


class Scaled(nn.Module):
    """Ends in a parameter of its own, so that the last linear layer is not the end."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(3, 2), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.layer(x)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("caller", CALLERS, ids=lambda caller: caller.__name__)
@pytest.mark.parametrize("model", [lambda: nn.Linear(3, 2), Scaled], ids=["linear", "scaled"])
def test_every_caller_gets_the_same_method(caller: Caller, model: Callable[[], nn.Module], tmp_path: Path) -> None:
    known = {"classes": True, "ends_in_linear": model is not Scaled, "n_source": 300, "epochs": 2}
    settings = caller(model(), tmp_path)
    expected = resolve(model(), **known)
    assert settings.method == expected.method
    assert replace(settings, reason="").line() == replace(expected, reason="").line()
    assert settings.epochs == 2


def test_the_command_line_gets_the_same_settings(tmp_path: Path) -> None:
    for name, (x, y) in (("source", SOURCE), ("target", TARGET)):
        np.savez(tmp_path / f"{name}.npz", x=x.numpy(), y=y.numpy())
    sets = ["--source", f"{tmp_path}/source.npz", "--target", f"{tmp_path}/target.npz", "--out", f"{tmp_path}/run"]
    options = ["--epochs", "2", "--model", "linear", "--no-baselines", "--folds", "0", "--probes", "0"]
    run("fit", *sets, *options)
    by_command = RunFolder.open(tmp_path / "run").config()
    by_fit = soseleto.fit(nn.Linear(3, 2), SOURCE, TARGET, epochs=2, out=tmp_path / "other").config
    same = ("method", "settings", "epochs", "batch_size", "target_batch_size", "optimizer", "lr", "schedule")
    assert {name: by_command[name] for name in same} == {name: by_fit[name] for name in same}


def test_other_tasks_keep_the_papers_losses() -> None:
    numbers = torch.randn(40, 3), torch.randn(40, 1)
    regression = soseleto.fit(nn.Linear(3, 1), numbers, numbers, loss=squared_error, epochs=1)
    transfer = soseleto.fit(nn.Linear(3, 4), SOURCE, TARGET, "transfer", epochs=1)
    assert regression.settings.method == Soseleto(gradients=target_share(0.1))
    assert describe(regression.settings.optimizer)["lr"] == 0.01
    assert transfer.settings.method == Soseleto(gradients=target_share(0.5))


def test_the_share_of_wrong_labels_is_estimated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    estimate = fit_module.wrong_share

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(1)
        return estimate(*arguments, **named)

    monkeypatch.setattr(fit_module, "wrong_share", counted)
    result = soseleto.fit(nn.Linear(3, 2), classes(300, 0.4), classes(60, 0.0, 1), epochs=1, probes="auto")
    assert len(calls) == 1
    assert 0.125 < result.config["wrong_share"] < 0.5
    assert "% of the source labels look wrong: alignments of all layers, weight step 0.3" in result.settings.line()


def test_a_resumed_run_keeps_its_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where it would come out different, as on another machine."""

    def stop(event: str, record: dict[str, Any]) -> None:
        if event == "epoch":
            raise Stop

    given: Any = {"source": SOURCE, "target": classes(60, 0.0, 1), "epochs": 3, "out": tmp_path / "run"}
    with pytest.raises(Stop):
        soseleto.fit(nn.Linear(3, 2), progress=stop, **given)
    monkeypatch.setattr(fit_module, "wrong_share", lambda *_, **__: pytest.fail("estimated again"))
    settings = soseleto.fit(nn.Linear(3, 2), **given).settings
    assert isinstance(settings.method, Soseleto)
    assert settings.method.alignment == FEW
