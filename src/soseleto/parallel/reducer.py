"""One training on several processes, its ranks: what they add up, agree on and gather, passed in as a value.

Source example i belongs to rank i mod ranks for good, so that its weight, score and visits live there and no message
about them is sent while training. Every rank knows the whole batch of a step and takes the part that it owns; parts
may be uneven or empty, since sums are exchanged and never means.

Nothing else in the library asks which rank it is: it is handed a ``Reducer``, by default ``Single``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from soseleto.errors import RankLost, RankStopped, UsageError

ANSWER = timedelta(seconds=50)  # within which every rank must come to the same step
PATIENCE = timedelta(hours=1)  # for the first rank to read data, to write a checkpoint, a ranking or a model
_BUCKET = 1 << 25  # numbers sent at a time

T = TypeVar("T")


class Reducer(Protocol):
    """What the ranks of a training do together. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def device(self) -> torch.device | None:
        """The device of this rank; None leaves the choice to the user."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """Σ over ranks, the same bits on all of them."""
        ...

    def sum_gradients(self, found: dict[str, Tensor], like: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
        """Σ over ranks of gradients by name; ``found`` is empty on a rank that had no examples of this side."""
        ...

    def gather(self, mine: Tensor, n: int) -> Tensor:
        """The n numbers of all source examples in the source's order, from those that each rank owns."""
        ...

    def every(self, value: T) -> list[T]:
        """What each rank has, by rank."""
        ...

    def largest(self, number: int) -> int:
        """Over ranks."""
        ...

    def first(self, action: Callable[[], T]) -> T:
        """What ``action`` gives on the first rank, where alone it is done; its error stops all."""
        ...

    def alike(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks the first one's values, in place."""
        ...


class Single:
    """One process: there is nobody to talk to."""

    rank, ranks, device = 0, 1, None

    def __repr__(self) -> str:
        return "Single()"

    def sum(self, value: Tensor) -> Tensor:
        return value

    def sum_gradients(self, found: dict[str, Tensor], like: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
        return found

    def gather(self, mine: Tensor, n: int) -> Tensor:
        return mine

    def every(self, value: T) -> list[T]:
        return [value]

    def largest(self, number: int) -> int:
        return number

    def first(self, action: Callable[[], T]) -> T:
        return action()

    def alike(self, tensors: Iterable[Tensor]) -> None:
        return


class Ranks:
    """The ranks of a ``torch.distributed`` process group; ``ranks()`` makes one.

    Tensors travel as the process group sends them (gloo on a CPU, NCCL on a GPU); what the hosts agree on goes over
    gloo, where a process that has died is noticed at once and one that hangs within ``answer``.
    """

    def __init__(self, device: torch.device, *, answer: timedelta = ANSWER) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = device
        self._used: dict[tuple[str, ...], tuple[str, ...]] = {}
        with self._together():
            self._host = dist.new_group(backend="gloo", timeout=answer)
            self._patient = dist.new_group(backend="gloo", timeout=PATIENCE)

    def __repr__(self) -> str:
        return f"Ranks({self.rank} of {self.ranks})"

    def sum(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        with self._together():
            dist.all_reduce(total, group=None if total.is_cuda else self._host)
        return total

    def sum_gradients(self, found: dict[str, Tensor], like: Mapping[str, Tensor], side: str) -> dict[str, Tensor]:
        names = self._agreed(found, like, side)
        gradients = [found[name] if name in found else torch.zeros_like(like[name]) for name in names]
        summed: list[Tensor] = []
        for bucket in _buckets(gradients):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            with self._together():
                dist.all_reduce(flat)
            pieces = flat.split([g.numel() for g in bucket])
            summed += [piece.view_as(g) for piece, g in zip(pieces, bucket, strict=True)]
        return dict(zip(names, summed, strict=True))

    def _agreed(self, found: dict[str, Tensor], like: Mapping[str, Tensor], side: str) -> tuple[str, ...]:
        """The parameters that this side's loss uses, found once: a rank without examples would not know."""
        model = (side, *like)
        if model not in self._used:
            used = {name for names in self.every(list(found)) for name in names}
            self._used[model] = tuple(sorted(used))
        if late := sorted(found.keys() - set(self._used[model])):
            raise UsageError(
                f"the {side} loss uses the parameter {late[0]!r} in some steps only, which ranks cannot follow: "
                "train in one process, or use every parameter in every step."
            )
        return self._used[model]

    def gather(self, mine: Tensor, n: int) -> Tensor:
        length = -(-n // self.ranks)  # of the longest part
        padded = torch.zeros(length, dtype=mine.dtype)
        padded[: len(mine)] = mine.cpu()
        parts = [torch.empty_like(padded) for _ in range(self.ranks)]
        with self._together():
            dist.all_gather(parts, padded, group=self._patient)
        return torch.stack(parts, dim=1).flatten()[:n]

    def every(self, value: T) -> list[T]:
        answers: list[Any] = [None] * self.ranks
        with self._together():
            dist.all_gather_object(answers, value, group=self._host)
        return answers

    def largest(self, number: int) -> int:
        mine = torch.tensor(number)
        with self._together():
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._host)
        return int(mine)

    def first(self, action: Callable[[], T]) -> T:
        answer: list[Any] = [None, None]  # value, and what went wrong
        error: Exception | None = None
        if self.rank == 0:
            try:
                answer[0] = action()
            except Exception as found:
                error, answer[1] = found, str(found)
        with self._together():
            dist.broadcast_object_list(answer, src=0, group=self._patient)
        if error is not None:
            raise error
        if answer[1] is not None:
            raise RankStopped(answer[1])
        return answer[0]

    def alike(self, tensors: Iterable[Tensor]) -> None:
        with self._together(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, a rank that does not answer gives one sentence."""
        try:
            yield
        except RuntimeError as error:
            why = str(error).strip().splitlines()[0][:160].rstrip(". ")
            raise RankLost(
                f"rank {self.rank} of {self.ranks} stops, since another rank has died or does not answer ({why}): "
                "mend that one and run the same again, to go on from the last checkpoint."
            ) from error


@contextlib.contextmanager
def ranks(device: str = "auto", *, answer: timedelta = ANSWER) -> Iterator[Reducer]:
    """The reducer of the process group this process was launched into (by torchrun, say), or ``Single()``.

    A process group that was made before (Ray Train does that) is used and left alone; another one is closed at the end.

    answer: how long the others wait in a step for a rank that hangs; one whose process has ended is noticed at once.

    Example:
        >>> with ranks() as reducer:  # and then fit(..., compute=Compute(reducer=reducer))
        ...     reducer
        Single()
    """
    theirs = dist.is_available() and dist.is_initialized()
    if not theirs and "WORLD_SIZE" not in os.environ:
        yield Single()
        return
    where = _device(device)
    if not theirs:
        backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=answer)
    yield Ranks(where, answer=answer)
    if not theirs:  # after an error the others may be gone, and closing would wait for them
        dist.destroy_process_group()


def owned(n: int, reducer: Reducer) -> int:
    """How many of n source examples belong to this rank."""
    return len(range(reducer.rank, n, reducer.ranks))


def my_rows(side: str, reducer: Reducer) -> Callable[[Tensor], Tensor] | None:
    """Which rows of a batch of indices are this rank's: source examples by owner, target examples in turn."""
    if isinstance(reducer, Single):
        return None
    if side == "source":
        return lambda batch: batch % reducer.ranks == reducer.rank
    return lambda batch: torch.arange(len(batch), device=batch.device) % reducer.ranks == reducer.rank


def first_reads(reducer: Reducer, read: Callable[[], T]) -> T:
    """``read`` on every rank, but the first goes ahead: it fills the caches that the others find."""
    here: list[T] = []
    reducer.first(lambda: here.append(read()))
    return here[0] if here else read()


def _device(device: str) -> torch.device:
    """A GPU of its own for every rank on this machine, unless a CPU was asked for."""
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(where)
    return where


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one type, so many numbers at a time."""
    bucket: list[Tensor] = []
    for g in gradients:
        if bucket and (bucket[0].dtype != g.dtype or sum(b.numel() for b in bucket) + g.numel() > _BUCKET):
            yield bucket
            bucket = []
        bucket.append(g)
    if bucket:
        yield bucket
