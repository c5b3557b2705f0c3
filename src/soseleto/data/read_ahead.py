"""What data sets that are read in every epoch have in common: labels as they come, and worker processes."""

from __future__ import annotations

import copy
import ctypes
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from soseleto.data.items import Failure, Items, Request
from soseleto.data.readers.read_once import own_random_state
from soseleto.errors import DataError, UsageError

MOST_WORKERS = 8  # unless the user asks for more
PIECE = 256  # examples that are read at a time, where there are no batches
_PR_SET_PDEATHSIG = 1  # of prctl: the signal to send when the parent ends


class ReadAhead(ABC):
    """A set of ``n`` examples that is read in every epoch; a subclass says what to read, and how many workers do it."""

    reads_ahead = True
    nbytes = 0  # nothing is kept

    def __init__(self, n: int, workers: int | None) -> None:
        if workers is not None and workers < 0:
            raise UsageError(f"workers must be 0 or more, got {workers}.")
        self.workers = workers
        self.name = "given"
        self.classes: tuple[str, ...] | None = None
        self.truth: Tensor | None = None
        self.paths: tuple[str, ...] | None = None
        self.device = torch.device("cpu")
        self._labels = Labels(n)
        self._workers: Workers | None = None

    def named(self, name: str) -> Self:
        """The same set, called so in messages."""
        other = self._copy()
        other.name = name
        return other

    def to(self, device: torch.device | str) -> Self:
        other = self._copy()
        other.device = torch.device(device)
        return other

    def close(self) -> None:
        """End the worker processes; reading again starts new ones."""
        self._workers = None

    def _copy(self) -> Self:
        other = copy.copy(self)
        other._workers = None
        return other

    @property
    @abstractmethod
    def _items(self) -> Items:
        """What reads an example."""

    @abstractmethod
    def _count(self) -> int:
        """The number of worker processes."""

    def _made(self, requests: Iterator[Request]) -> Iterator[Any]:
        """What the requests ask for, read ahead where there are workers."""
        count = self._count()
        return self._by_workers(requests, count) if count else self._in_this_process(requests)

    def _in_this_process(self, requests: Iterable[Request]) -> Iterator[Any]:
        items = self._items
        for request in requests:
            with own_random_state():
                made = items.__getitems__(request)
            yield _checked(made)

    def _by_workers(self, requests: Iterator[Request], count: int) -> Iterator[Any]:
        if self._workers is None or self._workers.busy:
            self._workers = Workers(self._items, count, pin=self.device.type == "cuda")
        return map(_checked, self._workers.read(requests))


class Labels:
    """The label of every example that was read."""

    def __init__(self, n: int) -> None:
        self._known = torch.zeros(n, dtype=torch.bool)
        self._table: Tensor | None = None

    def put(self, index: Tensor, labels: Tensor) -> None:
        if self._table is None:
            several = labels.ndim > 1  # such as tokens, whose number may vary
            self._table = torch.zeros(len(self._known), *([0] if several else []), dtype=labels.dtype)
        self._known[index] = True
        if self._table.ndim == 1:
            self._table[index] = labels

    def missing(self) -> Tensor:
        return (~self._known).nonzero().flatten()

    def values(self) -> Tensor:
        assert self._table is not None
        return self._table


class Workers:
    """Worker processes that live from epoch to epoch: a DataLoader whose batches are set before each pass."""

    def __init__(self, items: Items, count: int, *, pin: bool) -> None:
        self._requests = _Requests()
        self.busy = False
        self._loader: DataLoader[Any] = DataLoader(
            items,
            batch_sampler=self._requests,  # type: ignore[arg-type]
            num_workers=count,
            collate_fn=_unchanged,
            pin_memory=pin,
            persistent_workers=True,
            worker_init_fn=partial(_begin_worker, threading.current_thread() is threading.main_thread()),
            generator=torch.Generator(),  # the global one belongs to the training
        )

    def read(self, requests: Iterator[Request]) -> Iterator[Any]:
        self._requests.next = requests
        self.busy = True
        try:
            yield from self._loader
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise DataError(
                "a process that reads the data was killed, perhaps because memory ran out: use fewer, as in "
                "soseleto.data.Live(dataset, workers=2)."
            ) from error
        finally:
            self.busy = False


class _Requests:
    """The batch sampler of a DataLoader: the requests of one pass."""

    def __init__(self) -> None:
        self.next: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.next


def _checked(made: Any) -> Any:
    """What a worker has read; raises its failure."""
    if isinstance(made, Failure):
        raise made.error()
    return made


def _unchanged(batch: Any) -> Any:
    return batch


def _begin_worker(of_main_thread: bool, worker: int) -> None:
    """Called in a new worker process.

    Ctrl-C reaches every process of a terminal; the main one finishes its step and ends the workers. If the main one is
    killed, Linux kills the workers at once; otherwise they would hold its lock on the run folder for some seconds, in
    which it could not be resumed. (Linux watches the thread that started them, hence only the main one.)
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if of_main_thread and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
