"""SelectionModule with the real Lightning: weights, schedules, clipping, checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

lightning = pytest.importorskip("lightning")

from ranks import together  # noqa: E402
from soseleto.errors import UsageError  # noqa: E402
from soseleto.integrations.lightning import SelectionModule, selection_loaders  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")
WRONG = 30


class Model(SelectionModule):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(n_source=120, **kwargs)
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
        self.rates: list[float] = []

    def per_example_loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1], reduction="none")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_train_batch_end(self, *args: Any) -> None:
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def data() -> tuple[TensorDataset, TensorDataset]:
    x = torch.randn(180, 2, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    given = y.clone()
    given[:WRONG] = 1 - given[:WRONG]
    return TensorDataset(x[:120], given[:120]), TensorDataset(x[120:], y[120:])


def train(folder: Path, model: Model, epochs: int, **kwargs: Any) -> Any:
    source, target = data()
    torch.manual_seed(3)
    resume = kwargs.pop("ckpt_path", None)
    settings = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(default_root_dir=folder, max_epochs=epochs, **settings, **kwargs)
    loaders = selection_loaders(source, target, batch_size=24, target_batch_size=16)
    trainer.fit(model, loaders, torch.utils.data.DataLoader(target, 60), ckpt_path=resume)
    return trainer


def test_weights_find_the_wrong_labels(tmp_path: Path) -> None:
    model = Model(clip=1.0)
    with pytest.raises(UsageError, match=r"call Trainer\.fit first"):
        _ = model.selection
    trainer = train(tmp_path, model, 12, enable_checkpointing=False)
    assert float(trainer.callback_metrics["accuracy"]) > 0.85
    assert {"source_loss", "target_loss"} <= set(trainer.callback_metrics)
    assert (model.selection.visits == 12).all()
    weights = model.selection.weights
    assert weights[:WRONG].mean() < weights[WRONG:].mean() - 0.2
    assert model.rates == pytest.approx([0.3 * (1 - step / 200) for step in range(1, 61)])


def test_a_gradient_is_clipped_to_the_same_norm_under_a_grad_scaler(tmp_path: Path) -> None:
    class Watched(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    plugins = lightning.pytorch.plugins
    scaled = plugins.MixedPrecision("bf16-mixed", "cpu")
    scaled.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    norms: list[float] = []
    for precision in ([], [scaled]):
        train(tmp_path, Watched(clip=0.01), 1, plugins=precision, enable_checkpointing=False)
    assert len(norms) == 10
    assert norms == pytest.approx([0.01] * 10, rel=1e-3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_accumulated_batches_make_one_step(tmp_path: Path, accumulate: int) -> None:
    model, steps = Model(accumulate=accumulate), list[int]()
    model.on_before_optimizer_step = lambda optimizer: steps.append(model.trainer.fit_loop.batch_idx)  # type: ignore[method-assign]
    train(tmp_path, model, 1, enable_checkpointing=False)  # five batches
    assert steps == ([0, 1, 2, 3, 4] if accumulate == 1 else [1, 3, 4])
    assert model.rates[-1] == pytest.approx(0.3 * (1 - len(steps) / 200))
    assert (model.selection.visits == 1).all()


def on_ranks(reducer: Any, folder: str) -> Any:
    """As torchrun starts them."""
    os.environ["LOCAL_RANK"] = str(reducer.rank)
    model = Model(clip=1.0)
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    several = {"devices": reducer.ranks, "strategy": "ddp", "plugins": [TorchElasticEnvironment()]}
    train(Path(folder), model, 12, enable_checkpointing=False, num_sanity_val_steps=0, **several)
    with torch.no_grad():
        parameters = torch.cat([p.flatten() for p in model.parameters()])
    return parameters.numpy(), model.selection.weights.numpy(), model.selection.visits.numpy()


@pytest.mark.skipif(os.name != "posix", reason="processes are started as POSIX does")
def test_two_ranks_train_one_model(tmp_path: Path) -> None:
    one, other = together(2, on_ranks, str(tmp_path))
    for mine, its in zip(one, other, strict=True):
        assert (mine == its).all()
    _, weights, visits = one
    assert (visits == 12).all()
    assert weights[:WRONG].mean() < weights[WRONG:].mean() - 0.2


def test_a_resumed_training_goes_on_with_its_weights(tmp_path: Path) -> None:
    whole = Model()
    trainer = train(tmp_path, whole, 2, enable_checkpointing=False)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    before = whole.selection.weights
    read = Model.load_from_checkpoint(tmp_path / "two.ckpt")
    assert torch.equal(read.selection.weights, before)
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    again = Model()
    with torch.no_grad():
        again.net[0].weight.zero_()
    train(tmp_path, again, 3, enable_checkpointing=False, ckpt_path=tmp_path / "two.ckpt")
    assert (again.selection.visits == 3).all()
    assert saved["selection"]["settings"] == again.selection.state_dict()["settings"]
    assert not torch.equal(again.selection.weights, before)


class Scheduled(Model):
    def __init__(self, make: Any, **settings: Any) -> None:
        super().__init__()
        self.make, self.settings = make, settings

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), **self.settings}}


def halved(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize(
    ("settings", "rates"),
    [
        ({}, [0.4] * 5 + [0.2] * 5 + [0.1] * 5 + [0.05] * 5),  # five batches an epoch
        ({"frequency": 2}, [0.4] * 10 + [0.2] * 10),
        ({"interval": "step", "frequency": 3}, [0.4, 0.4, *[0.2] * 5, *[0.1] * 5, *[0.05] * 5, *[0.025] * 3]),
    ],
)
def test_schedules_step_as_in_lightning(tmp_path: Path, settings: dict[str, Any], rates: list[float]) -> None:
    ours = Scheduled(halved, **settings)
    train(tmp_path, ours, 4, enable_checkpointing=False)
    assert ours.rates == pytest.approx(rates)


def test_a_schedule_that_watches_a_metric_is_stepped_by_the_module(tmp_path: Path) -> None:
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(UsageError, match="Lightning does not pass on what ReduceLROnPlateau monitors"):
        train(tmp_path, Scheduled(plateau, monitor="source_loss"), 1, enable_checkpointing=False)

    class Own(Scheduled):
        def on_train_epoch_end(self) -> None:
            super().on_train_epoch_end()
            self.lr_schedulers().step(self.trainer.callback_metrics["source_loss"] * 0 + 1)  # never better

    own = Own(lambda optimizer: plateau(optimizer, patience=0, factor=0.5))
    train(tmp_path, own, 3, enable_checkpointing=False)
    assert own.rates == pytest.approx([0.4] * 10 + [0.2] * 5)
