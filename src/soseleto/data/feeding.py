"""An epoch's batches, gathered, augmented and standardised a block of steps at a time.

On a GPU launching the kernels for a small batch takes longer than running them; a block launches them once for many
steps. The batches are a function of (seed, purpose, epoch, step), so a resumed epoch continues with the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import tee
from typing import NamedTuple

import torch
from torch import Tensor

from soseleto.data import structure
from soseleto.data.augment import Augment, Rows
from soseleto.data.draws import Draws
from soseleto.data.example_set import ExampleSet
from soseleto.data.randomness import generator, seed_for
from soseleto.data.structure import Inputs
from soseleto.data.views import AnyViews

_BLOCK_BYTES = 1 << 26  # of float inputs
_BLOCK_STEPS = 16


class Fed(NamedTuple):
    places: Tensor  # (B,) indices into the data set
    inputs: Inputs  # (B, ...) as the model expects them
    labels: Tensor


def feed(
    examples: ExampleSet,
    batches: Sequence[Tensor],
    *,
    seed: int,
    epoch: int,
    purpose: str = "source/augment",
    augment: Augment | AnyViews | None = None,
    prepare: Callable[[Inputs], Inputs] | None = None,
    start: int = 0,
    keep: Callable[[Tensor], Tensor] | None = None,
) -> Iterator[Fed]:
    """Yield the index batches ``batches[start:]`` with inputs and labels, on the examples' device.

    ``augment`` is applied to the inputs as stored, then ``prepare`` (such as a Preprocess). With views the inputs are a
    tuple of them, and those of an example depend on (seed, purpose, epoch, step, its index) alone. ``keep`` maps a
    batch of indices to the mask of rows to yield; those rows are the same as in the whole batch.
    """
    steps = block_steps(examples, len(batches[0]) if len(batches) else 1)  # only the last can be smaller
    firsts = range(start - start % steps, len(batches), steps)
    blocks, ahead = tee(_block(batches[first : first + steps], keep) for first in firsts)
    taken = examples.read((block.places for block in ahead), seed=seed, purpose=f"{purpose}/{epoch}")
    for first, block, (inputs, labels) in zip(firsts, blocks, taken, strict=True):
        if isinstance(augment, AnyViews):
            inputs = augment(inputs, block.counted(seed_for(seed, f"{purpose}/{epoch}"), first, examples.device))
        elif augment is not None and len(block.places):
            random = generator(seed, f"{purpose}/{epoch}", first // steps, examples.device)
            inputs = augment(inputs, block.draws(random))
        if prepare is not None:
            inputs = tuple(map(prepare, inputs)) if isinstance(augment, AnyViews) else prepare(inputs)
        whole = (block.places.to(examples.device), inputs, labels)
        made = [whole] if len(block.sizes) == 1 else structure.split(whole, block.sizes)
        del inputs, labels, whole
        for _ in range(max(0, start - first)):  # taken before the run was resumed
            made.pop(0)
        while made:  # yielded one by one, so that no batch is referenced here longer than needed
            yield Fed(*made.pop(0))


@dataclass(frozen=True)
class _Block:
    """The batches of some steps in one: which rows of how many are kept, and how many of each batch."""

    places: Tensor
    sizes: list[int]
    rows: Tensor | None = None
    total: int = 0

    def draws(self, random: torch.Generator) -> torch.Generator | Rows:
        """What augmentation draws from, so that kept rows get the same numbers as in the whole batches."""
        return random if self.rows is None else Rows(random, self.total, self.rows.to(random.device))

    def counted(self, key: int, first: int, device: torch.device) -> Draws:
        """Draws by example and step; a target example occurs many times in an epoch."""
        steps = torch.arange(first, first + len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
        return Draws.of(key, self.places.to(device), steps.to(device))


def _block(batches: Sequence[Tensor], keep: Callable[[Tensor], Tensor] | None) -> _Block:
    flat = torch.cat(list(batches)) if len(batches) > 1 else batches[0]
    if keep is None:
        return _Block(flat, [len(batch) for batch in batches])
    masks = [keep(batch) for batch in batches]
    rows = torch.cat(masks).nonzero().squeeze(1)
    return _Block(flat[rows], [int(mask.sum()) for mask in masks], rows, len(flat))


def block_steps(examples: ExampleSet, batch_size: int) -> int:
    """Number of steps in a block; depends on device and shapes alone, so that a resumed run has the same blocks."""
    if examples.reads_ahead or examples.device.type == "cpu":
        return 1  # no launch cost, and a small batch stays in the processor's cache
    numbers = sum(tensor[0].numel() for tensor in structure.tensors(examples.sample()))
    one = 4 * batch_size * max(1, numbers)
    return max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // one))
