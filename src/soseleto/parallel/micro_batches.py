"""The work of one step, divided over ranks and over micro-batches.

A step's result is that of the whole batch: losses and alignments belong to single examples, and gradients are sums over
examples. The target comes first, because every source example is compared with the gradient of the whole target batch.

BatchNorm in training mode takes its statistics over each part, as with DistributedDataParallel and gradient
accumulation: losses, alignments and gradients are those of the parts evaluated one by one, so the result depends on the
number of parts. After each step the running statistics become their mean over the ranks, so that all ranks save and
evaluate the same model. SyncBatchNorm is refused: it exchanges messages in every forward and backward pass, which ranks
with different numbers of passes would wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from soseleto.data.batches import Batch
from soseleto.engines import Engine, Passes, trainable
from soseleto.engines.autograd import add_gradients, gradient
from soseleto.engines.interface import SourcePass, SourceStep, Step, reductions_dtype
from soseleto.engines.model_state import modules_of, reshard, sharded_modules
from soseleto.errors import UsageError
from soseleto.parallel.reducer import Reducer, Single

LossOf = Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class Sharing:
    """How a step is divided.

    reducer: the ranks that take part
    micro_batch_size: maximum examples per forward pass; None for whole batches. Micro-batches are of equal size, up to
        one example, so that none has too few for BatchNorm
    """

    reducer: Reducer = field(default_factory=Single)
    micro_batch_size: int | None = None

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

    def losses(self, model: nn.Module, loss: LossOf, batch: Batch) -> Tensor:
        """This rank's losses, from a forward pass alone."""
        found = [loss(model, part)[:count].detach() for part, count in self._parts(batch)]
        reshard(model)
        return _joined(found, model)

    def gradient(
        self, model: nn.Module, loss: LossOf, batch: Batch, coefficients: Tensor | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """This rank's losses, and the gradient of Σ c_j ℓ_j over all ranks; c = 1/total by default."""
        parameters = trainable(model)
        losses: list[Tensor] = []
        total: dict[str, Tensor] = {}
        for part, c in self._weighted(batch, coefficients):
            found = loss(model, part)
            add_gradients(total, gradient(found, parameters, c.to(found.dtype)))
            losses.append(found.detach())
        return _joined(losses, model), self.reducer.sum_gradients(total, parameters)

    def passes(self, engine: Engine, step: Step) -> Passes:
        """``engine.passes`` of the whole batch; losses and alignments are those of this rank's part."""
        if self.nothing:
            return engine.passes(step)
        target_losses, target_gradient = self.gradient(step.model, step.losses.target, step.target)
        direction, target_gradient = step.to_direction(target_gradient), step.to_return(target_gradient)
        source = self.source_pass(engine, step.source_step(direction))
        return Passes(source.losses, target_losses, source.alignment, source.gradient, target_gradient)

    def source_pass(self, engine: Engine, step: SourceStep) -> SourcePass:
        """``engine.source_pass`` of the whole batch, whose coefficients are known beforehand."""
        parts = [
            engine.source_pass(replace(step, batch=part, coefficients=c))
            for part, c in self._weighted(step.batch, step.coefficients)
        ]
        total: dict[str, Tensor] = {}
        for part in parts:
            add_gradients(total, part.gradient)
        return SourcePass(
            _joined([part.losses for part in parts], step.model),
            _joined([part.alignment for part in parts], step.model),
            self.reducer.sum_gradients(total, trainable(step.model)),
        )

    def _parts(self, batch: Batch) -> Iterator[tuple[Batch, int]]:
        """The micro-batches, each with the number of its rows that are examples of the batch."""
        n, size = len(batch), self.micro_batch_size or len(batch)
        for part in batch.split(_even(n, -(-n // size)) if size < n else n) if n else []:
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


PER_PART = (
    "BatchNorm takes its statistics over each part of a batch (per rank and micro-batch), as DistributedDataParallel "
    "and gradient accumulation do, so that another number of parts trains another model"
)


def batch_norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """The BatchNorms in training mode, by name."""
    kind = nn.modules.batchnorm._BatchNorm
    found = {name[:-1]: module for module, name in modules_of(model).items() if isinstance(module, kind)}
    return {name: module for name, module in found.items() if module.training}


def require_divisible(model: nn.Module) -> bool:
    """Raise for a BatchNorm that cannot be divided; whether there is one whose statistics are those of parts."""
    found = batch_norms(model)
    for name, module in found.items():
        if isinstance(module, nn.SyncBatchNorm):
            raise UsageError(
                f"SyncBatchNorm {name!r} is not supported with ranks or micro-batches: use BatchNorm, whose statistics "
                "are then those of each rank's part, or GroupNorm."
            )
        if sharded_modules(model):
            raise UsageError(
                f"{type(module).__name__} {name!r} is not supported in a model of fully_shard: use GroupNorm, or keep "
                "that layer in evaluation mode by overriding train()."
            )
    return bool(found)


@torch.no_grad()
def average_running_statistics(model: nn.Module, reducer: Reducer) -> None:
    """Replace the running statistics of each rank by their mean over ranks; a collective."""
    buffers = [b for module in batch_norms(model).values() for b in module.buffers(recurse=False)]
    if reducer.ranks == 1 or not buffers:
        return
    mean = reducer.sum(torch.cat([b.flatten().double() for b in buffers])) / reducer.ranks
    for buffer, values in zip(buffers, mean.split([b.numel() for b in buffers]), strict=True):
        # a count of batches: some ranks may have had no examples in this step
        buffer.copy_((values if buffer.is_floating_point() else values.ceil()).view_as(buffer))


def single_example(error: BaseException) -> UsageError | None:
    """The UsageError for torch's error about BatchNorm on a single example; None for any other error."""
    if not isinstance(error, ValueError) or "more than 1 value per channel" not in str(error):
        return None
    return UsageError(
        "a batch or a part of it has a single example, for which BatchNorm has no statistics: choose batch_size, "
        "target_batch_size, micro_batch_size and the number of ranks so that every part has two examples or more."
    )
