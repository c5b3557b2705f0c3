"""Out of memory: find the number of examples per forward pass that fits."""

from __future__ import annotations

from typing import Any

import torch

from soseleto.data.batches import Batch
from soseleto.engines.contract import Step
from soseleto.engines.shards import sharded_modules
from soseleto.engines.unchanged import unchanged
from soseleto.errors import OutOfMemory, counted
from soseleto.parallel.micro_batches import Sharing, batch_norms
from soseleto.task.task import Task

_PHRASES = ("out of memory", "can't allocate memory", "not enough memory")


def is_out_of_memory(error: Exception) -> bool:
    """PyTorch has an exception for it on a GPU, and several messages on a CPU."""
    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(phrase in str(error).lower() for phrase in _PHRASES)


def too_large(task: Task, state: Any, source: Batch, target: Batch, *, whole: bool) -> OutOfMemory:
    """The error for a step that did not fit, with a micro-batch size that was tried and fits.

    whole: the training takes no micro-batches
    """
    now = task.sharing.micro_batch_size or max(len(source), len(target))
    missing = f"there is not enough memory on {task.device} for {counted(now, 'example')} at a time"
    if whole:
        return OutOfMemory(f"{missing}: {_smaller_batch(source, target)}, in a new run folder.")
    half = max(now // 2, 1)
    untried = f"add compute=Compute(micro_batch_size={half}) or less, which {_effect(task)}"
    if sharded_modules(task.model):  # no rank can try a size alone
        return OutOfMemory(f"{missing}: {untried}; run the same again to resume.")
    try:
        size = size_that_fits(task, state, source, target, now // 2)
    except Exception:  # of the trial, which does not call the losses as the step does
        return OutOfMemory(f"{missing}: {untried}; run the same again to resume from the last checkpoint.")
    fix = (
        "not even one example at a time fits, so take a smaller model, or checkpoint its activations"
        if size is None
        else f"add compute=Compute(micro_batch_size={size}) (--micro-batch-size {size}), which fits and {_effect(task)}"
    )
    return OutOfMemory(f"{missing}: {fix}; run the same again to resume from the last checkpoint.")


def _smaller_batch(source: Batch, target: Batch) -> str:
    """The larger batch, halved."""
    name, size = ("batch_size", len(source)) if len(source) >= len(target) else ("target_batch_size", len(target))
    half = max(size // 2, 1)
    return f"write {name}={half} (--{name.replace('_', '-')} {half}) or less"


def _effect(task: Task) -> str:
    if batch_norms(task.model):
        return "gives BatchNorm the statistics of that many examples"
    return "gives the same result"


def size_that_fits(task: Task, state: Any, source: Batch, target: Batch, size: int) -> int | None:
    """The largest of size, size/2, size/4, ... for which this step's passes fit; the model is left unchanged.

    Errors that are not about memory are raised.
    """
    while size >= 1:
        if task.device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            with unchanged(task.model):
                _passes(Sharing(micro_batch_size=size), task, state, source, target)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            size //= 2
        else:
            return size
    return None


def _passes(sharing: Sharing, task: Task, state: Any, source: Batch, target: Batch) -> None:
    engine = getattr(state, "engine", None)
    if engine is None:
        sharing.gradient(task.model, task.losses.source, source, "source")
        return
    sharing.passes(
        engine,
        Step(
            task.model,
            task.losses,
            source,
            target,
            to_direction=lambda gradient: {name: g for name, g in gradient.items() if name in task.shared},
            coefficients=torch.ones(len(source), device=task.device),
        ),
    )
