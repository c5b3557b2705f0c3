"""Data already in memory: pairs of arrays or tensors, and map-style Datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset

from soseleto.data import structure
from soseleto.data.preprocess import single_precision
from soseleto.data.readers.labels import Names, names_of
from soseleto.data.readers.read_once import ReadOnce, require_constant
from soseleto.data.structure import Inputs
from soseleto.errors import DataError

_CHANNELS = (1, 3, 4)
LABELS = ("labels", "label")  # of items that are mappings


def inputs_of(values: Any, *, name: str) -> Inputs:
    """Inputs as a tensor: uint8 is kept, floats become float32, other integers int64.

    Numbers such as Unix times, whose differences float32 would round away, stay float64.
    NumPy images (N, H, W, C) become (N, C, H, W), and uint8 (N, H, W) becomes (N, 1, H, W); tensors keep their shape.
    A mapping or a tuple of arrays keeps its structure.
    """
    if isinstance(values, Tensor):
        return _narrow(values, name=name)
    if isinstance(values, Mapping) or (isinstance(values, tuple) and values and all(map(_is_array, values))):
        return pytree.tree_map(lambda part: _part_of(part, name=name), structure.plain(values))
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


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | Mapping)


def _part_of(values: Any, *, name: str) -> Tensor:
    """One tensor of a structure; masks stay bool, and no dimension is added."""
    tensor = values.detach() if isinstance(values, Tensor) else torch.from_numpy(_writable(np.asarray(values)))
    if tensor.ndim == 0 or tensor.dtype.is_complex:
        raise DataError(f"{name} inputs hold a {structure.describe(tensor)}: give real numbers, one row per example.")
    return narrowed(tensor)


def narrowed(tensor: Tensor) -> Tensor:
    """float32, uint8, bool or int64."""
    if tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor if tensor.dtype in (torch.uint8, torch.bool) else tensor.to(torch.int64)


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


def is_tensors(dataset: Any) -> bool:
    """Whether the items are the rows of ``dataset.tensors``: a TensorDataset, and no subclass that reads otherwise."""
    kind: Any = type(dataset)
    return isinstance(dataset, TensorDataset) and all(
        getattr(kind, name) is getattr(TensorDataset, name) for name in ("__getitem__", "__len__")
    )


def stack_dataset(dataset: Any, *, name: str) -> tuple[Any, Any]:
    """Stacked inputs and labels of a map-style Dataset of (input, label), read once; they must not be random."""
    checked = not isinstance(dataset, ReadOnce)
    dataset = dataset if checked else dataset.dataset
    if is_tensors(dataset) and len(dataset.tensors) == 2:  # nothing to stack
        inputs, labels = dataset.tensors
        return inputs, labels
    if len(dataset) == 0:
        raise DataError(f"the {name} data set is empty: give it at least one example.")
    inputs, labels = [], []
    for at in range(len(dataset)):
        one, label = _pair(dataset[at], at, name=name)
        inputs.append(one)
        labels.append(label)
    _check_shapes(inputs, name=name)
    if checked:
        again = lambda at: _pair(dataset[at], at, name=name)  # noqa: E731
        require_constant(lambda at: (inputs[at], labels[at]), again, len(dataset), name=name)
    first, raw = inputs[0], parted(dataset[0], name=name)[0]
    if not isinstance(first, Tensor):
        return _stack(inputs), _stack_labels(labels)
    images = first.dtype == torch.uint8 and first.ndim in (2, 3) and not isinstance(raw, Tensor)
    stacked = torch.stack(inputs)
    return (stacked.numpy() if images else stacked), _stack_labels(labels)


def _pair(item: Any, at: int, *, name: str) -> tuple[Inputs, Any]:
    try:
        inputs, label = parted(item, name=name)
    except DataError as error:
        text = f"item {at} of the {name} data set is a {type(item).__name__}: return (input, label)."
        raise DataError(text) from error
    if isinstance(inputs, Mapping | tuple):
        return pytree.tree_map(_item, structure.plain(inputs)), label
    return _item(inputs), label


def _stack(inputs: list[Inputs]) -> Inputs:
    columns = zip(*map(pytree.tree_leaves, inputs), strict=True)
    return pytree.tree_unflatten([torch.stack(column) for column in columns], pytree.tree_structure(inputs[0]))


def parted(batch: Any, *, name: str) -> tuple[Any, Any]:
    """Inputs and labels of an item or a batch: a pair, or a mapping with an entry ``labels`` or ``label``."""
    if isinstance(batch, Mapping):
        key = next((key for key in LABELS if key in batch), None)
        if key is not None:
            return {k: value for k, value in batch.items() if k != key}, batch[key]
        raise DataError(f"the items of the {name} data set are mappings without 'labels': add them to each item.")
    if isinstance(batch, Sequence) and not isinstance(batch, str) and len(batch) == 2:
        return batch[0], batch[1]
    raise DataError(f"the {name} data set holds items of type {type(batch).__name__}: return (input, label).")


def _item(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    array = np.asarray(value)  # arrays, numbers and PIL images
    return torch.from_numpy(_writable(array))


def _stack_labels(labels: list[Any]) -> Any:
    if isinstance(labels[0], Tensor):
        return torch.stack(labels)
    return np.asarray(labels)


def _check_shapes(inputs: list[Inputs], *, name: str) -> None:
    forms = [structure.change(lambda tensor: tensor[None], one) for one in inputs]
    for at, form in enumerate(forms):
        if structure.shape_of(form) != structure.shape_of(forms[0]):
            raise DataError(
                f"input {at} of the {name} data set has shape {_shape(form)} but input 0 has {_shape(forms[0])}: "
                "resize or pad them to one shape in the Dataset."
            )


def _shape(form: Inputs) -> Any:
    shape = structure.shape_of(form)
    return tuple(shape) if isinstance(shape, list) else shape


def _narrow(values: Tensor, *, name: str) -> Tensor:
    values = values.detach()
    if values.ndim == 0:
        raise DataError(f"{name} inputs are a single number: the first dimension must count the examples.")
    if values.dtype.is_complex:
        raise DataError(f"{name} inputs are complex: give real numbers.")
    if values.ndim == 1:
        values = values[:, None]  # one column
    if values.dtype.is_floating_point:
        return single_precision(values)
    return values if values.dtype == torch.uint8 else values.to(torch.int64)


def _writable(array: Any) -> Any:
    """A copy if needed: torch warns about read-only arrays and refuses negative strides."""
    fine = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return array if fine else array.copy()
