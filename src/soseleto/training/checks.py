"""Whether model, losses and data fit together, and what kind of task they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data import Examples
from soseleto.data.batch import Batch
from soseleto.data.preprocess import Prepare
from soseleto.errors import DataError, SoseletoError, UsageError, first_line
from soseleto.models.evaluation import evaluation_mode
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.prediction.predictor import TaskKind
from soseleto.task.losses import Loss, NoisyLosses, TransferLosses, cross_entropy
from soseleto.training.data import Data, are_class_indices
from soseleto.training.out_of_memory import is_out_of_memory

TaskLosses = NoisyLosses | TransferLosses


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
    outputs = _outputs(call, prepare(examples.inputs[:1].to(device)), side)
    if loss is cross_entropy:  # a loss of the user's may read outputs and labels in another way
        if not isinstance(outputs, Tensor) or outputs.ndim < 2:
            found = f"shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
            raise UsageError(
                f"the model returns {found} for one {side} example, and cross_entropy needs a tensor (examples, "
                "classes): return the logits from forward, or give a loss of your own."
            )
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


def _outputs(call: nn.Module, inputs: Tensor, side: str) -> Any:
    try:
        return call(inputs)
    except Exception as error:
        if isinstance(error, SoseletoError) or is_out_of_memory(error):
            raise
        raise UsageError(
            f"the model fails in evaluation mode on one {side} example, given as {inputs.dtype} of shape "
            f"{tuple(inputs.shape)} ({type(error).__name__}: {first_line(error)}): give a model for these inputs."
        ) from error
