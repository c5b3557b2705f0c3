"""Inputs of any structure: tensors, alone or in dicts, tuples and lists, whose first dimension counts the examples.

Also the limits on what readers allocate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from soseleto.errors import DataError

Inputs = Any  # a tensor, or a structure of tensors
PIECE = 1 << 13  # rows that are read or checked at a time
MAX_BYTES = 1 << 36  # 64 GiB: the largest array a reader allocates


def change(function: Callable[[Tensor], Tensor], structure: Any) -> Any:
    """The structure with ``function`` applied to every tensor."""
    if isinstance(structure, Tensor):  # nearly always
        return function(structure)
    return pytree.tree_map_only(Tensor, function, structure)


def tensors(structure: Any) -> list[Tensor]:
    """Every tensor of the structure."""
    if isinstance(structure, Tensor):
        return [structure]
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, Tensor)]


def length(structure: Any) -> int:
    """The number of examples: the length of the first tensor; 0 without one."""
    return next((len(tensor) for tensor in tensors(structure) if tensor.ndim), 0)


def to_device(structure: Any, device: torch.device | str) -> Any:
    """On another device; copies from pinned memory to a GPU are not waited for."""
    wait_free = torch.device(device).type != "cpu"
    if not wait_free and all(tensor.device.type == "cpu" for tensor in tensors(structure)):
        return structure
    return change(lambda tensor: tensor.to(device, non_blocking=wait_free), structure)


def split(structure: Any, size: int | list[int]) -> list[Any]:
    """Parts of at most ``size`` examples, or of the given sizes."""
    leaves, form = pytree.tree_flatten(structure)
    parts = zip(*(leaf.split(size) for leaf in leaves), strict=True)
    return [pytree.tree_unflatten(list(part), form) for part in parts]


def concatenate(structures: Sequence[Any]) -> Any:
    """One structure with the examples of all, which must be of one form."""
    return pytree.tree_map(lambda *parts: torch.cat(parts), *structures)


def of_one_form(first: Any, other: Any) -> bool:
    """Whether two structures can be concatenated: all but the number of examples is the same."""
    leaves, form = pytree.tree_flatten(first)
    others, other_form = pytree.tree_flatten(other)
    pairs = zip(leaves, others, strict=False)
    return form == other_form and all(a.shape[1:] == b.shape[1:] and a.dtype == b.dtype for a, b in pairs)


def shape_of(structure: Any) -> Any:
    """The shape of one example: a list of sizes, or for a structure ``{path: sizes}``."""
    if isinstance(structure, Tensor):
        return list(structure.shape[1:])
    leaves, _ = pytree.tree_flatten_with_path(structure)
    return {pytree.keystr(path): list(leaf.shape[1:]) for path, leaf in leaves}


def describe(structure: Any) -> str:
    """Types and shapes, for messages."""
    if isinstance(structure, Tensor):
        return f"{structure.dtype} of shape {tuple(structure.shape)}"
    leaves, _ = pytree.tree_flatten_with_path(structure)
    parts = (f"{pytree.keystr(path)} {describe(leaf)}" for path, leaf in leaves if isinstance(leaf, Tensor))
    return f"a {type(structure).__name__} ({', '.join(parts)})"


def plain(structure: Any) -> Any:
    """The structure with every mapping, such as a tokenizer's BatchEncoding, as a dict."""
    if isinstance(structure, Mapping):
        return {key: plain(value) for key, value in structure.items()}
    if isinstance(structure, list) or type(structure) is tuple:
        return type(structure)(plain(value) for value in structure)
    return structure


def call(model: Any, inputs: Any) -> Any:
    """The model's outputs: a mapping is passed as keyword arguments, a tuple or list as positional ones."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple | list) else model(inputs)


def scores_of(outputs: Any) -> Any:
    """The tensor of outputs, with one row per example: ``outputs.logits`` of a Hugging Face ModelOutput.

    It leaves an object in float32 or better, since autocast's own casts do not reach inside.
    """
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        return outputs
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def label_margin(scores: Tensor, labels: Tensor) -> Tensor:
    """The score (logit) of each example's label minus the largest score of another class, (B,) from (B, classes).

    >>> label_margin(torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]), torch.tensor([0, 1]))
    tensor([ 1., -2.])
    """
    label = labels[:, None]
    others = scores.scatter(1, label, float("-inf")).amax(1)
    return scores.gather(1, label).squeeze(1) - others


def check_size(unpacked: int, *, what: str) -> None:
    """Refuse an array above ``MAX_BYTES``."""
    if unpacked > MAX_BYTES:
        raise DataError(f"{what} holds {unpacked} bytes, more than the limit of {MAX_BYTES}: split the file.")
