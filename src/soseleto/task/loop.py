"""Batches and losses of a training loop of the user's own, whose structure nothing here knows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.engines import Engine, Passes
from soseleto.engines.interface import Step, as_loss_vector
from soseleto.errors import UsageError
from soseleto.parallel.micro_batches import LossOf, Sharing

PerExampleLoss = Callable[[Any, Any], Tensor]  # loss(model, batch) -> (B,)
JoinBatches = Callable[[Any, Any], Any]  # of source and target to one batch, source first; None where they cannot join


@dataclass(frozen=True)
class LoopBatch(Batch):
    """A batch of any structure: ``inputs`` is what the user's loop has."""

    def split(self, size: int | list[int]) -> list[Batch]:
        assert size == len(self), "a batch of the user's own is never cut"
        return [self]


@dataclass
class LoopLosses:
    """The user's two losses, under autocast and multiplied by a factor where the loop asks for that."""

    source_loss: PerExampleLoss
    target_loss: PerExampleLoss
    join: JoinBatches | None = None
    forward: Callable[[], Any] = field(default=nullcontext)
    factor: Tensor | None = None
    _last: tuple[Batch, Batch, Any] | None = None

    def source(self, model: nn.Module, batch: Batch) -> Tensor:
        losses = self._of(self.source_loss, model, batch)
        if len(losses) != len(batch):
            raise UsageError(
                f"loss returned {len(losses)} losses for {len(batch)} indices: give one index per example of the batch."
            )
        return losses

    def target(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._of(self.target_loss, model, batch)

    def can_join(self, source: Batch, target: Batch) -> bool:
        # Nothing is known about the structure of the user's batches, unless the user can join them.
        return self.join is not None and self._joined(source, target) is not None

    def joint(self, model: nn.Module, source: Batch, target: Batch) -> Tensor:
        n = len(source) + len(target)
        return self.source(model, LoopBatch(source.index.new_zeros(n), self._joined(source, target), source.index))

    def _joined(self, source: Batch, target: Batch) -> Any:
        """Both as one batch; made once for each pair."""
        assert self.join is not None
        if self._last is None or self._last[0] is not source or self._last[1] is not target:
            self._last = source, target, self.join(source.inputs, target.inputs)
        return self._last[2]

    def _of(self, loss: PerExampleLoss, model: nn.Module, batch: Batch) -> Tensor:
        with self.forward():
            losses = as_loss_vector(loss(model, batch.inputs))
        return losses if self.factor is None else losses * self.factor

    @contextmanager
    def inside(self, device: torch.device, factor: Tensor | None) -> Iterator[None]:
        """Inside, losses carry the factor, and autocast is on in the forward passes only, if it was on outside."""
        cast = torch.is_autocast_enabled(device.type)
        dtype = torch.get_autocast_dtype(device.type) if cast else None
        self.factor = factor
        if cast:
            # The outer autocast would keep cast weights, and with them a graph that the target's backward has freed.
            self.forward = lambda: torch.autocast(device.type, dtype, cache_enabled=False)
        try:
            with torch.autocast(device.type, enabled=False) if cast else nullcontext():
                yield
        finally:
            self.forward, self.factor, self._last = nullcontext, None, None


def batch_length(batch: Any) -> int | None:
    """The number of examples: the length of the first tensor in the batch that is not empty; None without tensors."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.ndim else None
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, list | tuple) else ()
    lengths = [n for n in map(batch_length, values) if n is not None]
    return next((n for n in lengths if n), 0 if lengths else None)


@dataclass(frozen=True)
class Unscaled:
    """``inner`` for losses that come multiplied by ``factor`` (None: as they are): what leaves is divided by it.

    With a ``GradScaler`` losses are multiplied by its factor before the backward pass, so that small gradients do not
    underflow in float16, and gradients and alignments are divided by it afterwards. Numbers of the target gradient
    that are not finite count as zero, and so do alignments that are not finite: one bad batch leaves weights and
    running means finite. Nothing here synchronises with a GPU.
    """

    inner: Sharing
    factor: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gradient(
        self, model: nn.Module, loss: LossOf, batch: Any, coefficients: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, gradients = self.inner.gradient(model, loss, batch, coefficients)
        return self._down(losses), self._all_down(gradients)

    def losses(self, model: nn.Module, loss: LossOf, batch: Any) -> Tensor:
        return self._down(self.inner.losses(model, loss, batch))

    def passes(self, engine: Engine, step: Step) -> Passes:
        def to_direction(raw: dict[str, Tensor]) -> dict[str, Tensor]:
            return step.to_direction(_zero_unless_finite(self._all_down(raw)))

        passes = self.inner.passes(engine, replace(step, to_direction=to_direction))
        q = self._down(passes.alignment)
        return Passes(
            source_losses=self._down(passes.source_losses),
            target_losses=self._down(passes.target_losses),
            alignment=torch.where(q.isfinite(), q, torch.zeros_like(q)),
            source_gradient=self._all_down(passes.source_gradient),
            target_gradient=self._all_down(passes.target_gradient),
        )

    def _down(self, values: Tensor) -> Tensor:
        return values if self.factor is None else values / self.factor.to(values.dtype)

    def _all_down(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradients if self.factor is None else {name: self._down(g) for name, g in gradients.items()}


def _zero_unless_finite(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: g.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0) for name, g in gradients.items()}
