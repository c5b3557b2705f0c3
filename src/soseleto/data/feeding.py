"""An epoch's batches, gathered, augmented and standardised a block of steps at a time.

On a GPU a small batch costs more to ask for than to compute; a block asks once for many steps. What comes out is a
function of (seed, purpose, epoch, step), so a resumed epoch continues with the very same batches.
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
    places: Tensor  # (B,) in the data set
    inputs: Tensor  # (B, ...) as the model takes them
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
    """The batches ``batches[start:]`` of indices, on the examples' device, one after the other.

    ``augment`` changes the inputs as they are stored; ``prepare`` (a Preprocess, say) makes them what the model takes.
    ``keep`` says which rows of each batch are wanted here: a mask for a batch of indices; those rows are as they are
    in the whole batch.
    """
    steps = block_steps(examples, max((len(batch) for batch in batches), default=1))
    for first in range(start - start % steps, len(batches), steps):
        random = generator(seed, f"{purpose}/{epoch}", first // steps, examples.device)
        made = _block(examples, batches[first : first + steps], augment, prepare, random, keep)
        while made:  # handed out one by one, so that nothing is held here longer than needed
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
    """How many steps a block has: by device and shapes alone, so that a resumed run has the same blocks."""
    if examples.device.type == "cpu":
        return 1  # asking costs little there, and a small batch stays in the processor's cache
    one = 4 * batch_size * max(1, examples.inputs[0].numel())
    return max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // one))
