"""Lazy data sets: a map-style Dataset that is read again in every epoch, by worker processes of torch's DataLoader.

For items that are random, of several shapes, or too many for memory. What items and ``collate_fn`` take from the global
generators of torch, NumPy and ``random`` follows from (seed, purpose, index): it differs from epoch to epoch and is the
same in a resumed run, whatever the number of workers.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import tee
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, default_collate

from soseleto.data import structure
from soseleto.data.arrays import (
    LABELS,
    ChangingItems,
    is_tensors,
    labels_of,
    narrowed,
    own_random_state,
    parted,
    require_constant,
    same,
    tensor_of,
)
from soseleto.data.batches import seed_for, source_batches
from soseleto.data.examples import Examples
from soseleto.data.reading import Names
from soseleto.data.structure import Inputs
from soseleto.errors import DataError, UsageError, first_line

MOST_IN_MEMORY = 1 << 28  # bytes of a Dataset that is read into memory without being asked to
MOST_WORKERS = 8  # unless the user asks for more
PIECE = 256  # examples that are read at a time where there are no batches
SAMPLE = 1024  # examples from which statistics are computed
FEW = 64  # items, evenly spaced, for the fingerprint and the kind of labels
_SHORT = 0.5  # seconds of reading per epoch for which no workers are started
_PR_SET_PDEATHSIG = 1  # of prctl: the signal to send when the parent ends

Collate = Callable[[list[Any]], Any]


class LazyDataset:
    """A Dataset of (input, label) pairs, or of mappings with an entry ``labels``, that is read again in every epoch.

    ``fit`` reads a Dataset this way if its items are random, differ in shape or take more than 256 MB;
    ``LazyDataset(dataset)`` is for choosing how.

    Args:
        dataset: with ``__len__`` and ``__getitem__``. A random generator of its own is not under control.
        labels: (n,) the labels of all items, so that they need not be read; by default those that come with the items.
        ids: one unique name per item, for the ranking; by default its index.
        classes: class names by index.
        collate_fn: makes a batch of a list of items, as for a DataLoader; by default they are stacked.
        workers: number of reading processes, 0 to read in this one; without effect on the result. By default one for
            each core, at most 8, and none where an epoch is read in half a second.
    """

    reads_ahead = True
    nbytes = 0  # nothing is kept
    truth = None
    paths = None

    def __init__(
        self,
        dataset: Any,
        *,
        labels: Any = None,
        ids: Sequence[str] | None = None,
        classes: Sequence[str] | None = None,
        collate_fn: Collate | None = None,
        workers: int | None = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise UsageError(
                f"LazyDataset needs a Dataset with __len__ and __getitem__, got a {type(dataset).__name__}."
            )
        if len(dataset) == 0:
            raise DataError("the data set is empty: give it at least one example.")
        if workers is not None and workers < 0:
            raise UsageError(f"workers must be 0 or more, got {workers}.")
        if any(values is not None and len(values) != len(dataset) for values in (labels, ids)):
            raise DataError(f"labels and ids must have one entry for each of the {len(dataset)} items.")
        self.dataset, self.collate_fn, self.workers = dataset, collate_fn, workers
        self.ids = None if ids is None else tuple(ids)
        self.classes = None if classes is None else tuple(classes)
        self.name, self.device = "given", torch.device("cpu")
        self._labels = None if labels is None else torch.as_tensor(labels)
        self._known = torch.full((len(dataset),), labels is not None)

    def __len__(self) -> int:
        return len(self.dataset)

    def id_of(self, index: int) -> str:
        at = range(len(self))[index]
        return str(at) if self.ids is None else self.ids[at]

    @property
    def labels(self) -> Tensor:
        """The labels as they were read; those not seen yet are read now."""
        missing = (~self._known).nonzero().flatten()
        for _ in self.read(missing.split(PIECE)) if len(missing) else ():
            pass
        assert self._labels is not None
        return self._labels

    def named(self, name: str) -> Self:
        """The same set, called so in messages."""
        return self._with(name=name)

    def to(self, device: torch.device | str) -> Self:
        return self._with(device=torch.device(device))

    def _with(self, **fields: Any) -> Self:
        other = copy.copy(self)
        vars(other).update({"_known": self._known.clone(), **fields})
        return other

    def take(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """A few examples, read in this process."""
        return next(self._read_here([_Request(index.tolist(), 0, "read")]))

    def read(
        self, batches: Iterable[Tensor], *, seed: int = 0, purpose: str = "read"
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels of each batch of indices, read ahead; random items follow (seed, purpose, index)."""
        indices, to_read = tee(batches)
        requests = (_Request(batch.tolist(), seed, purpose) for batch in to_read)
        all_known = bool(self._known.all())
        if self.workers is None:
            self.workers = self._worker_count()
        made = self._read_by_workers(requests) if self.workers else self._read_here(requests)
        for index, (inputs, labels) in zip(indices, made, strict=True):
            if not all_known:
                self._keep_labels(index.cpu(), labels)
            yield structure.to_device((inputs, labels), self.device)

    def _read_by_workers(self, requests: Iterator[_Request]) -> Iterator[tuple[Inputs, Tensor]]:
        loader: DataLoader[Any] = DataLoader(
            self._reader,
            sampler=requests,
            batch_size=None,
            num_workers=self.workers or 0,
            collate_fn=_unchanged,
            pin_memory=self.device.type == "cuda",
            worker_init_fn=partial(_begin_worker, threading.current_thread() is threading.main_thread()),
            generator=torch.Generator(),  # the global one belongs to the training
        )
        try:
            yield from map(_checked, loader)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a process that reads the data was killed, perhaps because memory ran out: use fewer, as in "
                "soseleto.data.LazyDataset(dataset, workers=2)."
            ) from error

    def _read_here(self, requests: Iterable[_Request]) -> Iterator[tuple[Inputs, Tensor]]:
        for request in requests:
            with own_random_state():
                batch = self._reader[request]
            yield _checked(batch)

    @property
    def _reader(self) -> _Reader:
        return _Reader(self.dataset, self.collate_fn, self.name)

    def _worker_count(self) -> int:
        begin = time.perf_counter()
        places = _spaced(len(self), 4)
        for at in places:
            self.take(at[None])
        seconds = (time.perf_counter() - begin) / len(places) * len(self)
        return 0 if seconds < _SHORT else min(MOST_WORKERS, os.cpu_count() or 1)

    def _keep_labels(self, index: Tensor, labels: Tensor) -> None:
        if self._labels is None:  # of several per example, such as tokens, whose number may vary, none is kept
            self._labels = torch.zeros((len(self), 0) if labels.ndim > 1 else len(self), dtype=labels.dtype)
        self._known[index] = True
        if self._labels.ndim == 1:
            self._labels[index] = labels

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        return source_batches(len(self), size, seed=seed, epoch=epoch)

    def sample(self) -> Inputs:
        """The inputs of evenly spaced examples, at most 1,024."""
        places = _spaced(len(self), SAMPLE)
        return structure.concatenate([inputs for inputs, _ in self.read(places.split(PIECE))])

    def sample_labels(self) -> Tensor:
        """All labels if they are known, or those of evenly spaced examples, at most 64."""
        known = self._labels is not None and bool(self._known.all())
        return self.labels if known else self.take(_spaced(len(self), FEW))[1]

    def subset(self, index: Tensor | Sequence[int]) -> Self:
        """The selected examples, still read when they are needed."""
        at = torch.as_tensor(index)
        at = at.nonzero().flatten() if at.dtype == torch.bool else at
        places = [range(len(self))[i] for i in at.tolist()]
        return self._with(
            dataset=Subset(self.dataset, places),
            ids=tuple(self.id_of(i) for i in places),
            _labels=None if self._labels is None else self._labels[places],
            _known=self._known[places],
        )

    def followed_by(self, others: ExampleSet, labels: Tensor, ids: Sequence[str]) -> Self:
        """These examples, then others with labels of their own; items of both go through ``collate_fn`` together."""
        like = self.dataset[0]
        own_labels = labels.new_zeros(len(self)) if self._labels is None else self._labels
        return self._with(
            dataset=ConcatDataset([self.dataset, _Relabelled(others, labels, like)]),
            ids=(*map(self.id_of, range(len(self))), *ids),
            _labels=torch.cat([own_labels, labels.cpu()]),
            _known=torch.cat([self._known, torch.ones(len(labels), dtype=torch.bool)]),
        )

    def fingerprint(self) -> str:
        """sha256 of evenly spaced items and of the number of items; where items cannot be repeated, of their shapes."""
        digest = hashlib.sha256(f"{len(self)}".encode())
        places = _spaced(len(self), FEW)
        for at in places:
            item, again = (next(self._read_here([_Request([int(at)], seed, "read")])) for seed in (0, 1))
            repeated = all(same(a, b) for a, b in zip(structure.tensors(item), structure.tensors(again), strict=True))
            digest.update(structure.describe(item).encode())
            for tensor in structure.tensors(item) if repeated else []:
                digest.update(tensor.contiguous().numpy().tobytes())
        return f"{len(places)} of {len(self)} items: {digest.hexdigest()}"


ExampleSet = Examples | LazyDataset


def fits_memory(dataset: Any, *, name: str) -> bool:
    """Whether a Dataset is better read into memory: that is one pass, and every epoch after it is faster.

    So if its items are tensors already, or do not change from read to read, have one shape and are few: at most 256 MB.
    """
    if is_tensors(dataset) or len(dataset) == 0:
        return True
    try:
        require_constant(dataset.__getitem__, len(dataset), name=name)
    except ChangingItems:
        return False
    with own_random_state():
        items = [pytree.tree_leaves(dataset[int(at)]) for at in _spaced(len(dataset), 12)]
    shapes = {tuple(np.shape(leaf) for leaf in item) for item in items}
    size = max(sum(np.asarray(leaf).nbytes for leaf in item) for item in items)
    return len(shapes) == 1 and size * len(dataset) <= MOST_IN_MEMORY


def _spaced(n: int, most: int) -> Tensor:
    """At most ``most`` of n indices, evenly spaced."""
    return torch.linspace(0, n - 1, min(n, most), dtype=torch.float64).round().long().unique()


class _Request(NamedTuple):
    """A batch to read: its indices, and what randomness follows from."""

    places: list[int]
    seed: int
    purpose: str


class _Reader(Dataset[Any]):
    """Reads the batch of a request, here or in a worker process, from which errors return as values."""

    def __init__(self, dataset: Any, collate_fn: Collate | None, name: str) -> None:
        self._dataset, self._collate_fn, self._name = dataset, collate_fn, name

    def __getitem__(self, request: _Request) -> tuple[Inputs, Tensor] | DataError:
        try:
            if request.places:
                return self._batch(request)
            inputs, labels = self._batch(request._replace(places=[0]))  # a rank without examples in this batch
            return structure.change(lambda tensor: tensor[:0], inputs), labels[:0]
        except Exception as error:
            failure = DataError(str(error))
            failure.add_note("".join(traceback.format_exception(error)))  # a traceback does not reach another process
            return failure

    def _batch(self, request: _Request) -> tuple[Inputs, Tensor]:
        index, seed, purpose = request
        items = [self._item(at, seed_for(seed, f"{purpose}/item", at)) for at in index]
        _seed_generators(seed_for(seed, f"{purpose}/collate", index[0]))
        try:
            batch = self._collate_fn(items) if self._collate_fn else default_collate(items)
        except Exception as error:
            raise DataError(
                f"the items {index[0]} to {index[-1]} of the {self._name} data set do not make a batch "
                f"({type(error).__name__}: {first_line(error)}): bring them to one shape, or write "
                "soseleto.data.LazyDataset(dataset, collate_fn=...)."
            ) from error
        inputs, labels = parted(batch, name=self._name)
        inputs, labels = structure.change(narrowed, structure.plain(inputs)), labels_of(labels, name=self._name)
        if isinstance(labels, Names):
            raise DataError(f"the labels of the {self._name} data set are text: return class indices.")
        if not structure.tensors(inputs):
            raise DataError(f"the items of the {self._name} data set hold no tensor or array: return (input, label).")
        return inputs, labels

    def _item(self, at: int, seed: int) -> Any:
        _seed_generators(seed)
        try:
            item = self._dataset[at]
            if self._collate_fn is not None:
                return item
            inputs, label = parted(item, name=self._name)
            inputs = pytree.tree_map(
                lambda leaf: tensor_of(leaf) if hasattr(leaf, "__array_interface__") else leaf, structure.plain(inputs)
            )
            return inputs, label if isinstance(label, str) else torch.as_tensor(label)
        except Exception as error:
            raise DataError(
                f"item {at} of the {self._name} data set cannot be read ({type(error).__name__}: {first_line(error)}): "
                "mend the Dataset."
            ) from error


class _Relabelled(Dataset[Any]):
    """The items of a set with other labels, in the form of the item ``like``."""

    def __init__(self, examples: ExampleSet, labels: Tensor, like: Any) -> None:
        self._examples, self._labels = examples.to("cpu"), labels.cpu()
        self._label_key = next((key for key in LABELS if key in like), None) if isinstance(like, Mapping) else None
        self._as_tensors = isinstance(parted(like, name="source")[1], Tensor)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, at: int) -> Any:
        if isinstance(self._examples, LazyDataset):
            inputs, _ = parted(self._examples.dataset[at], name="target")
        else:
            assert isinstance(self._examples, Examples)
            inputs = structure.change(lambda tensor: tensor[at], self._examples.inputs)
        label = self._labels[at] if self._as_tensors else int(self._labels[at])
        return (inputs, label) if self._label_key is None else {**inputs, self._label_key: label}


def _checked(batch: Any) -> Any:
    """What was read; raises its error."""
    if isinstance(batch, DataError):
        raise batch
    return batch


def _unchanged(batch: Any) -> Any:
    return batch


def _seed_generators(number: int) -> None:
    """Seed the global generators of torch, NumPy and ``random``."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)  # noqa: NPY002 - what a Dataset may use
    random.seed(number)


def _begin_worker(of_main_thread: bool, worker: int) -> None:
    """Called in a new worker process, which ends with the main one and holds its lock on the run folder until then."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process finishes its step and ends the workers
    # Linux ends the worker at once if the thread that started it ends, and so only where that is the main thread.
    if of_main_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
