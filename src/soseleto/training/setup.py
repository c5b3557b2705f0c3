"""Before the first step: the options checked, the model assembled and tried on one example of each side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data import ExampleSet, TablePreparation, TokenViews, structure
from soseleto.data.augment import AnyViews
from soseleto.data.batches import Batch
from soseleto.data.feeding import Prepare, make_prepare
from soseleto.defaults import Settings, kind_of_inputs, name_of
from soseleto.engines.model_state import is_shard, reshard
from soseleto.errors import DataError, SoseletoError, UsageError, counted, first_line
from soseleto.models.trunk_and_heads import TrunkAndHeads, evaluation_mode, feature_width
from soseleto.parallel.fsdp import ShardedSharing, require_shardable, split_heads
from soseleto.parallel.micro_batches import Sharing, require_sharing
from soseleto.parallel.reducer import Single
from soseleto.prediction import TaskKind
from soseleto.run_folder.folder import require_storable
from soseleto.suspects.cross_fit import SHARPNESS
from soseleto.task.losses import Loss, NoisyLosses, Precision, TransferLosses, cross_entropy
from soseleto.training.data import Data, are_class_indices, classes_of, is_out_of_memory
from soseleto.training.options import Checkpoints, Compute, Heads, Inputs, Probes, require_size

TaskLosses = NoisyLosses | TransferLosses
FEW = 2  # examples that are tried before the training


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of ``fit`` that have no default by the data, in full; losses are (source, target)."""

    mode: str
    loss: tuple[Loss, Loss]
    inputs: Inputs
    heads: Heads
    probes: Probes
    compute: Compute
    checkpoints: Checkpoints
    seed: int

    def losses(self) -> TaskLosses:
        precision = Precision(self.compute.dtype)
        return NoisyLosses(self.loss[0], precision) if self.mode == "noisy" else TransferLosses(*self.loss, precision)

    def describe(self) -> dict[str, Any]:
        """The entries of ``config.json``."""
        return {
            **self.checkpoints.notes,
            "micro_batch_size": self.compute.micro_batch_size,
            "loss": name_of(self.loss[0]),
            "target_loss": name_of(self.loss[1]),
            "suspect_precision": self.probes.precision,
            "precision": None if self.compute.dtype is None else str(self.compute.dtype),
            "seed": self.seed,
        }


def assemble(model: nn.Module, mode: str, data: Data, prepare: Prepare, heads: Heads) -> nn.Module:
    """The whole model: as it is in noisy mode, trunk and heads in transfer mode."""
    if mode == "noisy":
        if heads.source is not None or heads.target is not None:
            raise UsageError("heads have no effect in noisy mode, where both sides share one: write mode='transfer'.")
        return model
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    example = prepare(structure.to_device(data.source.take(torch.tensor([0]))[0], device))
    width = feature_width(model, lambda trunk: structure.call(trunk, example))
    whole = TrunkAndHeads(
        model,
        heads.source or nn.Linear(width, classes_of(data.source, "source")),
        heads.target or nn.Linear(width, classes_of(data.target, "target")),
    )
    return whole.to(device=device, dtype=prepare.dtype)


@dataclass(frozen=True, kw_only=True)
class Network:
    """The whole model on its device, and what makes its inputs.

    kind: of the task, as the target shows it
    outputs: of the source's classifier; None if it is none
    """

    model: nn.Module
    prepare: Prepare
    losses: TaskLosses
    kind: TaskKind
    outputs: int | None

    @classmethod
    def of(
        cls,
        model: nn.Module,
        options: Options,
        data: Data,
        *,
        sharing: Sharing,
        device: torch.device,
        keeps: bool = False,
    ) -> Network:
        """Move the model to the device and add what it lacks; the same on every rank.

        keeps: the trained model is written to a run folder
        """
        model.to(device)
        standardize = options.inputs.standardize
        table = data.preparation
        if standardize is None and isinstance(table, TablePreparation) and table.codes:
            standardize = table  # codes of categories are no quantities
        prepare = make_prepare(data.own_source, model, standardize=standardize)
        whole, losses = assemble(model, options.mode, data, prepare, options.heads), options.losses()
        if isinstance(sharing, ShardedSharing):
            split_heads(whole, (options.heads.source, options.heads.target))
            require_shardable(whole, sharing.reducer.ranks)
        if keeps:
            require_storable(whole.state_dict())
        kind, outputs = check_fit(whole, losses, data, prepare, predicts=keeps or bool(options.probes.share))
        reshard(whole)
        sharing.reducer.broadcast(t for t in [*whole.parameters(), *whole.buffers()] if not is_shard(t))
        return cls(model=whole, prepare=prepare, losses=losses, kind=kind, outputs=outputs)


def first_weights(options: Options, planted: Data, sharing: Sharing) -> Tensor | None:
    """Squared beliefs of a first answer; None where it knows another source, as of one rank or with planted probes."""
    evidence = options.probes.evidence
    belief = None if evidence is None else evidence.judgement.belief
    if belief is None or not isinstance(sharing.reducer, Single) or len(belief) != len(planted.source):
        return None
    return torch.from_numpy(belief**SHARPNESS).float()


# Whether model, losses and data fit together


def check_fit(
    model: nn.Module, losses: TaskLosses, data: Data, prepare: Prepare, *, predicts: bool
) -> tuple[TaskKind, int | None]:
    """Pass some examples of each side through the model and its loss, in evaluation mode as after the training.

    Returns the kind of task that the target turns out to be, and the number of the source's outputs. Labels that are
    class indices and outputs (B, classes) make a classifier, whatever the loss.

    predicts: the trained model must answer with one row per example, for suspects or whoever loads it
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "no parameter of the model is trainable: write model.requires_grad_(True), or add a layer that is trained."
        )
    with evaluation_mode(model), torch.no_grad():
        of_source = _check_side(model, losses, "source", data.source, prepare, predicts)
        outputs = _check_side(model, losses, "target", data.target, prepare, predicts)
    sides = [data.source, data.target] if isinstance(losses, NoisyLosses) else [data.target]
    width = of_source.shape[1] if isinstance(of_source, Tensor) and of_source.ndim == 2 else None
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return "regression", width
    labels = [side.sample_labels() for side in sides]
    indices = all(are_class_indices(of_side) and int(of_side.max()) < outputs.shape[1] for of_side in labels)
    return "classification" if indices else "regression", width


def _check_side(
    model: nn.Module, losses: TaskLosses, side: str, examples: ExampleSet, prepare: Prepare, predicts: bool
) -> Any:
    """The model's outputs for the side's first examples."""
    loss: Loss
    if isinstance(losses, NoisyLosses):
        loss, call = losses.loss, model
    else:
        assert isinstance(model, TrunkAndHeads)
        head = getattr(model, f"{side}_head")
        loss, call = getattr(losses, f"{side}_loss"), TrunkAndHeads(model.trunk, head, head)
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    labels = examples.sample_labels()
    if loss is cross_entropy and labels.is_floating_point():
        raise DataError(
            f"{side} labels are of float type {labels.dtype}: pass class indices (labels.long()), "
            "or for regression a loss of your own, loss=soseleto.squared_error."
        )
    index = torch.arange(min(FEW, len(examples)))
    inputs, label = structure.to_device(examples.take(index), device)
    inputs = prepare(inputs)
    outputs = structure.scores_of(_outputs(call, inputs, side))
    if predicts:
        _check_rows(outputs, len(index))
    if loss is cross_entropy:  # a loss of the user's may read outputs and labels in another way
        _check_classes(outputs, labels, side, examples)
    getattr(losses, side)(model, Batch(index, inputs, label))
    return outputs


def _check_rows(outputs: Any, count: int) -> None:
    if not isinstance(outputs, Tensor):
        raise UsageError(
            f"the model returns a {type(outputs).__name__}, and prediction needs a tensor with one row per example: "
            "return that tensor from forward, such as outputs.logits or the first of a tuple."
        )
    if len(outputs) != count:
        raise UsageError(
            f"the model returns shape {tuple(outputs.shape)} for {counted(count, 'example')} in evaluation mode: "
            "return one row per example."
        )


def _check_classes(outputs: Any, labels: Tensor, side: str, examples: ExampleSet) -> None:
    if not isinstance(outputs, Tensor) or outputs.ndim < 2:
        form = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise UsageError(
            f"the model returns {form} for {side} examples, and cross_entropy needs a tensor (examples, "
            "classes): return the logits from forward, or give a loss of your own."
        )
    classes, highest = outputs.shape[1], int(labels.max())
    if highest >= classes:
        raise DataError(
            f"a {side} label is {highest}, but the model has {classes} outputs (labels 0 to {classes - 1}): "
            "give the model more outputs or fix the label."
        )
    named = classes if examples.classes is None else len(examples.classes)
    if named < classes:
        raise UsageError(
            f"the model has {classes} outputs, but the {side} names {counted(named, 'class', 'classes')}: give the "
            f"model {counted(named, 'output')}, or name all classes in classes=."
        )


def _outputs(model: nn.Module, inputs: structure.Inputs, side: str) -> Any:
    try:
        return structure.call(model, inputs)
    except Exception as error:
        if isinstance(error, SoseletoError) or is_out_of_memory(error):
            raise
        raise UsageError(
            f"the model fails in evaluation mode on {side} examples, given as {structure.describe(inputs)} "
            f"({type(error).__name__}: {first_line(error)}): give a model for these inputs."
        ) from error


# Whether method and data fit together


def check_settings(settings: Settings, data: Data, sharing: Sharing) -> None:
    """Raise for a method, batch or augmentation that this data, or this division of the work, cannot have."""
    method = settings.method
    for name, side in (("batch_size", "source"), ("target_batch_size", "target")):
        size, n = getattr(settings, name), len(getattr(data, side))
        require_size(name, size)
        if size > n:
            raise UsageError(
                f"{name} is {size}, but the {side} has only {counted(n, 'example')}: write {name}={n} or less."
            )
    if not sharing.nothing:
        require_sharing(method, method.name)
    for augment, examples in zip(settings.augment, (data.source, data.target), strict=True):
        if augment is None:
            continue
        if isinstance(augment, AnyViews):
            if kind_of_inputs(examples) != augment.made_of:
                raise UsageError(f"{augment.wanted}, got {_form(examples)}: give such, or leave these views out.")
            if isinstance(augment, TokenViews) and getattr(method, "mixup", False):
                raise UsageError(
                    f"the method {method.name!r} mixes inputs, and token ids cannot be mixed: write Strong(mixup=0.0)."
                )
        elif not isinstance(examples.take(torch.tensor([0]))[0], Tensor):
            raise UsageError("augment is for inputs that are one tensor: augment in the Dataset, and leave it out.")


def _form(examples: ExampleSet) -> str:
    inputs, _ = examples.take(torch.tensor([0]))
    return f"{inputs.dtype} of shape {tuple(inputs.shape[1:])}" if isinstance(inputs, Tensor) else type(inputs).__name__
