"""An epoch's batches, gathered, augmented and standardised a block of steps at a time.

On a GPU launching the kernels for a small batch takes longer than running them; a block launches them once for many
steps. The batches are a function of (seed, purpose, epoch, step), so a resumed epoch continues with the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from soseleto.data.augment import Augment, Rows
from soseleto.data.examples import Examples
from soseleto.data.randomness import generator

_BLOCK_BYTES = 1 << 26  # of float inputs
_BLOCK_STEPS = 16


class Fed(NamedTuple):
    places: Tensor  # (B,) indices into the data set
    inputs: Tensor  # (B, ...) as the model expects them
    labels: Tensor


def feed(
    examples: Examples,
    batches: Sequence[Tensor],
    *,
    seed: int,
    epoch: int,
    purpose: str = "source/augment",
    augment: Augment | None = None,
    prepare: Callable[[Tensor], Tensor] | None = None,
    start: int = 0,
    keep: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Fed]:
    """Yield the index batches ``batches[start:]`` with inputs and labels, on the examples' device.

    ``augment`` is applied to the inputs as stored, then ``prepare`` (such as a Preprocess). ``keep`` maps a batch of
    indices to the mask of rows to yield; those rows are the same as in the whole batch.
    """
    steps = block_steps(examples, max((len(batch) for batch in batches), default=1))
    for first in range(start - start % steps, len(batches), steps):
        random = generator(seed, f"{purpose}/{epoch}", first // steps, examples.device)
        made = _block(examples, batches[first : first + steps], augment, prepare, random, keep)
        while made:  # yielded one by one, so that no batch is referenced here longer than needed
            one = made.pop(0)
            if first >= start:
                yield one
            first += 1
            del one


def _block(
    examples: Examples,
    block: Sequence[Tensor],
    augment: Augment | None,
    prepare: Callable[[Tensor], Tensor] | None,
    random: torch.Generator,
    keep: Callable[[Tensor], Tensor] | None,
) -> list[Fed]:
    draws: torch.Generator | Rows = random
    sizes = [len(batch) for batch in block]
    flat = torch.cat(list(block)) if len(block) > 1 else block[0]
    if keep is not None:
        masks = [keep(batch) for batch in block]
        rows = torch.cat(masks).nonzero().squeeze(1)
        draws, flat, sizes = Rows(random, len(flat), rows.to(random.device)), flat[rows], [int(m.sum()) for m in masks]
    flat = flat.to(examples.device)
    inputs, labels = examples.take(flat)
    if augment is not None and len(flat):
        inputs = augment(inputs, draws)
    if prepare is not None:
        inputs = prepare(inputs)
    return [Fed(*parts) for parts in zip(*(torch.split(t, sizes) for t in (flat, inputs, labels)), strict=True)]


def block_steps(examples: Examples, batch_size: int) -> int:
    """Number of steps in a block; depends on device and shapes alone, so that a resumed run has the same blocks."""
    if examples.device.type == "cpu":
        return 1  # no launch cost, and a small batch stays in the processor's cache
    one = 4 * batch_size * max(1, examples.inputs[0].numel())
    return max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // one))
