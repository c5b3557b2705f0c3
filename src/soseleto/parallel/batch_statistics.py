"""BatchNorm in a step that is divided over ranks or micro-batches.

Its statistics are those of each part, as with DistributedDataParallel and gradient accumulation: losses, alignments and
gradients are those of the parts evaluated one by one. So the result depends on the number of parts, and a message says
so. After each step the running statistics become their mean over the ranks, so that all ranks save and evaluate the
same model. SyncBatchNorm is refused: it exchanges messages in every forward and backward pass, which ranks with
different numbers of passes would wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from soseleto.engines.shards import sharded_modules
from soseleto.errors import UsageError
from soseleto.parallel.reducer import Reducer

PER_PART = (
    "BatchNorm takes its statistics over each part of a batch (per rank and micro-batch), as DistributedDataParallel "
    "and gradient accumulation do, so that another number of parts trains another model"
)


def batch_norms(model: nn.Module) -> dict[str, nn.modules.batchnorm._BatchNorm]:
    """The BatchNorms in training mode, by name."""
    kind = nn.modules.batchnorm._BatchNorm
    return {name: module for name, module in model.named_modules() if isinstance(module, kind) and module.training}


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
    buffers = _running(model) if reducer.ranks > 1 else []
    if not buffers:
        return
    mean = reducer.sum(torch.cat([b.flatten().double() for b in buffers])) / reducer.ranks
    for buffer, values in zip(buffers, mean.split([b.numel() for b in buffers]), strict=True):
        # a count of batches: some ranks may have had no examples in this step
        buffer.copy_((values if buffer.is_floating_point() else values.ceil()).view_as(buffer))


@contextmanager
def running_statistics_restored(model: nn.Module) -> Iterator[None]:
    """The running statistics are unchanged by what happens inside: for a pass that is made twice."""
    buffers = _running(model)
    before = [b.clone() for b in buffers]
    yield
    for buffer, values in zip(buffers, before, strict=True):
        buffer.data.copy_(values)


def single_example(error: BaseException) -> UsageError | None:
    """The UsageError for torch's error about BatchNorm on a single example; None for any other error."""
    if not isinstance(error, ValueError) or "more than 1 value per channel" not in str(error):
        return None
    return UsageError(
        "a batch or a part of it has a single example, for which BatchNorm has no statistics: choose batch_size, "
        "target_batch_size, micro_batch_size and the number of ranks so that every part has two examples or more."
    )


def _running(model: nn.Module) -> list[Tensor]:
    return [b for module in batch_norms(model).values() for b in module.buffers(recurse=False)]
