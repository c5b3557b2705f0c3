"""A data set: inputs, labels, and stable ids of the examples."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from soseleto.data import structure
from soseleto.data.batches import source_batches
from soseleto.data.structure import Inputs
from soseleto.errors import DataError

_CHUNK = 1 << 26  # bytes hashed at a time, so that data on a GPU is not copied to the host all at once


@dataclass(frozen=True, eq=False)
class Examples:
    """A data set as tensors; ``take`` gathers a batch.

    inputs: (N, ...): uint8 images (N, C, H, W), float features (N, D), or integer tokens (N, L); or a dict, tuple or
        list of such tensors, which the model takes as keyword or positional arguments
    labels: (N,) int64 class indices, int64 targets (N, ...) such as tokens, or float targets (N, ...) for regression
    ids: one unique name per example, the same in every run; None means "0", "1", ...
    classes: class names, by class index
    truth: (N,) the correct labels; -1, or NaN of numbers, where they are not known
    paths: the file each example was read from
    groups: (N,) numbers, the same in source and target; examples with one number, such as those of one patient, stay on
        one side of every split. -1 is a group of its own; by default copies of one example are a group.
    """

    inputs: Inputs
    labels: Tensor
    ids: tuple[str, ...] | None = None
    classes: tuple[str, ...] | None = None
    truth: Tensor | None = None
    paths: tuple[str, ...] | None = None
    groups: Tensor | None = None
    reads_ahead: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check_lengths(self)
        _check_labels(self)

    def __len__(self) -> int:
        return structure.length(self.inputs)

    @property
    def device(self) -> torch.device:
        return self.labels.device

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in structure.tensors((self.inputs, self.labels)))

    def id_of(self, index: int) -> str:
        """The id of one example, by its index in the data set."""
        at = range(len(self))[index]  # negative and out-of-range indices behave as in a list
        return str(at) if self.ids is None else self.ids[at]

    def take(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """Inputs and labels at these indices, on the data's device; one gather per tensor."""
        index = index.to(self.device, non_blocking=True)
        inputs = structure.change(lambda tensor: tensor.index_select(0, index), self.inputs)
        return inputs, self.labels.index_select(0, index)

    def read(
        self, batches: Iterable[Tensor], *, seed: int = 0, purpose: str = "read"
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels of each batch of indices; nothing is random here."""
        return map(self.take, batches)

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        """The index batches of an epoch; together they hold every example exactly once."""
        return source_batches(len(self), size, seed=seed, epoch=epoch, device=device)

    def pieces(self, size: int) -> Sequence[Tensor]:
        """Index batches that hold every example once, for passes whose order does not matter: see ``in_order``."""
        return torch.arange(len(self)).split(size)

    def sample(self) -> Inputs:
        """Inputs from which statistics are computed: all of them."""
        return self.inputs

    def sample_labels(self) -> Tensor:
        return self.labels

    def to(self, device: torch.device | str) -> Examples:
        truth = None if self.truth is None else self.truth.to(device)
        inputs, labels = structure.change(lambda tensor: tensor.to(device), (self.inputs, self.labels))
        return replace(self, inputs=inputs, labels=labels, truth=truth)

    def subset(self, index: Tensor | Sequence[int]) -> Examples:
        """The selected examples, in this order; ``index`` holds indices or is a boolean mask."""
        at = torch.as_tensor(index)
        if at.dtype == torch.bool:
            if len(at) != len(self):
                raise DataError(f"the mask has {len(at)} entries for {len(self)} examples: give one for each.")
            at = at.nonzero().flatten()
        at = at.to("cpu", torch.int64)
        inputs, labels = structure.change(
            lambda tensor: tensor.index_select(0, at.to(tensor.device)), (self.inputs, self.labels)
        )
        places = [range(len(self))[i] for i in at.tolist()]
        return replace(
            self,
            inputs=inputs,
            labels=labels,
            # Examples without ids get their index in the whole set as id.
            ids=tuple(self.id_of(i) for i in places),
            truth=None if self.truth is None else self.truth.index_select(0, at.to(self.truth.device)),
            paths=None if self.paths is None else tuple(self.paths[i] for i in places),
            groups=None if self.groups is None else self.groups[at],
        )

    def fingerprint(self) -> str:
        """sha256 over the shapes, the bytes of inputs and labels, and the ids."""
        digest = content_of((self.inputs, self.labels))
        digest.update(json.dumps([self.id_of(at) for at in range(len(self))]).encode())
        return digest.hexdigest()


def content_of(tensors: Any) -> Any:
    """sha256 over the shapes and the bytes of tensors in a structure, to which more can be added."""
    digest = hashlib.sha256()
    for tensor in structure.tensors(tensors):
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        tensor = torch.atleast_1d(tensor)
        for part in torch.split(tensor, max(1, _CHUNK * max(len(tensor), 1) // max(tensor.nbytes, 1))):
            digest.update(part.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest


def _check_lengths(examples: Examples) -> None:
    count = structure.length(examples.inputs)
    if count == 0:
        raise DataError("the data set is empty: give it at least one example.")
    for tensor in structure.tensors(examples.inputs):
        if tensor.shape[:1] != (count,):
            raise DataError(
                f"the inputs hold a tensor of shape {tuple(tensor.shape)} beside one of length {count}: the first "
                "dimension of each must count the examples."
            )
    for name in ("labels", "ids", "truth", "paths", "groups"):
        values: Any = getattr(examples, name)
        if values is not None and len(values) != count:
            raise DataError(f"there are {count} inputs but {len(values)} {name}: give one for each input.")
    if examples.ids is not None and len(set(examples.ids)) != count:
        repeated, _ = Counter(examples.ids).most_common(1)[0]
        raise DataError(f"the id {repeated!r} is used for two examples: make every id unique.")


def _check_labels(examples: Examples) -> None:
    labels = examples.labels
    if labels.dtype.is_floating_point:
        return
    if labels.dtype != torch.int64 or labels.ndim == 0:
        raise DataError(f"labels are {structure.describe(labels)}: give (N,) int64 class indices, or float targets.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 and labels.ndim == 1:  # tokens may use a negative index for positions to ignore
        raise DataError(f"a label is {low}: class indices start at 0.")
    if examples.classes is not None and high >= len(examples.classes):
        raise DataError(f"a label is {high} but there are {len(examples.classes)} class names: add the missing ones.")


def truth_known(truth: Tensor) -> Tensor:
    """Where the correct labels are known: neither -1 nor NaN."""
    return ~truth.isnan() if truth.is_floating_point() else truth >= 0


def in_order(pieces: Sequence[Tensor], parts: Sequence[Tensor]) -> Tensor:
    """What was made of each piece of a data set, joined in the order of the data set."""
    return torch.cat(tuple(parts))[torch.cat(tuple(pieces)).argsort()]
