"""Before the first step: the settings resolved, the model assembled, the task put together and checked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from soseleto.data import TablePreparation, seed_for, structure
from soseleto.data.feeding import Prepare, Standardize, make_prepare
from soseleto.engines.shards import is_shard, reshard
from soseleto.errors import UsageError
from soseleto.models.trunk_and_heads import TrunkAndHeads, feature_width
from soseleto.parallel.fsdp import ShardedSharing, require_shardable, sharing_of, split_heads
from soseleto.parallel.micro_batches import Sharing, require_sharing
from soseleto.parallel.reducer import Single, owned
from soseleto.prediction.predictor import TaskKind
from soseleto.task.losses import Loss, NoisyLosses, Precision, TransferLosses
from soseleto.task.settings import to_data
from soseleto.task.task import Guard, MakeOptimizer, MakeSchedule, Method, Task
from soseleto.training.checks import TaskLosses, check_fit
from soseleto.training.data import BatchSizes, Data, class_count, class_shares, classes_of
from soseleto.training.optimizers import Adaptive, Momentum
from soseleto.training.options import Checkpoints, Compute, Heads, Probes, require_whole
from soseleto.training.settings import settings_of
from soseleto.training.views_for import Augments


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The training that ``fit`` was called for, with every shorthand resolved; pairs are (source, target)."""

    mode: str
    epochs: int
    optimizer: MakeOptimizer
    schedule: MakeSchedule | None
    loss: tuple[Loss, Loss | None]  # no target loss where it is the source's
    method: Method
    augment: Augments
    heads: Heads
    probes: Probes
    compute: Compute
    checkpoints: Checkpoints
    seed: int

    def __post_init__(self) -> None:
        require_whole("epochs", self.epochs)
        if self.epochs < 1:
            raise UsageError(f"epochs must be at least 1, got {self.epochs}.")

    @property
    def target_loss(self) -> Loss:
        source, target = self.loss
        return target or source

    def losses(self) -> TaskLosses:
        precision = Precision(self.compute.dtype)
        if self.mode == "noisy":
            return NoisyLosses(self.loss[0], precision)
        return TransferLosses(self.loss[0], self.target_loss, precision)

    def describe(self) -> dict[str, Any]:
        """The entries of ``config.json``."""
        known = self.optimizer if isinstance(self.optimizer, Momentum | Adaptive) else None
        return {
            **self.checkpoints.notes,
            "mode": self.mode,
            "method": self.method.name,
            "settings": settings_of(self.method),
            "epochs": self.epochs,
            "micro_batch_size": self.compute.micro_batch_size,
            "lr": None if known is None else known.lr,
            "weight_decay": None if known is None else known.weight_decay,
            "optimizer": _name_of(self.optimizer) if known is None else known.name,
            "schedule": _name_of(self.schedule),
            "loss": _name_of(self.loss[0]),
            "target_loss": _name_of(self.loss[1]),
            "suspect_precision": self.probes.precision,
            "guarantee": self.probes.guarantee,
            "non_finite": self.compute.non_finite,
            "precision": None if self.compute.dtype is None else str(self.compute.dtype),
            "augment_source": repr(self.augment[0]),
            "augment_target": repr(self.augment[1]),
            "seed": self.seed,
        }

    def describe_all(self) -> dict[str, Any]:
        """``describe`` with what may change when a run is resumed, but not from rank to rank."""
        more = {"probes": to_data(self.probes), "checkpoint seconds": self.checkpoints.seconds}
        more |= {"checkpoint steps": self.checkpoints.steps, "examples per pass": self.compute.micro_batch_size}
        return {**self.describe(), **more}


def _name_of(value: Any) -> str | None:
    return None if value is None else getattr(value, "__qualname__", None) or repr(value)


def make_sharing(model: nn.Module, settings: Settings) -> Sharing:
    """How the work of a step is divided over ranks and micro-batches."""
    compute, method = settings.compute, settings.method
    even = any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())
    sharing = sharing_of(model, Sharing(compute.reducer or Single(), compute.micro_batch_size, even))
    if not sharing.nothing:
        require_sharing(method, method.name)
    if isinstance(sharing, ShardedSharing):
        require_shardable(model, compute.non_finite, sharing.reducer.ranks)
    return sharing


def assemble(model: nn.Module, mode: str, data: Data, prepare: Prepare, heads: Heads) -> nn.Module:
    """The whole model: as it is in noisy mode, trunk and heads in transfer mode."""
    if mode == "noisy":
        if heads.source is not None or heads.target is not None:
            raise UsageError("heads have no effect in noisy mode, where both sides share one: write mode='transfer'.")
        return model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    one = prepare(structure.to_device(data.source.take(torch.tensor([0]))[0], device))
    width = feature_width(model, lambda trunk: structure.call(trunk, one))
    whole = TrunkAndHeads(
        model,
        heads.source or nn.Linear(width, classes_of(data.source, "source")),
        heads.target or nn.Linear(width, classes_of(data.target, "target")),
    )
    return whole.to(device=device, dtype=prepare.dtype)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything a training needs, checked: what ``fit`` hands to the loop."""

    settings: Settings
    data: Data
    sizes: BatchSizes
    sharing: Sharing
    device: torch.device
    model: nn.Module  # the whole one
    prepare: Prepare
    losses: TaskLosses
    kind: TaskKind
    outputs: int | None  # of the source's classifier

    @classmethod
    def of(
        cls,
        model: nn.Module,
        settings: Settings,
        data: Data,
        *,
        sizes: BatchSizes,
        sharing: Sharing,
        device: torch.device,
        standardize: Standardize | bool | None,
    ) -> Setup:
        """Move the model to the device and add what it lacks; the same on every rank."""
        model.to(device)
        if standardize is None and isinstance(data.preparation, TablePreparation) and data.preparation.codes:
            standardize = data.preparation  # codes of categories are no quantities
        prepare = make_prepare(data.own_source, model, standardize=standardize)
        whole, losses = assemble(model, settings.mode, data, prepare, settings.heads), settings.losses()
        if isinstance(sharing, ShardedSharing):
            split_heads(whole, (settings.heads.source, settings.heads.target))
            require_shardable(whole, settings.compute.non_finite, sharing.reducer.ranks)
        kind, outputs = check_fit(whole, losses, data, prepare)
        reshard(whole)
        sharing.reducer.broadcast(t for t in [*whole.parameters(), *whole.buffers()] if not is_shard(t))
        return cls(
            settings=settings,
            data=data,
            sizes=sizes,
            sharing=sharing,
            device=device,
            model=whole,
            prepare=prepare,
            losses=losses,
            kind=kind,
            outputs=outputs,
        )

    @property
    def in_one_process(self) -> bool:
        return isinstance(self.sharing.reducer, Single)

    def task(self, guard: Guard) -> Task:
        settings, n_source = self.settings, len(self.data.source)
        noisy = settings.mode == "noisy"
        classes = class_count(self.data.source, self.outputs)
        shares = None
        if noisy and self.sizes.balanced and classes is not None:
            shares = class_shares(self.data.target, classes).to(self.device)
        return Task(
            model=self.model,
            losses=self.losses,
            n_source=owned(n_source, self.sharing.reducer),
            steps=settings.epochs * math.ceil(n_source / self.sizes.source),
            shared=_trainable(self.model, "" if noisy else "trunk."),
            target_head=frozenset() if noisy else _trainable(self.model, "target_head."),
            make_optimizer=settings.optimizer,
            make_schedule=settings.schedule,
            device=self.device,
            classes=classes,
            target_shares=shares,
            guard=guard,
            sharing=self.sharing,
        )

    @property
    def _planted(self) -> dict[str, Any]:
        """Probes that were drawn from estimated mistakes, so that a resumed run has the same on any machine."""
        probes = self.data.probes
        return {} if probes is None or probes.share is None else {"planted": probes.describe()}

    def describe(self) -> dict[str, Any]:
        """The entries of ``config.json``."""
        return {
            **self.settings.describe(),
            **self.sizes.describe(),
            "task": self.kind,
            "ranks": self.sharing.reducer.ranks,
            "probes": len(self.data.probes or ()),
            **self._planted,
            "device": str(self.device) if self.in_one_process else self.device.type,
            **({} if self.data.columns is None else {"columns": list(self.data.columns)}),
        }


def _trainable(model: nn.Module, prefix: str) -> frozenset[str]:
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad and name.startswith(prefix))


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the global random state follows from the seed; afterwards it is as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_for(seed, "training"))
        yield
