"""One training on several processes (ranks): the collectives it uses, as an object that is passed in.

Source example i always belongs to rank i mod ranks, which holds its weight, score and visits, so that training sends no
messages about them. Every rank knows the whole batch of a step and takes the part that it owns. Parts may be uneven or
empty, because ranks exchange sums and never means.

The library never queries the process group: it is given a ``Reducer``, by default ``Single``.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from soseleto.errors import RankLost, RankStopped, UsageError, first_line

ANSWER = timedelta(seconds=50)  # timeout of the collectives of a step
PATIENCE = timedelta(hours=1)  # timeout while rank 0 reads data, or writes a checkpoint, a ranking or a model
_BUCKET = 1 << 25  # maximum numbers per message

T = TypeVar("T")


class Reducer:
    """The collectives of a training, here of a single process: every method returns what the ranks would agree on.

    Every rank must make the same calls in the same order.
    """

    rank, ranks = 0, 1
    device: torch.device | None = None  # of this rank; None: the device that the user chose

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def sum(self, value: Tensor) -> Tensor:
        """Σ over ranks, the same bits on all of them."""
        return value

    def sum_gradients(self, found: dict[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Σ over ranks of gradients by name; ``found`` is empty on a rank without examples of this side."""
        return found

    def gather(self, mine: Tensor, n: int) -> Tensor:
        """The n values of all source examples in the source's order, from those that each rank owns."""
        return mine

    def every(self, value: T) -> list[T]:
        """Each rank's value, by rank."""
        return [value]

    def largest(self, number: int) -> int:
        """The maximum over ranks."""
        return number

    def first(self, action: Callable[[], T]) -> T:
        """Run ``action`` on rank 0 only, and return its result on every rank; its error stops all ranks."""
        return action()

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Copy the values of rank 0 to all ranks, in place."""


class Single(Reducer):
    """Single process: collectives are no-ops."""


class Ranks(Reducer):
    """The ranks of a ``torch.distributed`` process group; ``ranks()`` makes one.

    Tensors use the process group's backend (gloo on a CPU, NCCL on a GPU). Host-side values use gloo, which notices a
    process that has died at once, and one that hangs after ``answer``.
    """

    def __init__(self, device: torch.device, *, answer: timedelta = ANSWER) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.device = device
        with self._together():
            self._host = dist.new_group(backend="gloo", timeout=answer)
            self._patient = dist.new_group(backend="gloo", timeout=PATIENCE)

    def sum(self, value: Tensor) -> Tensor:
        total = value.detach().clone()
        with self._together():
            dist.all_reduce(total, group=None if total.is_cuda else self._host)
        return total

    def sum_gradients(self, found: dict[str, Tensor], like: Mapping[str, Tensor]) -> dict[str, Tensor]:
        used = self.sum(torch.tensor([name in found for name in like], dtype=torch.int32))
        names = [name for name, count in zip(like, used.tolist(), strict=True) if count]
        gradients = [found[name] if name in found else torch.zeros_like(like[name]) for name in names]
        summed: list[Tensor] = []
        for bucket in _buckets(gradients):
            flat = torch.cat([g.reshape(-1) for g in bucket])
            with self._together():
                dist.all_reduce(flat)
            pieces = flat.split([g.numel() for g in bucket])
            summed += [piece.view_as(g) for piece, g in zip(pieces, bucket, strict=True)]
        return dict(zip(names, summed, strict=True))

    def gather(self, mine: Tensor, n: int) -> Tensor:
        gathered = torch.empty(n, dtype=mine.dtype)
        for rank, part in enumerate(self._exchanged(mine.cpu().clone(), self._patient)):
            gathered[rank :: self.ranks] = part
        return gathered

    def every(self, value: T) -> list[T]:
        return self._exchanged(value, self._host)

    def _exchanged(self, value: T, group: Any) -> list[T]:
        answers: list[Any] = [None] * self.ranks
        with self._together():
            dist.all_gather_object(answers, value, group=group)
        return answers

    def largest(self, number: int) -> int:
        mine = torch.tensor(number)
        with self._together():
            dist.all_reduce(mine, op=dist.ReduceOp.MAX, group=self._host)
        return int(mine)

    def first(self, action: Callable[[], T]) -> T:
        answer: list[Any] = [None, None]  # the result, and the error's message
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

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        with self._together(), torch.no_grad():
            for tensor in tensors:
                dist.broadcast(tensor, src=0)

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Turn a failed collective into one sentence."""
        try:
            yield
        except RuntimeError as error:
            why = first_line(error)
            raise RankLost(
                f"rank {self.rank} of {self.ranks} stops, since another rank has died or does not answer ({why}): "
                "fix that rank and run the same command again, to resume from the last checkpoint."
            ) from error


def existing(device: torch.device, *, answer: timedelta = ANSWER) -> Reducer:
    """The ranks of the process group that exists; raises in one of several processes that have not joined one."""
    if dist.is_available() and dist.is_initialized():
        return Ranks(device, answer=answer) if dist.get_world_size() > 1 else Single()
    require_alone()
    return Single()


def require_alone() -> None:
    if (size := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise UsageError(
            f"this is one of {size} processes (WORLD_SIZE is set, as by torchrun), and without a reducer each would "
            "train alone: write `with soseleto.ranks() as reducer:` and in it the training, of fit with "
            "compute=Compute(reducer=reducer), or unset WORLD_SIZE."
        )


@contextlib.contextmanager
def ranks(device: str = "auto", *, answer: timedelta = ANSWER) -> Iterator[Reducer]:
    """The reducer of the process group that this process was launched into (e.g. by torchrun), or ``Single()``.

    An existing process group (Ray Train makes one) is used and not closed; otherwise one is made and closed at the end.

    answer: how long the ranks of a step wait for one that hangs; a process that has ended is noticed at once.

    Example:
        >>> with ranks() as reducer:  # and then fit(..., compute=Compute(reducer=reducer))
        ...     reducer
        Single()
    """
    exists = dist.is_available() and dist.is_initialized()
    if not exists and "WORLD_SIZE" not in os.environ:
        yield Single()
        return
    where = _device(device)
    if not exists:
        backend = "cpu:gloo,cuda:nccl" if where.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=answer)
    yield Ranks(where, answer=answer)
    if not exists:  # not after an error: the other ranks may be gone, and closing would wait for them
        dist.destroy_process_group()


def owned(n: int, reducer: Reducer) -> int:
    """How many of n source examples belong to this rank."""
    return len(range(reducer.rank, n, reducer.ranks))


def my_rows(side: str, reducer: Reducer) -> Callable[[Tensor], Tensor] | None:
    """Selects this rank's rows of a batch of indices: source examples by owner, target examples round-robin."""
    if isinstance(reducer, Single):
        return None
    if side == "source":
        return lambda batch: batch % reducer.ranks == reducer.rank
    return lambda batch: torch.arange(len(batch), device=batch.device) % reducer.ranks == reducer.rank


def _device(device: str) -> torch.device:
    """One GPU per rank of this machine, or the CPU."""
    if device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    where = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    torch.cuda.set_device(where)
    return where


def _buckets(gradients: list[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive gradients of one dtype, at most _BUCKET numbers together."""
    bucket: list[Tensor] = []
    for g in gradients:
        if bucket and (bucket[0].dtype != g.dtype or sum(b.numel() for b in bucket) + g.numel() > _BUCKET):
            yield bucket
            bucket = []
        bucket.append(g)
    if bucket:
        yield bucket


def choose_device(device: str | torch.device) -> torch.device:
    """The device by its name; ``"auto"`` is a GPU if there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise UsageError(f"unknown device {device!r}: use 'auto', 'cpu' or 'cuda'.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda' needs a GPU, but PyTorch sees none here: use device='cpu'.")
    return chosen
