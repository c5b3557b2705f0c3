"""The work of one step, divided over ranks and over micro-batches.

A step's result is that of the whole batch: losses and alignments belong to single examples, and gradients are sums over
examples. With BatchNorm in training mode, statistics are those of each part (``batch_statistics``). The target comes
first, because every source example is compared with the gradient of the whole target batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.engines import Engine, Losses, Passes, trainable
from soseleto.engines.autograd import add_gradients, gradient
from soseleto.engines.contract import (
    Coefficients,
    Direction,
    SourcePass,
    SourceStep,
    Step,
    ToDirection,
    reductions_dtype,
)
from soseleto.engines.shards import reshard
from soseleto.errors import UsageError
from soseleto.parallel.batch_statistics import running_statistics_restored
from soseleto.parallel.reducer import Reducer, Single

LossOf = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Sharing:
    """How a step is divided.

    reducer: the ranks that take part
    micro_batch_size: maximum examples per forward pass; None for whole batches
    even: whether micro-batches are of equal size, up to one example, so that none has too few for BatchNorm
    """

    reducer: Reducer = field(default_factory=Single)
    micro_batch_size: int | None = None
    even: bool = False

    @property
    def nothing(self) -> bool:
        """Whether nothing is divided: one process, whole batches."""
        return isinstance(self.reducer, Single) and self.micro_batch_size is None

    def sum(self, value: Tensor) -> Tensor:
        """Σ over ranks."""
        return self.reducer.sum(value)

    def mean(self, values: Tensor, batch: Batch) -> Tensor:
        """The mean over the whole batch, of which ``values`` are this rank's part."""
        return values.mean() if self.nothing else self.sum(values.sum()) / batch.total

    def mean_loss(self, model: nn.Module, loss: LossOf, batch: Batch) -> Tensor:
        """The mean loss, without a graph."""
        with torch.no_grad():
            losses = [loss(model, part)[:count] for part, count in self._parts(batch)]
        reshard(model)
        return self.mean(_joined(losses, model), batch)

    def losses(self, model: nn.Module, loss: LossOf, batch: Batch) -> Tensor:
        """This rank's losses, from a forward pass of training."""
        found = [loss(model, part)[:count].detach() for part, count in self._parts(batch)]
        reshard(model)
        return _joined(found, model)

    def gradient(
        self, model: nn.Module, loss: LossOf, batch: Batch, side: str, coefficients: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's losses, and the gradient of Σ c_j ℓ_j over all ranks; c = 1/total by default."""
        parameters = trainable(model)
        losses: list[Tensor] = []
        total: dict[str, Tensor] = {}
        for part, c in self._weighted(batch, coefficients):
            found = loss(model, part)
            add_gradients(total, gradient(found, parameters, c.to(found.dtype)))
            losses.append(found.detach())
        return _joined(losses, model), self.reducer.sum_gradients(total, parameters, side)

    def passes(
        self,
        engine: Engine,
        model: nn.Module,
        losses: Losses,
        source: Batch,
        target: Batch,
        *,
        to_direction: ToDirection,
        coefficients: Coefficients,
        wanted: Collection[str] | None = None,
    ) -> Passes:
        """``engine.passes`` of the whole batch; losses and alignments are those of this rank's part."""
        step = Step(model, losses, source, target, to_direction, coefficients, wanted)
        if self.nothing:
            return engine.passes(step)
        target_losses, target_gradient = self.gradient(model, losses.target, target, "target")
        direction, target_gradient = to_direction(target_gradient), step.to_return(target_gradient)
        found = self.source_pass(engine, model, losses.source, source, direction, coefficients)
        return Passes(found.losses, target_losses, found.alignment, found.gradient, target_gradient)

    def source_pass(
        self,
        engine: Engine,
        model: nn.Module,
        loss: LossOf,
        source: Batch,
        direction: Direction,
        coefficients: Coefficients,
    ) -> SourcePass:
        """``engine.source_pass`` of the whole batch; losses and alignments are those of this rank's part."""
        step = SourceStep(model, loss, source, direction, coefficients)
        if self.nothing:
            return engine.source_pass(step)
        if callable(coefficients):
            return self._two_sweeps(engine, step)
        parts = [
            engine.source_pass(replace(step, batch=part, coefficients=c))
            for part, c in self._weighted(source, coefficients)
        ]
        total: dict[str, Tensor] = {}
        for part in parts:
            add_gradients(total, part.gradient)
        return SourcePass(
            _joined([part.losses for part in parts], model),
            _joined([part.alignment for part in parts], model),
            self.reducer.sum_gradients(total, trainable(model), "source"),
        )

    def _two_sweeps(self, engine: Engine, step: SourceStep) -> SourcePass:
        """The alignments of all parts first, then the gradient, whose coefficients may depend on them."""
        with running_statistics_restored(step.model):  # the second sweep updates them
            alignment = self._alignment(engine, step)
        c = step.coefficients(alignment) if callable(step.coefficients) else step.coefficients
        losses, total = self.gradient(step.model, step.loss, step.batch, "source", c)
        return SourcePass(losses, alignment, total)

    def _alignment(self, engine: Engine, step: SourceStep) -> Tensor:
        parts = self._parts(step.batch)
        found = [engine(step.model, step.loss, part, step.direction)[1][:count] for part, count in parts]
        return _joined(found, step.model)

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, int]]:
        """The micro-batches, each with the number of its rows that are examples of the batch."""
        size: int | list[int] = self.micro_batch_size or len(batch)
        if self.even and isinstance(size, int) and size < len(batch):
            size = _even(len(batch), -(-len(batch) // size))
        for part in batch.split(size) if len(batch) else []:
            yield part, len(part)

    def _weighted(self, batch: Batch, coefficients: Tensor | None) -> Iterator[tuple[Batch, Tensor]]:
        """The micro-batches with their coefficients: 1/total by default, 0 for rows that are no examples."""
        if coefficients is None:
            coefficients = torch.full((len(batch),), 1.0 / batch.total, dtype=torch.float64, device=batch.index.device)
        begin = 0
        for part, count in self._parts(batch):
            c = coefficients[begin : begin + count]
            yield part, c if count == len(part) else torch.cat([c, c.new_zeros(len(part) - count)])
            begin += count


def require_sharing(method: object, name: str) -> None:
    """Raise for a method whose step cannot be divided."""
    if not getattr(method, "shares_work", False):
        raise UsageError(
            f"the method {name!r} trains in one process and on whole batches with these settings: leave out "
            "micro_batch_size and start one process, or use soseleto, ordinary, mixed or target_only."
        )


def _even(n: int, parts: int) -> list[int]:
    """Sizes of parts that differ by at most one."""
    smaller, more = divmod(n, parts)
    return [smaller + 1] * more + [smaller] * (parts - more)


def _joined(parts: Sequence[Tensor], model: nn.Module) -> Tensor:
    """The parts' losses or alignments in one vector; for a rank without examples an empty one of the same type."""
    if parts:
        return torch.cat(list(parts))
    parameter = next(model.parameters())
    return torch.zeros(0, dtype=reductions_dtype(parameter.dtype), device=parameter.device)
