"""Source weights in a ``LightningModule``.

    class Model(SelectionModule):
        def per_example_loss(self, batch): ...   # (B,)
        def configure_optimizers(self): ...

    model = Model(n_source=len(doubtful))
    Trainer(...).fit(model, selection_loaders(doubtful, trusted, batch_size=64))
    model.selection.weights

Needs Lightning: ``pip install 'soseleto[lightning]'``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, Subset, default_collate

from soseleto.algorithm import Soseleto
from soseleto.errors import UsageError
from soseleto.integrations.batches import Numbered, WithIndex
from soseleto.parallel.reducer import Single
from soseleto.selection import Selection


class SelectionModule(LightningModule):  # type: ignore[misc]
    """A module that learns a weight for each source example while Lightning trains it, on one device or several.

    Define ``per_example_loss`` and ``configure_optimizers``; everything else is Lightning's: validation, schedules,
    clipping, accumulation, precision and checkpoints. Several devices have the whole model each, with
    ``strategy="ddp"``, or their part of it, by ``fully_shard`` in ``configure_model`` and ``ModelParallelStrategy``.

    Args:
        n_source: the number of source examples.
        classes: the number of classes, where ``per_example_loss`` is the cross-entropy of class labels: see
            ``Selection``, which gets the number of epochs too.
        method: ``Soseleto(...)`` with settings of its own.
    """

    def __init__(self, *, n_source: int, classes: int | None = None, method: Soseleto | None = None) -> None:
        super().__init__()
        self._n_source, self._classes, self._method = n_source, classes, method
        self._selection: Selection | None = None
        self._saved: dict[str, Any] | None = None

    def per_example_loss(self, batch: Any) -> Tensor:
        """One loss per example of the batch, (B,)."""
        raise UsageError(f"{type(self).__name__} has no per_example_loss: define it, with one loss per example.")

    @property
    def selection(self) -> Selection:
        """Weights, scores and visits; there is none before the first step, unless a checkpoint has been loaded."""
        if self._saved is not None:
            return self._made(None)
        if self._selection is None:
            raise UsageError("no weights yet: call Trainer.fit first.")
        return self._selection

    def on_fit_start(self) -> None:
        strategy, devices = self.trainer.strategy, self.trainer.world_size
        is_tensor_parallel = (
            isinstance(strategy, ModelParallelStrategy) and strategy.device_mesh["data_parallel"].size() != devices
        )
        if isinstance(strategy, FSDPStrategy | DeepSpeedStrategy) or is_tensor_parallel:
            raise UsageError(
                f"SelectionModule does not train with this {type(strategy).__name__}: write strategy='ddp', or "
                f"ModelParallelStrategy(data_parallel_size={devices}, tensor_parallel_size=1) and fully_shard in "
                "configure_model."
            )

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self._batch = batch
        return torch.ones((), device=self.device)  # ``backward`` evaluates the losses

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """The weighted source gradient in ``.grad``; the weights of the batch's examples move."""
        (index, source), target = self._batch["source"], self._batch["target"]
        optimizer = self.optimizers().optimizer
        if self._selection is None:
            self._selection, self._saved = self._made(optimizer), None
        self.selection.follow(optimizer)
        precision, share = self.trainer.precision_plugin, 1.0 / self.trainer.accumulate_grad_batches
        with precision.train_step_context():
            scaler = getattr(precision, "scaler", None)
            self._numbers = self.selection.backward(source, target, index=index, scale=share, scaler=scaler)

    def on_after_backward(self) -> None:
        self.log_dict(self._numbers, prog_bar=True, batch_size=len(self._batch["source"][0]))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self._selection is not None:
            checkpoint["selection"] = self._selection.state_dict()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._saved, self._selection = checkpoint.get("selection"), None

    def _made(self, optimizer: torch.optim.Optimizer | None) -> Selection:
        """With the state of the checkpoint, if there is one."""
        epochs = getattr(self._trainer, "max_epochs", None)
        made = Selection(
            self,
            n_source=self._n_source,
            loss=lambda model, batch: model.per_example_loss(batch),
            classes=self._classes,
            epochs=epochs if epochs and epochs > 0 else None,
            method=self._method,
            optimizer=optimizer,
            reducer=Single() if optimizer is None else None,  # what a checkpoint holds is read without the other ranks
        )
        if self._saved is not None:
            made.load_state_dict(self._saved)
        return made


def selection_loaders(
    source: Any,
    target: Any,
    *,
    batch_size: int,
    target_batch_size: int = 32,
    collate: Callable[[Any], Any] = default_collate,
    **settings: Any,
) -> CombinedLoader:
    """Batches ``{"source": (index, batch), "target": batch}`` for one pass over the source.

    On several ranks Lightning gives each its part; where their number does not divide the examples it repeats some.

    settings: more of DataLoader's, such as ``num_workers``
    """
    of_source: DataLoader[Any] = DataLoader(
        Numbered(source), batch_size=batch_size, shuffle=True, collate_fn=WithIndex(collate), **settings
    )
    each = min(target_batch_size, len(target))
    repeated = Subset(target, [i % len(target) for i in range(len(of_source) * each)])
    of_target: DataLoader[Any] = DataLoader(repeated, batch_size=each, shuffle=True, collate_fn=collate, **settings)
    return CombinedLoader({"source": of_source, "target": of_target}, mode="min_size")
