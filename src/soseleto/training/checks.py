"""Whether model, losses and data fit together, and what kind of task they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data import Examples, ExampleSet, structure
from soseleto.data.batches import Batch
from soseleto.data.feeding import Prepare
from soseleto.data.structure import Inputs
from soseleto.errors import DataError, SoseletoError, UsageError, counted, first_line
from soseleto.models.trunk_and_heads import TrunkAndHeads, evaluation_mode
from soseleto.prediction.predictor import TaskKind
from soseleto.task.losses import Loss, NoisyLosses, TransferLosses, cross_entropy
from soseleto.training.data import Data, are_class_indices
from soseleto.training.out_of_memory import is_out_of_memory

TaskLosses = NoisyLosses | TransferLosses


def check_fit(model: nn.Module, losses: TaskLosses, data: Data, prepare: Prepare) -> tuple[TaskKind, int | None]:
    """Pass one example of each side through the model and its loss.

    Returns the kind of task that the target turns out to be, and the number of the source's outputs.

    Labels that are class indices and outputs (B, classes) make a classifier, whatever the loss.
    """
    if not any(p.requires_grad for p in model.parameters()):
        raise UsageError(
            "no parameter of the model is trainable: write model.requires_grad_(True), or add a layer that is trained."
        )
    if isinstance(data.source, Examples):
        _check_shapes(data.source, data)
    with evaluation_mode(model), torch.no_grad():
        of_source = structure.scores_of(_check_side(model, losses, "source", data.source, prepare))
        outputs = _check_side(model, losses, "target", data.target, prepare)
    sides = [data.source, data.target] if isinstance(losses, NoisyLosses) else [data.target]
    width = of_source.shape[1] if isinstance(of_source, Tensor) and of_source.ndim == 2 else None
    return kind_of(structure.scores_of(outputs), [examples.sample_labels() for examples in sides]), width


def _check_shapes(source: Examples, data: Data) -> None:
    """Of sets in memory; batches of others may be padded, each to a shape of its own."""
    shape = structure.shape_of(source.inputs)
    for side, examples in (("target", data.target), ("test", data.test)):
        if isinstance(examples, Examples) and (found := structure.shape_of(examples.inputs)) != shape:
            raise DataError(
                f"source inputs have shape {_shown(shape)} and {side} inputs {_shown(found)}: bring them to one shape."
            )


def _shown(shape: Any) -> Any:
    return tuple(shape) if isinstance(shape, list) else shape


def kind_of(outputs: Any, labels: Sequence[Tensor]) -> TaskKind:
    """Classification where every label is the index of an output."""
    if not isinstance(outputs, Tensor) or outputs.ndim != 2:
        return "regression"
    indices = all(are_class_indices(each) and int(each.max()) < outputs.shape[1] for each in labels)
    return "classification" if indices else "regression"


def _check_side(model: nn.Module, losses: TaskLosses, side: str, examples: ExampleSet, prepare: Prepare) -> Any:
    """The model's outputs for the side's first example."""
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
    inputs, label = structure.to_device(examples.take(torch.tensor([0])), device)
    inputs = prepare(inputs)
    raw = _outputs(call, inputs, side)
    outputs = structure.scores_of(raw)
    if loss is cross_entropy:  # a loss of the user's may read outputs and labels in another way
        if not isinstance(outputs, Tensor) or outputs.ndim < 2:
            found = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise UsageError(
                f"the model returns {found} for one {side} example, and cross_entropy needs a tensor (examples, "
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
    getattr(losses, side)(model, Batch(torch.zeros(1, dtype=torch.int64), inputs, label))
    return raw


def _outputs(model: nn.Module, inputs: Inputs, side: str) -> Any:
    try:
        return structure.call(model, inputs)
    except Exception as error:
        if isinstance(error, SoseletoError) or is_out_of_memory(error):
            raise
        raise UsageError(
            f"the model fails in evaluation mode on one {side} example, given as {structure.describe(inputs)} "
            f"({type(error).__name__}: {first_line(error)}): give a model for these inputs."
        ) from error
