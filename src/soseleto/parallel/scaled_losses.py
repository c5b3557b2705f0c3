"""Steps inside a training loop of the user's: losses scaled for float16, and batches that are not finite.

With a ``GradScaler`` losses are multiplied by its factor before the backward pass, so that small gradients do not
underflow in float16, and gradients and alignments are divided by it afterwards. Where the target gradient of a batch is
not finite it counts as zero, and so do alignments that are not finite: one bad batch leaves weights and running means
as they are. Nothing here synchronises with a GPU.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.engines import Engine, Losses, Passes
from soseleto.engines.contract import Coefficients, Direction, SourcePass, ToDirection
from soseleto.parallel.micro_batches import LossOf, Sharing


@dataclass(frozen=True)
class Unscaled:
    """``inner`` for losses that come multiplied by ``factor`` (None: as they are): what leaves is divided by it."""

    inner: Sharing
    factor: Tensor | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def gradient(
        self, model: nn.Module, loss: LossOf, batch: Any, side: str, coefficients: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        losses, found = self.inner.gradient(model, loss, batch, side, coefficients)
        return self._down(losses), self._all_down(found)

    def losses(self, model: nn.Module, loss: LossOf, batch: Any) -> Tensor:
        return self._down(self.inner.losses(model, loss, batch))

    def passes(
        self,
        engine: Engine,
        model: nn.Module,
        losses: Losses,
        source: Any,
        target: Any,
        *,
        to_direction: ToDirection,
        coefficients: Coefficients,
        wanted: Collection[str] | None = None,
    ) -> Passes:
        found = self.inner.passes(
            engine,
            model,
            losses,
            source,
            target,
            to_direction=lambda raw: to_direction(_zero_unless_finite(self._all_down(raw))),
            coefficients=self._coefficients(coefficients),
            wanted=wanted,
        )
        return Passes(
            source_losses=self._down(found.source_losses),
            target_losses=self._down(found.target_losses),
            alignment=self._alignment(found.alignment),
            source_gradient=self._all_down(found.source_gradient),
            target_gradient=self._all_down(found.target_gradient),
        )

    def source_pass(
        self,
        engine: Engine,
        model: nn.Module,
        loss: LossOf,
        source: Any,
        direction: Direction,
        coefficients: Coefficients,
    ) -> SourcePass:
        found = self.inner.source_pass(engine, model, loss, source, direction, self._coefficients(coefficients))
        return replace(
            found,
            losses=self._down(found.losses),
            alignment=self._alignment(found.alignment),
            gradient=self._all_down(found.gradient),
        )

    def _coefficients(self, coefficients: Coefficients) -> Coefficients:
        return (lambda q: coefficients(self._alignment(q))) if callable(coefficients) else coefficients

    def _down(self, values: Tensor) -> Tensor:
        return values if self.factor is None else values / self.factor.to(values.dtype)

    def _all_down(self, found: dict[str, Tensor]) -> dict[str, Tensor]:
        return found if self.factor is None else {name: self._down(g) for name, g in found.items()}

    def _alignment(self, q: Tensor) -> Tensor:
        q = self._down(q)
        return torch.where(q.isfinite(), q, torch.zeros_like(q))


def _zero_unless_finite(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """In few kernels, since it is called for every layer."""
    values = [g for g in found.values() if g.numel()]
    if not values:
        return found
    keep = _largest(values) < torch.inf
    zeros = {dtype: keep.new_zeros((), dtype=dtype) for dtype in {g.dtype for g in found.values()}}
    return {name: torch.where(keep, g, zeros[g.dtype]) for name, g in found.items()}


def _largest(values: list[Tensor]) -> Tensor:
    """The largest absolute value; NaN if there is one."""
    if len(values) == 1:
        return torch.linalg.vector_norm(values[0], torch.inf)
    return torch.nn.utils.get_total_norm(values, torch.inf)
