"""Map-style Datasets: read into memory, or again in every epoch by worker processes of torch's DataLoader.

The latter is for items that are random, of several shapes, or too many for memory. What items and ``collate_fn`` take
from the global generators of torch, NumPy and ``random`` follows from (seed, purpose, index): it differs from epoch to
epoch and is the same in a resumed run, whatever the number of workers.
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
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from soseleto.data import structure
from soseleto.data.arrays import labels_of, narrowed, tensor_of
from soseleto.data.batches import seed_for, source_batches
from soseleto.data.examples import Examples
from soseleto.data.structure import Inputs
from soseleto.errors import DataError, UsageError, first_line

LABELS = ("labels", "label")  # of items that are mappings
READ_AGAIN = 12  # items, evenly spaced
TIMES = 3  # a random flip is missed by all of them with probability 2^-36
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
        labels: (n,) the labels of all items, so that no pass over the data reads them.
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
            raise UsageError(f"LazyDataset needs a Dataset with __len__ and __getitem__, got {type(dataset).__name__}.")
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

    def __len__(self) -> int:
        return len(self.dataset)

    def id_of(self, index: int) -> str:
        at = range(len(self))[index]
        return str(at) if self.ids is None else self.ids[at]

    @property
    def labels(self) -> Tensor:
        """Those that were given, else all are read once; of several per example, such as tokens, none is kept."""
        if self._labels is None:
            few = self.sample_labels()
            pieces = self.pieces(PIECE) if few.ndim == 1 else ()
            read = [labels.cpu() for _, labels in self.read(pieces)]
            self._labels = torch.cat(read) if read else few.new_zeros(len(self), 0)
        return self._labels

    def named(self, name: str) -> Self:
        """The same set, called so in messages."""
        return self._with(name=name)

    def to(self, device: torch.device | str) -> Self:
        return self._with(device=torch.device(device))

    def _with(self, **fields: Any) -> Self:
        other = copy.copy(self)
        vars(other).update(fields)
        return other

    def pieces(self, size: int) -> Sequence[Tensor]:
        """Index batches that hold every example once."""
        return torch.arange(len(self)).split(size)

    def take(self, index: Tensor) -> tuple[Inputs, Tensor]:
        """A few examples, read in this process."""
        inputs, labels = _checked(self._reader[_Request(index.tolist(), 0, "read")])
        return inputs, labels

    def read(
        self, batches: Iterable[Tensor], *, seed: int = 0, purpose: str = "read"
    ) -> Iterator[tuple[Inputs, Tensor]]:
        """Inputs and labels of each batch of indices, read ahead; random items follow (seed, purpose, index)."""
        requests = (_Request(batch.tolist(), seed, purpose) for batch in batches)
        if self.workers is None:
            self.workers = self._worker_count()
        read = self._read_by_workers(requests) if self.workers else map(self._reader.__getitem__, requests)
        for batch in read:
            yield structure.to_device(_checked(batch), self.device)

    def _read_by_workers(self, requests: Iterator[_Request]) -> Iterator[Any]:
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
            yield from loader
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a process that reads the data was killed, perhaps because memory ran out: use fewer, as in "
                "soseleto.data.LazyDataset(dataset, workers=2)."
            ) from error

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

    def batches(self, size: int, *, seed: int, epoch: int, device: torch.device | str = "cpu") -> Sequence[Tensor]:
        return source_batches(len(self), size, seed=seed, epoch=epoch)

    def sample(self) -> Inputs:
        """The inputs of evenly spaced examples, at most 1,024."""
        places = _spaced(len(self), SAMPLE)
        return structure.concatenate([inputs for inputs, _ in self.read(places.split(PIECE))])

    def sample_labels(self) -> Tensor:
        """All labels if they are known, or those of evenly spaced examples, at most 64."""
        return self.take(_spaced(len(self), FEW))[1] if self._labels is None else self._labels

    def subset(self, index: Tensor | Sequence[int]) -> Self:
        """The selected examples, still read when they are needed."""
        at = torch.as_tensor(index)
        at = at.nonzero().flatten() if at.dtype == torch.bool else at
        places = [range(len(self))[i] for i in at.tolist()]
        return self._with(
            dataset=Subset(self.dataset, places),
            ids=tuple(self.id_of(i) for i in places),
            _labels=None if self._labels is None else self._labels[places],
        )

    def fingerprint(self) -> str:
        """sha256 of evenly spaced items and of the number of items; where items cannot be repeated, of their shapes."""
        digest = hashlib.sha256(f"{len(self)}".encode())
        places = _spaced(len(self), FEW)
        for at in places.tolist():
            item, again = (_checked(self._reader[_Request([at], seed, "read")]) for seed in (0, 1))
            digest.update(structure.describe(item).encode())
            if _content(item) == _content(again):
                digest.update(repr(_content(item)).encode())
        return f"{len(places)} of {len(self)} items: {digest.hexdigest()}"


ExampleSet = Examples | LazyDataset


def fits_memory(dataset: Any) -> bool:
    """Whether a Dataset is better read into memory: that is one pass, and every epoch after it is faster.

    So if its items do not change from read to read, have one shape and are few: at most 256 MB.
    """
    if len(dataset) == 0:
        return True
    if _changing(dataset) is not None:
        return False
    with own_random_state():
        items = [pytree.tree_leaves(dataset[at]) for at in _spaced(len(dataset), READ_AGAIN).tolist()]
    shapes = {tuple(np.shape(leaf) for leaf in item) for item in items}
    size = max(sum(np.asarray(leaf).nbytes for leaf in item) for item in items)
    return len(shapes) == 1 and size * len(dataset) <= MOST_IN_MEMORY


def read_into_memory(dataset: Any, *, name: str) -> tuple[Any, Any]:
    """Inputs and labels of a Dataset, each item of which is read once."""
    if len(dataset) == 0:
        raise DataError(f"the {name} data set is empty: give it at least one example.")
    if (at := _changing(dataset)) is not None:
        raise UsageError(
            f"item {at} of the {name} data set changes from read to read (random augmentation?), and every item is "
            "read only once beside files: leave the random part out and write augment=soseleto.Augment(...)."
        )
    with own_random_state():
        return _Reader(dataset, None, name).batch(_Request(list(range(len(dataset))), 0, "read"))


def _changing(dataset: Any) -> int | None:
    """An item that differs from its first reading, among a few; None if there is none."""
    with own_random_state():
        for at in _spaced(len(dataset), READ_AGAIN).tolist():
            first = _content(dataset[at])
            if any(_content(dataset[at]) != first for _ in range(TIMES)):
                return int(at)
    return None


def _content(item: Any) -> Any:
    """An item's structure, with the types, shapes and bytes of its tensors, so that NaN equals NaN."""

    def of_leaf(leaf: Any) -> tuple[str, bytes]:
        if isinstance(leaf, Tensor):  # NumPy has no bfloat16
            content = leaf.cpu().contiguous().view(-1).view(torch.uint8).numpy()
            return structure.describe(leaf), content.tobytes()
        array = np.asarray(leaf)
        return f"{array.dtype} of shape {array.shape}", array.tobytes()

    leaves, form = pytree.tree_flatten(structure.plain(item))
    return str(form), [of_leaf(leaf) for leaf in leaves]


@contextmanager
def own_random_state() -> Iterator[None]:
    """Leave the states of Python's, NumPy's and PyTorch's generators as they were."""
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002 - what a Dataset may use
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)  # noqa: NPY002


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
            with own_random_state():
                inputs, labels = self.batch(request if request.places else request._replace(places=[0]))
            inputs, labels = structure.change(narrowed, inputs), labels_of(labels, name=self._name)
            if not isinstance(labels, Tensor):
                raise DataError(f"the labels of the {self._name} data set are text: return class indices.")
            if not structure.tensors(inputs):
                raise DataError(f"the items of the {self._name} data set hold no tensor: return (input, label).")
            count = len(request.places)  # none for a rank without examples in this batch
            return structure.change(lambda tensor: tensor[:count], inputs), labels[:count]
        except Exception as error:
            failure = DataError(str(error))
            failure.add_note("".join(traceback.format_exception(error)))  # a traceback does not reach another process
            return failure

    def batch(self, request: _Request) -> tuple[Any, Any]:
        """Inputs and labels as ``collate_fn`` makes them."""
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
        return structure.plain(inputs), labels

    def _item(self, at: int, seed: int) -> Any:
        _seed_generators(seed)
        try:
            item = self._dataset[at]
            if self._collate_fn is not None:
                return item
            inputs, label = parted(item, name=self._name, at=at)
            return _tensors(structure.plain(inputs)), label if isinstance(label, str) else torch.as_tensor(label)
        except Exception as error:
            raise DataError(
                f"item {at} of the {self._name} data set cannot be read ({type(error).__name__}: {first_line(error)}): "
                "mend the Dataset."
            ) from error


def parted(item: Any, *, name: str, at: int | None = None) -> tuple[Any, Any]:
    """Inputs and labels of an item or a batch: a pair, or a mapping with an entry ``labels`` or ``label``."""
    if isinstance(item, Mapping) and (key := next((key for key in LABELS if key in item), None)) is not None:
        return {k: value for k, value in item.items() if k != key}, item[key]
    if isinstance(item, Sequence) and not isinstance(item, str) and len(item) == 2:
        return item[0], item[1]
    what = "a mapping without 'labels'" if isinstance(item, Mapping) else f"a {type(item).__name__}"
    which = "an item" if at is None else f"item {at}"
    raise DataError(f"{which} of the {name} data set is {what}: return (input, label), or a dict with 'labels'.")


def _tensors(inputs: Any) -> Any:
    """Arrays, images and rows of numbers as tensors; what else is inside goes to ``default_collate``."""
    if isinstance(inputs, list) and all(isinstance(value, int | float) for value in inputs):
        return torch.tensor(inputs)
    return pytree.tree_map(lambda leaf: tensor_of(leaf) if hasattr(leaf, "__array_interface__") else leaf, inputs)


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
