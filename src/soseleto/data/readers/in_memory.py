"""Data already in memory: pairs of arrays or tensors, and map-style Datasets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data.readers.labels import Names, names_of
from soseleto.data.readers.read_once import ReadOnce, require_constant
from soseleto.errors import DataError

_CHANNELS = (1, 3, 4)


def inputs_of(values: Any, *, name: str) -> Tensor:
    """Inputs as a tensor: uint8 is kept, floats become float32, other integers int64.

    NumPy images (N, H, W, C) become (N, C, H, W), and uint8 (N, H, W) becomes (N, 1, H, W); tensors keep their shape.
    """
    if isinstance(values, Tensor):
        return _narrow(values, name=name)
    array = np.asarray(values)
    if array.dtype.kind not in "buif":
        raise DataError(f"{name} inputs are of type {array.dtype}: give numbers.")
    if array.ndim == 4 and array.shape[3] in _CHANNELS and array.shape[1] not in _CHANNELS:
        array = array.transpose(0, 3, 1, 2)
    elif array.ndim == 3 and array.dtype == np.uint8:
        array = array[:, None]
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind == "u" and array.dtype != np.uint8:
        array = array.astype(np.int64)
    return _narrow(torch.from_numpy(_writable(array)), name=name)


def labels_of(values: Any, *, name: str) -> Tensor | Names:
    """Labels in memory: integers are class indices, floats are regression targets, text is class names."""
    if isinstance(values, Tensor):
        labels = values.detach()
    else:
        array = np.asarray(values)
        if array.dtype.kind in "OUS":
            return names_of(array.reshape(-1).tolist())
        if array.dtype.kind not in "buif":
            raise DataError(f"{name} labels are of type {array.dtype}: give class indices, names or numbers.")
        labels = torch.from_numpy(_writable(array.astype(np.int64) if array.dtype.kind in "bui" else array))
    if labels.dtype.is_floating_point:
        return labels.to(torch.float32)
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    return labels.to(torch.int64)


def stack_dataset(dataset: Any, *, name: str) -> tuple[Any, Any]:
    """Stacked inputs and labels of a map-style Dataset of (input, label), read once; they must not be random."""
    checked = not isinstance(dataset, ReadOnce)
    dataset = dataset if checked else dataset.dataset
    tensors = getattr(dataset, "tensors", None)
    if isinstance(tensors, tuple) and len(tensors) == 2:  # a TensorDataset: nothing to stack
        return tensors
    if len(dataset) == 0:
        raise DataError(f"the {name} data set is empty: give it at least one example.")
    inputs, labels = [], []
    for at in range(len(dataset)):
        item = dataset[at]
        if not isinstance(item, Sequence) or isinstance(item, str) or len(item) != 2:
            raise DataError(f"item {at} of the {name} data set is a {type(item).__name__}: return (input, label).")
        inputs.append(_item(item[0]))
        labels.append(item[1])
    _check_shapes(inputs, name=name)
    if checked:
        require_constant(lambda at: (inputs[at], labels[at]), lambda at: _pair(dataset[at]), len(dataset), name=name)
    images = inputs[0].dtype == torch.uint8 and inputs[0].ndim == 3 and not isinstance(dataset[0][0], Tensor)
    stacked = torch.stack(inputs)
    return (stacked.numpy() if images else stacked), _stack_labels(labels)


def _pair(item: Any) -> tuple[Tensor, Any]:
    return _item(item[0]), item[1]


def _item(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)  # arrays, numbers and PIL images
    return torch.from_numpy(_writable(array))


def _stack_labels(labels: list[Any]) -> Any:
    if isinstance(labels[0], Tensor):
        return torch.stack(labels)
    return np.asarray(labels)


def _check_shapes(inputs: list[Tensor], *, name: str) -> None:
    for at, value in enumerate(inputs):
        if value.shape != inputs[0].shape:
            raise DataError(
                f"input {at} of the {name} data set has shape {tuple(value.shape)} but input 0 has "
                f"{tuple(inputs[0].shape)}: resize or pad them to one shape in the Dataset."
            )


def _narrow(values: Tensor, *, name: str) -> Tensor:
    values = values.detach()
    if values.ndim == 0:
        raise DataError(f"{name} inputs are a single number: the first dimension must count the examples.")
    if values.dtype.is_complex:
        raise DataError(f"{name} inputs are complex: give real numbers.")
    if values.ndim == 1:
        values = values[:, None]  # one column
    if values.dtype.is_floating_point:
        return values.to(torch.float32)
    return values if values.dtype == torch.uint8 else values.to(torch.int64)


def _writable(array: Any) -> Any:
    """A copy if needed: torch warns about read-only arrays and refuses negative strides."""
    fine = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return array if fine else array.copy()
