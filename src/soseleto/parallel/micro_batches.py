"""How the work of one step is shared: over ranks, and over micro-batches that follow one another.

A step's result is that of the whole batch: losses and alignments belong to single examples, and gradients are sums
over examples. The target comes first, since every source example is compared with the whole target's gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from soseleto.data.batch import Batch
from soseleto.engines import Engine, Losses, Passes, trainable
from soseleto.engines.autograd import gradient
from soseleto.engines.contract import Coefficients, Direction, SourcePass, ToDirection, reductions_dtype
from soseleto.errors import UsageError
from soseleto.parallel.reducer import Reducer, Single

LossOf = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Sharing:
    """Who else works on a step (``reducer``), and how many examples go through the model at a time."""

    reducer: Reducer = field(default_factory=Single)
    micro_batch_size: int | None = None

    @property
    def nothing(self) -> bool:
        """One process, whole batches."""
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
            parts = [loss(model, part) for part in self._parts(batch)]
        return self.mean(torch.cat(parts) if parts else _none(model), batch)

    def gradient(
        self, model: nn.Module, loss: LossOf, batch: Batch, side: str, coefficients: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's losses, and the gradient of Σ c_j ℓ_j over all ranks; c = 1/total where none are given."""
        parameters = trainable(model)
        if coefficients is None:
            coefficients = torch.full((len(batch),), 1.0 / batch.total, dtype=torch.float64, device=batch.index.device)
        losses: list[Tensor] = []
        found: dict[str, Tensor] = {}
        for part, c in zip(self._parts(batch), self._split(coefficients), strict=True):
            of_part = loss(model, part)
            _add(found, gradient(of_part, parameters, c.to(of_part.dtype)))
            losses.append(of_part.detach())
        return (
            torch.cat(losses) if losses else _none(model),
            self.reducer.sum_gradients(found, parameters, side),
        )

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
    ) -> Passes:
        """What ``engine.passes`` gives for the whole batch; losses and alignments are those of this rank's part."""
        if self.nothing:
            return engine.passes(model, losses, source, target, to_direction=to_direction, coefficients=coefficients)
        target_losses, target_gradient = self.gradient(model, losses.target, target, "target")
        direction = to_direction(target_gradient)
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
        """What ``engine.source_pass`` gives for the whole batch."""
        if self.nothing:
            return engine.source_pass(model, loss, source, direction, coefficients)
        if callable(coefficients):
            return self._two_sweeps(engine, model, loss, source, direction, coefficients)
        parts = [
            engine.source_pass(model, loss, part, direction, c)
            for part, c in zip(self._parts(source), self._split(coefficients), strict=True)
        ]
        found: dict[str, Tensor] = {}
        for part in parts:
            _add(found, part.gradient)
        return SourcePass(
            torch.cat([part.losses for part in parts]) if parts else _none(model),
            torch.cat([part.alignment for part in parts]) if parts else _none(model),
            self.reducer.sum_gradients(found, trainable(model), "source"),
        )

    def _two_sweeps(
        self,
        engine: Engine,
        model: nn.Module,
        loss: LossOf,
        source: Batch,
        direction: Direction,
        coefficients: Callable[[Tensor], Tensor],
    ) -> SourcePass:
        """Where the coefficients follow from all alignments, those come first and the model runs once more."""
        found = [engine(model, loss, part, direction)[1] for part in self._parts(source)]
        alignment = torch.cat(found) if found else _none(model)
        losses, of_parameters = self.gradient(model, loss, source, "source", coefficients(alignment))
        return SourcePass(losses, alignment, of_parameters)

    def _parts(self, batch: Batch) -> list[Batch]:
        return batch.split(self.micro_batch_size or len(batch)) if len(batch) else []

    def _split(self, coefficients: Tensor) -> list[Tensor]:
        if not len(coefficients):
            return []
        return list(coefficients.split(self.micro_batch_size or len(coefficients)))


def require_sharing(method: object, name: str) -> None:
    """Raise for a method whose step cannot be shared."""
    if not getattr(method, "shares_work", False):
        raise UsageError(
            f"the method {name!r} trains in one process and on whole batches with these settings: leave out "
            "micro_batch_size and start one process, or use soseleto, ordinary, mixed or target_only."
        )


def require_independent(model: nn.Module) -> None:
    """Raise where a layer mixes the examples of a batch: its parts would not give what the whole gives."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise UsageError(
                f"{type(module).__name__} {name!r} mixes the examples of a batch, so that ranks and micro-batches "
                "would train another model than the whole batch does: use GroupNorm, or keep that layer in "
                "evaluation mode with a train() of your own."
            )


def _none(model: nn.Module) -> Tensor:
    """No numbers, of the type losses and alignments have."""
    parameter = next(model.parameters())
    return torch.zeros(0, dtype=reductions_dtype(parameter.dtype), device=parameter.device)


def _add(into: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    for name, g in found.items():
        into[name] = into[name] + g if name in into else g
