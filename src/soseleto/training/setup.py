"""Before the first step: the settings, the data, the assembled model and the task, each checked against the others."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data import Augment, Examples, Preprocess, TargetCycle, as_examples, check_mode, read_pair, seed_for
from soseleto.data.batch import Batch
from soseleto.data.preprocess import Prepare, make_prepare
from soseleto.engines.shards import is_shard, rest
from soseleto.errors import DataError, UsageError
from soseleto.models.evaluation import evaluation_mode
from soseleto.models.trunk_and_heads import TrunkAndHeads, feature_width
from soseleto.parallel.fsdp import ShardedSharing, require_shardable, sharing_of, split_heads
from soseleto.parallel.micro_batches import Sharing, require_sharing
from soseleto.parallel.reducer import Single, owned
from soseleto.prediction.predictor import TaskKind
from soseleto.suspects.probes import PlantedProbes, plant
from soseleto.task.finite import Guard
from soseleto.task.losses import Loss, NoisyLosses, Precision, TransferLosses, cross_entropy
from soseleto.task.task import MakeOptimizer, MakeSchedule, Method, Task
from soseleto.training.defaults import TARGET_BATCH, batch_size_for
from soseleto.training.optimizers import Momentum
from soseleto.training.options import Balanced, Checkpoints, Compute, Heads, Probes
from soseleto.training.settings import settings_of

TaskLosses = NoisyLosses | TransferLosses


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The training that ``fit`` was called for, with every shorthand resolved; pairs are (source, target)."""

    mode: str
    epochs: int
    optimizer: MakeOptimizer
    schedule: MakeSchedule | None
    loss: tuple[Loss, Loss | None]  # no target loss where it is the source's
    method: Method
    augment: tuple[Augment | None, Augment | None]
    heads: Heads
    probes: Probes
    compute: Compute
    checkpoints: Checkpoints
    seed: int

    def __post_init__(self) -> None:
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
        known = self.optimizer if isinstance(self.optimizer, Momentum) else None
        return {
            **self.checkpoints.notes,
            "mode": self.mode,
            "method": self.method.name,
            "settings": settings_of(self.method),
            "epochs": self.epochs,
            "micro_batch_size": self.compute.micro_batch_size,
            "lr": None if known is None else known.lr,
            "weight_decay": None if known is None else known.weight_decay,
            "optimizer": _name_of(self.optimizer) if known is None else f"SGD, momentum {known.momentum}",
            "schedule": _name_of(self.schedule),
            "loss": _name_of(self.loss[0]),
            "target_loss": _name_of(self.loss[1]),
            "suspect_precision": self.probes.precision,
            "non_finite": self.compute.non_finite,
            "precision": None if self.compute.dtype is None else str(self.compute.dtype),
            "augment_source": repr(self.augment[0]),
            "augment_target": repr(self.augment[1]),
            "seed": self.seed,
        }


def _name_of(value: Any) -> str | None:
    return None if value is None else getattr(value, "__qualname__", None) or repr(value)


# Data


@dataclass(frozen=True)
class Data:
    """Source, target and test; the probes, if any, are at the end of the source and no longer in the target."""

    source: Examples
    target: Examples
    test: Examples | None
    probes: PlantedProbes | None = None

    @classmethod
    def read(cls, source: Any, target: Any, test: Any, mode: str) -> Data:
        """Files are read as a pair, with one list of classes and every check; arrays are taken as they are."""
        check_mode(mode)
        if any(isinstance(data, (str, Path)) for data in (source, target, test)):
            pair = read_pair(source, target, test, mode=mode)
            return cls(pair.source, pair.target, pair.test)
        return cls(
            as_examples(source, name="source"),
            as_examples(target, name="target"),
            None if test is None else as_examples(test, name="test"),
        )

    @property
    def own_source(self) -> Examples:
        """The source without the probes."""
        return self.source if self.probes is None else self.probes.without(self.source)

    def plant(self, probes: Probes, *, mode: str, seed: int) -> Data:
        """With a share of the target planted as probes; a share of 0 plants none."""
        if probes.share == 0:
            return self
        if mode != "noisy":
            raise UsageError("probes need source and target of the same classes: write mode='noisy', or probes=None.")
        planted = plant(self.source, self.target, probes.share, seed=seed, labels_before=probes.labels_before)
        return replace(self, source=planted.source, target=planted.target, probes=planted.probes)

    def require_shareable(self, sharing: Sharing) -> None:
        """Raise for data that the ranks or micro-batches of this training cannot work on."""
        if self.probes is not None and not sharing.nothing:
            raise UsageError("probes need one process and whole batches: write probes=None, or leave those out.")
        ranks = sharing.reducer.ranks
        if len(self.source) < ranks:
            raise UsageError(f"{ranks} ranks are too many for {len(self.source)} source examples: start fewer.")

    def fingerprints(self) -> dict[str, str | None]:
        """Of the three sets; computed before they are moved to a GPU, since every byte is read."""
        return {
            "source_fingerprint": self.own_source.fingerprint(),
            "target_fingerprint": self.target.fingerprint(),
            "test_fingerprint": None if self.test is None else self.test.fingerprint(),
        }

    def to(self, device: torch.device) -> Data:
        return replace(
            self,
            source=on_device(self.source, device),
            target=on_device(self.target, device),
            test=None if self.test is None else on_device(self.test, device),
        )


def on_device(examples: Examples, device: torch.device) -> Examples:
    """The examples on the model's device if they fit there beside it, otherwise where they are."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return examples.to(device) if examples.nbytes < free // 2 else examples
    return examples.to(device)


@dataclass(frozen=True)
class BatchSizes:
    """Examples per step of each side."""

    source: int
    target: int
    balanced: bool  # the target's batches, by class

    @classmethod
    def of(cls, data: Data, source: int | None, target: int | Balanced | None) -> BatchSizes:
        balanced = isinstance(target, Balanced)
        size = target.size if isinstance(target, Balanced) else target
        n = len(data.target)
        return cls(
            _size("batch_size", batch_size_for(len(data.own_source)) if source is None else source, data.source),
            _size("target_batch_size", min(TARGET_BATCH, n) if size is None else size, data.target),
            balanced,
        )

    def target_cycle(self, target: Examples, seed: int) -> TargetCycle:
        return TargetCycle(len(target), self.target, seed, target.labels.cpu() if self.balanced else None)

    def describe(self) -> dict[str, Any]:
        return {"batch_size": self.source, "target_batch_size": self.target, "balanced_target": self.balanced}


def _size(name: str, size: int, examples: Examples) -> int:
    side, n = "target" if name.startswith("target") else "source", len(examples)
    if size < 1:
        raise UsageError(f"{name} must be at least 1, got {size}.")
    if size > n:
        raise UsageError(f"{name} is {size}, but the {side} has only {n} examples: write {name}={n} or less.")
    return size


# The model and the task


def make_sharing(model: nn.Module, settings: Settings) -> Sharing:
    """How the work of a step is divided over ranks and micro-batches."""
    compute, method = settings.compute, settings.method
    sharing = sharing_of(model, Sharing(compute.reducer or Single(), compute.micro_batch_size))
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
    width = feature_width(model, prepare(data.source.inputs[:1].to(device)))
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

    @classmethod
    def of(
        cls,
        model: nn.Module,
        settings: Settings,
        data: Data,
        sizes: BatchSizes,
        sharing: Sharing,
        device: torch.device,
        standardize: bool | Preprocess | None,
    ) -> Setup:
        """Move the model to the device and add what it lacks; the same on every rank."""
        model.to(device)
        prepare = make_prepare(data.own_source, model, standardize=standardize)
        whole, losses = assemble(model, settings.mode, data, prepare, settings.heads), settings.losses()
        if isinstance(sharing, ShardedSharing):
            split_heads(whole, (settings.heads.source, settings.heads.target))
            require_shardable(whole, settings.compute.non_finite, sharing.reducer.ranks)
        kind = check_fit(whole, losses, data, prepare)
        rest(whole)
        sharing.reducer.alike(t for t in [*whole.parameters(), *whole.buffers()] if not is_shard(t))
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
        )

    @property
    def in_one_process(self) -> bool:
        return isinstance(self.sharing.reducer, Single)

    def task(self, guard: Guard) -> Task:
        settings, n_source = self.settings, len(self.data.source)
        noisy = settings.mode == "noisy"
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
            classes=class_count(self.data.source),
            guard=guard,
            sharing=self.sharing,
        )

    def describe(self) -> dict[str, Any]:
        """The entries of ``config.json``."""
        return {
            **self.settings.describe(),
            **self.sizes.describe(),
            "task": self.kind,
            "ranks": self.sharing.reducer.ranks,
            "probes": len(self.data.probes or ()),
            "device": str(self.device) if self.in_one_process else self.device.type,
        }


def _trainable(model: nn.Module, prefix: str) -> frozenset[str]:
    return frozenset(name for name, p in model.named_parameters() if p.requires_grad and name.startswith(prefix))


def classes_of(examples: Examples, side: str) -> int:
    """The number of classes of a side."""
    count = class_count(examples)
    if count is None:
        raise UsageError(f"the {side} labels are not class indices: pass a head, as in heads=Heads({side}=...).")
    return count


def class_count(examples: Examples) -> int | None:
    """The number of classes, or None where labels are not class indices."""
    if not are_class_indices(examples.labels):
        return None
    return int(examples.labels.max()) + 1 if examples.classes is None else len(examples.classes)


def are_class_indices(labels: Tensor) -> bool:
    """One integer per example."""
    return labels.ndim == 1 and not labels.is_floating_point()


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Inside, the global random state follows from the seed; afterwards it is as it was."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed_for(seed, "training"))
        yield


# Whether all of it fits together


def check_fit(model: nn.Module, losses: TaskLosses, data: Data, prepare: Prepare) -> TaskKind:
    """Pass one example of each side through the model and its loss; the kind of task that the target turns out to be.

    Labels that are class indices and outputs (B, classes) make a classifier, whatever the loss.
    """
    shape = data.source.inputs.shape[1:]
    for side, examples in (("target", data.target), ("test", data.test)):
        if examples is not None and examples.inputs.shape[1:] != shape:
            raise DataError(
                f"source inputs have shape {tuple(shape)} and {side} inputs {tuple(examples.inputs.shape[1:])}: "
                "bring them to one shape."
            )
    with evaluation_mode(model), torch.no_grad():
        _check_side(model, losses, "source", data.source, prepare)
        outputs = _check_side(model, losses, "target", data.target, prepare)
    sides = [data.source, data.target] if isinstance(losses, NoisyLosses) else [data.target]
    return kind_of(outputs, [examples.labels for examples in sides])


def kind_of(outputs: Any, labels: Sequence[Tensor]) -> TaskKind:
    """Classification where every label is the index of an output."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return "regression"
    indices = all(are_class_indices(each) and int(each.max()) < outputs.shape[1] for each in labels)
    return "classification" if indices else "regression"


def _check_side(model: nn.Module, losses: TaskLosses, side: str, examples: Examples, prepare: Prepare) -> Any:
    """The model's outputs for the side's first example."""
    loss: Loss
    if isinstance(losses, NoisyLosses):
        loss, call = losses.loss, model
    else:
        assert isinstance(model, TrunkAndHeads)
        loss, call = getattr(losses, f"{side}_loss"), nn.Sequential(model.trunk, getattr(model, f"{side}_head"))
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    if loss is cross_entropy and examples.labels.is_floating_point():
        raise DataError(
            f"{side} labels are of float type {examples.labels.dtype}: pass class indices (labels.long()), "
            "or for regression a loss of your own, loss=soseleto.squared_error."
        )
    outputs = call(prepare(examples.inputs[:1].to(device)))
    if loss is cross_entropy:  # a loss of the user's may read labels in another way
        classes, highest = outputs.shape[1], int(examples.labels.max())
        if highest >= classes:
            raise DataError(
                f"a {side} label is {highest}, but the model has {classes} outputs (labels 0 to {classes - 1}): "
                "give the model more outputs or fix the label."
            )
    one = examples.subset([0])
    batch = Batch(torch.zeros(1, dtype=torch.int64), prepare(one.inputs.to(device)), one.labels.to(device))
    getattr(losses, side)(model, batch)
    return outputs
