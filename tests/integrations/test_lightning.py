"""SelectionModule with the real Lightning: weights, schedules, clipping, checkpoints."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, default_collate

lightning = pytest.importorskip("lightning")

from lightning.pytorch.utilities import CombinedLoader  # noqa: E402

import soseleto  # noqa: E402
from ranks import together  # noqa: E402
from soseleto.defaults import resolve  # noqa: E402
from soseleto.errors import UsageError  # noqa: E402
from soseleto.integrations.batches import Numbered, WithIndex  # noqa: E402
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


OFF = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
QUIET: dict[str, Any] = {"accelerator": "cpu", **dict.fromkeys(OFF, False)}


def train(folder: Path, model: Model, epochs: int, ckpt_path: Path | None = None, **kwargs: Any) -> Any:
    source, target = data()
    torch.manual_seed(3)
    trainer = lightning.Trainer(default_root_dir=folder, max_epochs=epochs, **QUIET, **kwargs)
    loaders = selection_loaders(source, target, batch_size=24, target_batch_size=16)
    trainer.fit(model, loaders, DataLoader(target, 60), ckpt_path=ckpt_path)
    return trainer


def test_weights_find_the_wrong_labels(tmp_path: Path) -> None:
    model = Model()
    with pytest.raises(UsageError, match=r"call Trainer\.fit first"):
        _ = model.selection
    trainer = train(tmp_path, model, 12, gradient_clip_val=1.0)
    assert float(trainer.callback_metrics["accuracy"]) > 0.85
    assert {"source_loss", "target_loss"} <= set(trainer.callback_metrics)
    assert (model.selection.visits == 12).all()
    weights = model.selection.weights
    assert weights[:WRONG].mean() < weights[WRONG:].mean() - 0.2
    assert model.rates == pytest.approx([0.3 * (1 - step / 200) for step in range(1, 61)])


def test_a_grad_scaler_changes_no_gradient(tmp_path: Path) -> None:
    class Watched(Model):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in self.parameters()])))

    norms: list[float] = []
    for scaler in (None, torch.amp.GradScaler("cpu", init_scale=2.0**16)):
        precision = lightning.pytorch.plugins.MixedPrecision("bf16-mixed", "cpu")
        precision.scaler = scaler
        train(tmp_path, Watched(), 1, plugins=[precision], gradient_clip_val=0.01)
    assert norms[5:] == pytest.approx(norms[:5], rel=1e-3)


class Split(Model):
    """As ModelParallelStrategy wants it: each rank has its part of the network."""

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for part in (self.net[0], self.net):
            fully_shard(part, mesh=mesh)


class Fixed(DataLoader[Any]):
    """The rows of each batch, of which a rank has its share."""

    def __init__(self, dataset: Any, batches: Tensor, rank: int, ranks: int, **settings: Any) -> None:
        super().__init__(dataset, batch_sampler=batches[:, rank::ranks].tolist(), **settings)


def loaders(rank: int = 0, ranks: int = 1) -> CombinedLoader:
    """Five batches of 24 source and 16 target examples."""
    source, target = data()
    order = torch.randperm(120, generator=torch.Generator().manual_seed(5)).view(5, 24)
    of_target = torch.arange(80).view(5, 16) % 60
    numbered = Fixed(Numbered(source), order, rank, ranks, collate_fn=WithIndex(default_collate))
    return CombinedLoader({"source": numbered, "target": Fixed(target, of_target, rank, ranks)}, mode="min_size")


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.02, "num_sanity_val_steps": 0}
METHOD = soseleto.Soseleto(gradients=soseleto.pieces.target_share(0.3))


def fitted(model: Model, given: CombinedLoader, folder: Path, epochs: int = 2, **more: Any) -> Any:
    resume = more.pop("ckpt_path", None)
    trainer = lightning.Trainer(default_root_dir=folder, max_epochs=epochs, **QUIET, **ACCUMULATED, **more)
    trainer.fit(model, given, ckpt_path=resume)
    return trainer


def found_in(model: Model) -> list[Any]:
    parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found = [model.selection.weights, model.selection.scores, *parameters]
    return [value.detach().numpy() for value in found]


def on_ranks(reducer: Any, folder: str, how: str) -> Any:
    """As torchrun starts them: two epochs, and one that is resumed for a second."""
    os.environ["LOCAL_RANK"] = str(reducer.rank)
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.pytorch.strategies import ModelParallelStrategy

    def train(epochs: int, parts: int = 2, **more: Any) -> tuple[Model, Any]:
        strategy: Any = "ddp"
        if how != "ddp":
            strategy = ModelParallelStrategy(parts, 2 // parts, save_distributed_checkpoint=how == "folder")
        several = {"devices": 2, "strategy": strategy, "plugins": [TorchElasticEnvironment()]}
        model = (Model if how == "ddp" else Split)(method=METHOD)
        given = loaders(reducer.rank, reducer.ranks)
        trainer = fitted(model, given, Path(folder), epochs, use_distributed_sampler=False, **several, **more)
        return model, trainer

    whole, _ = train(2)
    assert all(hasattr(p, "full_tensor") == (how != "ddp") for p in whole.parameters())
    _, first = train(1)
    first.save_checkpoint(folder + "/one.ckpt")
    again, _ = train(2, ckpt_path=folder + "/one.ckpt")
    if how != "ddp":
        with pytest.raises(UsageError, match=r"write strategy='ddp', or ModelParallelStrategy\(data_parallel_size=2, "):
            train(1, parts=1)
    return found_in(whole), found_in(again)


def by_hand() -> Model:
    """The same in a loop without Lightning."""
    model = Model(method=METHOD)
    made = model.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    selection = soseleto.Selection(
        model, n_source=120, loss=lambda m, b: m.per_example_loss(b), method=METHOD, optimizer=optimizer
    )
    for _ in range(2):
        for number, (both, *_) in enumerate(loaders(), start=1):
            index, source = both["source"]
            selection.backward(source, both["target"], index=index, scale=0.5)
            if number % 2 == 0 or number == 5:
                nn.utils.clip_grad_norm_(model.parameters(), 0.02)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    model._selection = selection
    return model


def test_accumulated_and_clipped_gradients_are_those_of_a_loop(tmp_path: Path) -> None:
    model, right = Model(method=METHOD), found_in(by_hand())
    fitted(model, loaders(), tmp_path)
    for mine, its in zip(found_in(model), right, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)


@pytest.mark.skipif(os.name != "posix", reason="processes are started as POSIX does")
@pytest.mark.parametrize("how", ["ddp", *(pytest.param(how, marks=pytest.mark.long) for how in ("folder", "file"))])
def test_two_ranks_train_and_resume_as_one_process(tmp_path: Path, how: str) -> None:
    """By ddp, and by fully_shard with a checkpoint in a folder of parts or in one file."""
    alone = Model(method=METHOD)
    fitted(alone, loaders(), tmp_path)
    right, before = found_in(alone), Model().net[0].weight
    assert not torch.allclose(alone.net[0].weight, before, atol=1e-2)
    for answer in together(2, on_ranks, str(tmp_path), how):
        assert isinstance(answer[0], list), answer
        for found in answer:
            for mine, its in zip(found, right, strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_a_resumed_training_goes_on_with_its_weights(tmp_path: Path) -> None:
    whole = Model()
    trainer = train(tmp_path, whole, 2)
    trainer.save_checkpoint(tmp_path / "two.ckpt")
    before = whole.selection.weights
    read = Model.load_from_checkpoint(tmp_path / "two.ckpt")
    assert torch.equal(read.selection.weights, before)
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    again = Model()
    with torch.no_grad():
        again.net[0].weight.zero_()
    train(tmp_path, again, 3, ckpt_path=tmp_path / "two.ckpt")
    assert (again.selection.visits == 3).all()
    assert saved["selection"]["settings"] == again.selection.state_dict()["settings"]
    assert not torch.equal(again.selection.weights, before)


def test_a_schedule_that_watches_a_metric_gets_it(tmp_path: Path) -> None:
    class Watching(Model):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.4)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(
                optimizer, patience=0, threshold=10.0, threshold_mode="abs"
            )
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "source_loss"}}

    watching = Watching(classes=2)
    train(tmp_path, watching, 3)
    assert watching.rates[0] == 0.4
    assert watching.rates[-1] < 0.4  # no loss is better by 10
    expected = resolve(Watching(classes=2), classes=True, ends_in_linear=True, n_source=120, epochs=3)
    assert watching.selection.settings.method == expected.method
