"""Guards against losses that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from soseleto.errors import TrainingError
from soseleto.parallel.reducer import Reducer, Single

# guard(side, losses, index): called on every batch's losses before they can reach the parameters
Guard = Callable[[str, Tensor, Tensor], None]


class NonFiniteLoss(TrainingError):
    """Losses of some source or target examples are NaN or infinite; ``index`` holds the examples' indices."""

    def __init__(self, side: str, index: list[int]) -> None:
        super().__init__(f"{len(index)} {side} losses are not finite")
        self.side = side
        self.index = index


def require_finite(side: str, losses: Tensor, index: Tensor) -> None:
    """Raise for a NaN or infinite loss, before it can reach the parameters."""
    finite = losses.isfinite()
    if not bool(finite.all()):
        raise NonFiniteLoss(side, index[~finite].tolist())


class AgreedGuard:
    """``require_finite`` over ranks: if one rank finds a bad loss, all raise the same error."""

    def __init__(self, reducer: Reducer) -> None:
        self._reducer = reducer

    def __call__(self, side: str, losses: Tensor, index: Tensor) -> None:
        finite = losses.isfinite()
        if self._reducer.largest(int(not bool(finite.all()))):
            raise NonFiniteLoss(side, _of_all_ranks(self._reducer, side, index[~finite].tolist()))


class DeferredGuard:
    """``require_finite`` without synchronisation: records failures on the device, raises in ``check()``."""

    def __init__(self, device: torch.device, reducer: Reducer | None = None) -> None:
        self._reducer = reducer or Single()
        self._calls = torch.zeros((), dtype=torch.int64, device=device)
        self._first = torch.zeros((), dtype=torch.int64, device=device)  # the call that found the first bad loss
        self._bad = torch.zeros((), dtype=torch.bool, device=device)
        self._where: dict[str, Tensor] = {}  # side -> the indices of the first bad batch, -1 where the loss is finite

    def __call__(self, side: str, losses: Tensor, index: Tensor) -> None:
        finite = losses.isfinite()
        places = torch.where(finite, -1, index)
        known = self._where.setdefault(side, torch.full_like(places, -1))
        if len(known) == len(places):
            known.copy_(torch.where(self._bad, known, places))
        self._calls.add_(1)
        self._first.copy_(torch.where(self._bad, self._first, self._calls))
        self._bad.logical_or_(~finite.all())

    def check(self) -> None:
        """Raise if any batch since the start had a non-finite loss (this synchronises with the device)."""
        if not self._reducer.largest(int(self._bad)):
            return
        firsts = self._reducer.every(int(self._first) if bool(self._bad) else None)
        earliest = min(first for first in firsts if first is not None)  # later failures are its consequences
        mine = firsts[self._reducer.rank] == earliest
        for side in ("source", "target"):
            places = self._where[side].tolist() if mine and side in self._where else []
            if found := _of_all_ranks(self._reducer, side, [place for place in places if place >= 0]):
                raise NonFiniteLoss(side, found)
        raise NonFiniteLoss("source", [])


def make_guard(device: torch.device, reducer: Reducer) -> Guard:
    """The guard that stops a training, for this device and these ranks."""
    if device.type == "cuda":
        return DeferredGuard(device, reducer)
    return require_finite if isinstance(reducer, Single) else AgreedGuard(reducer)


def check_guard(guard: Guard) -> None:
    """Raise any deferred non-finite error."""
    if isinstance(guard, DeferredGuard):
        guard.check()


def _of_all_ranks(reducer: Reducer, side: str, places: list[int]) -> list[int]:
    """The bad indices of all ranks, in the whole data set: source index p of rank r is example p·ranks + r."""
    if side == "source":
        places = [place * reducer.ranks + reducer.rank for place in places]
    return sorted({place for found in reducer.every(places) for place in found})
