"""From stored examples to what the model takes: gathered, augmented, standardised.

On a GPU launching the kernels for a small batch takes longer than running them: a block of steps is prepared at once.
The batches are a function of (seed, purpose, epoch, step): a resumed epoch continues with the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import tee
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data import structure
from soseleto.data.augment import AnyViews, Augment
from soseleto.data.batches import Batch, ExampleRandom, seed_for
from soseleto.data.lazy import ExampleSet
from soseleto.data.preparation import TablePreparation
from soseleto.data.structure import Inputs
from soseleto.data.text import TextPreparation
from soseleto.errors import DataError, UsageError

EVALUATION_BATCH, TEXTS_AT_A_TIME = 1000, 64  # examples per forward pass without gradients
_BLOCK_BYTES = 1 << 26  # of float inputs
_BLOCK_STEPS = 16
_LARGEST_FLOAT = 1.5  # floats from 0 to 1 that were resized or augmented may be a little outside
_ROWS = 1024  # examples at a time, to bound the memory for the statistics of a large set


# Standardisation with the statistics of the source, applied to a batch on its device


@dataclass(frozen=True)
class Preprocess:
    """``(x - mean) / std`` by channel of images (N, C, ...) or by column of features (N, D).

    uint8 inputs are divided by 255 first, and mean and std are on that 0-to-1 scale; float inputs are not rescaled.
    With an empty ``mean`` inputs such as integer tokens pass through unchanged.
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise UsageError(f"Preprocess has {len(self.mean)} means but {len(self.std)} deviations: give as many.")
        if not all(math.isfinite(value) for value in self.mean + self.std) or min(self.std, default=1) <= 0:
            raise UsageError("Preprocess needs finite means and deviations above 0.")

    @classmethod
    def of(cls, inputs: Tensor) -> Preprocess:
        """The statistics of a source: by channel (3 or more dimensions) or by column (2 dimensions).

        A constant channel or column gets deviation 1, so it becomes 0.
        """
        if not inputs.dtype.is_floating_point and inputs.dtype != torch.uint8:
            return cls()
        if len(inputs) == 0 or inputs.ndim < 2:
            raise DataError(f"inputs of shape {tuple(inputs.shape)} have no channels or columns to standardise by.")
        mean, variance = (_of_bytes if inputs.dtype == torch.uint8 else _of_floats)(inputs)
        std = variance.sqrt()
        constant = std <= 1e-6 * (1 + mean.abs())
        return cls(tuple(mean.tolist()), tuple(torch.where(constant, 1.0, std).tolist()))

    def __call__(self, inputs: Tensor) -> Tensor:
        """Standardised float32 inputs (N, ...), on the device of ``inputs``."""
        if not self.mean:
            return inputs
        if inputs.ndim < 2 or inputs.shape[1] != len(self.mean):
            raise DataError(
                f"inputs of shape {tuple(inputs.shape)} do not match the standardisation "
                f"of {len(self.mean)} channels or columns: the second dimension must be {len(self.mean)}."
            )
        # while a graph is traced, tensors belong to it, and a cache would give them to other callers
        constants = _constants.__wrapped__ if torch.compiler.is_compiling() else _constants
        scale, offset = constants(self, str(inputs.device), inputs.ndim, inputs.dtype == torch.uint8)
        if inputs.device.type == "cpu":  # converting first is twice as fast on a CPU; on a GPU it is one more kernel
            return inputs.to(torch.float32, copy=True).mul_(scale).add_(offset)
        return torch.mul(inputs, scale).add_(offset).to(torch.float32)

    def to_dict(self) -> dict[str, Any]:
        return {"mean": list(self.mean), "std": list(self.std)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Preprocess:
        return cls(tuple(map(float, fields["mean"])), tuple(map(float, fields["std"])))


@lru_cache(maxsize=32)
def _constants(preprocess: Preprocess, device: str, ndim: int, bytes_in: bool) -> tuple[Tensor, Tensor]:
    """Scale and offset of x·scale + offset, each of shape (1, C, 1, ...)."""
    shape = (1, -1) + (1,) * (ndim - 2)
    mean = torch.tensor(preprocess.mean, dtype=torch.float64).reshape(shape)
    std = torch.tensor(preprocess.std, dtype=torch.float64).reshape(shape)
    scale = 1 / (std * (255.0 if bytes_in else 1.0))
    return scale.to(device, torch.float32), (-mean / std).to(device, torch.float32)


def _of_bytes(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of bytes from a histogram of their 256 values, many times faster than arithmetic on each."""

    def histogram(rows: Tensor) -> Tensor:
        return torch.stack([channel.flatten().bincount(minlength=256) for channel in rows.unbind(1)])

    shares = _total(histogram, inputs).double() / (inputs.numel() // inputs.shape[1])
    values = torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ values
    return mean, (shares * (values - mean[:, None]) ** 2).sum(1)


def _of_floats(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """In two passes, since the squares of large numbers would cancel."""
    others = [d for d in range(inputs.ndim) if d != 1]
    count = inputs.numel() // inputs.shape[1]
    mean = _total(lambda rows: rows.double().sum(others), inputs) / count
    about = mean.reshape((1, -1) + (1,) * (inputs.ndim - 2))
    return mean, _total(lambda rows: (rows.double() - about).square().sum(others), inputs) / count


def _total(function: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
    """The sum of ``function`` over pieces of the inputs."""
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:  # torch releases the GIL
        return torch.stack(list(pool.map(lambda rows: function(rows.cpu()), torch.split(inputs, _ROWS)))).sum(0)


# From stored inputs to what the model takes

Standardize = Preprocess | TablePreparation | TextPreparation


@dataclass(frozen=True)
class Prepare:
    """Converts stored inputs to what the model expects: standardisation, dtype and memory format.

    Tensors inside a structure, whose meaning is not known, are not standardised.

    standardize: of tables their preparation, which also encodes categories; of texts theirs, which makes the tensors
        that a language model takes
    trained: the type of the source's inputs, if known
    """

    standardize: Standardize | None
    dtype: torch.dtype
    channels_last: bool = False
    trained: torch.dtype | None = None

    def __call__(self, inputs: Inputs) -> Inputs:
        if self.standardize is not None:
            inputs = self.standardize(inputs)
        return structure.change(self._converted, inputs)

    def match_input_range(self, inputs: Inputs, name: str) -> Inputs:
        """Convert inputs of another set than the source to the source's dtype and range."""
        if isinstance(self.standardize, TablePreparation | TextPreparation):
            return inputs
        if self.standardize is None and self.trained == torch.uint8:  # the model gets numbers from 0 to 255
            return inputs
        return match_input_range(inputs, self.trained, name)

    def _converted(self, inputs: Tensor) -> Tensor:
        if inputs.is_floating_point() or inputs.dtype == torch.uint8:
            inputs = inputs.to(self.dtype)
        if self.channels_last and inputs.ndim == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs

    @property
    def evaluation_batch(self) -> int:
        """Examples per forward pass without gradients."""
        return TEXTS_AT_A_TIME if isinstance(self.standardize, TextPreparation) else EVALUATION_BATCH

    def describe(self) -> dict[str, Any]:
        return {
            "standardize": None if self.standardize is None else self.standardize.to_dict(),
            "dtype": str(self.dtype),
        }


def make_prepare(source: ExampleSet, model: nn.Module, *, standardize: Standardize | bool | None) -> Prepare:
    """Statistics come from the source alone; by default uint8 inputs are standardised and float inputs are not.

    Images get the memory format of the model's convolutions: ``model.to(memory_format=torch.channels_last)`` is enough.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    last = any(
        p.ndim == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
        for p in model.parameters()
    )
    first, _ = source.take(torch.tensor([0]))
    trained = first.dtype if isinstance(first, Tensor) else None
    if isinstance(standardize, Standardize):
        return Prepare(standardize, dtype, last, trained)
    if standardize and trained is None:
        raise UsageError("standardize=True is for inputs that are one tensor: standardise the parts in the data.")
    wanted = trained == torch.uint8 if standardize is None else standardize
    return Prepare(Preprocess.of(source.sample()) if wanted else None, dtype, last, trained)


def match_input_range(inputs: Inputs, trained: torch.dtype | None, name: str) -> Inputs:
    """Convert inputs to the training dtype and range; raises if they have another range.

    Bytes from 0 to 255 and floats from 0 to 1 are the same image; whole numbers from 0 to 255 of any type become bytes.

    trained: the dtype of the training inputs, None if unknown
    name: what the inputs are called in an error
    """
    if not isinstance(inputs, Tensor) or trained is None or inputs.dtype == trained or not inputs.numel():
        return inputs
    if trained != torch.uint8:
        if not trained.is_floating_point or inputs.dtype != torch.uint8:
            return inputs
        if inputs.ndim <= 2:  # features have one scale: their own
            return inputs.to(torch.float32)
        raise DataError(
            f"{name} has bytes, but the model is trained on floats, whose scale may be another: give floats, such "
            "as images.float() / 255."
        )
    low, high = (float(value) for value in inputs.aminmax())
    if inputs.is_floating_point() and not (low < 1.0 - _LARGEST_FLOAT or high > _LARGEST_FLOAT):
        return inputs
    if low >= 0 and high <= 255 and bool((inputs == inputs.round()).all()):
        return inputs.to(torch.uint8)
    raise DataError(
        f"{name} has values from {low:.4g} to {high:.4g}, but the model is trained on bytes: give bytes (uint8), or "
        "floats from 0 to 1."
    )


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
) -> Iterator[Batch]:
    """Yield the index batches ``batches[start:]`` with inputs and labels, on the examples' device.

    ``augment`` is applied to the inputs as stored, then ``prepare`` (such as a Preprocess); with views the inputs are a
    tuple of them. Random numbers of an example depend on (seed, purpose, epoch, step, its index) alone. ``keep`` maps a
    batch of indices to the mask of rows to yield; those rows are the same as in the whole batch.
    """
    steps = block_steps(examples, len(batches[0]) if len(batches) else 1)  # only the last can be smaller
    firsts = range(start - start % steps, len(batches), steps)
    blocks, ahead = tee(
        [batch if keep is None else batch[keep(batch)] for batch in batches[first : first + steps]] for first in firsts
    )
    taken = examples.read((torch.cat(block) for block in ahead), seed=seed, purpose=f"{purpose}/{epoch}")
    for first, block, (inputs, labels) in zip(firsts, blocks, taken, strict=True):
        index, sizes = torch.cat(block).to(examples.device), [len(batch) for batch in block]
        if augment is not None:  # by example and step, since a target example occurs many times in an epoch
            step = torch.arange(first, first + len(sizes)).repeat_interleave(torch.tensor(sizes))
            key = seed_for(seed, f"{purpose}/{epoch}")
            inputs = augment(inputs, ExampleRandom.of(key, index, step.to(examples.device)))
        if prepare is not None:
            inputs = tuple(map(prepare, inputs)) if isinstance(augment, AnyViews) else prepare(inputs)
        whole = (index, inputs, labels)
        parts = [whole] if len(sizes) == 1 else structure.split(whole, sizes)
        del inputs, labels, whole
        del parts[: max(0, start - first)]  # taken before the run was resumed
        while parts:  # yielded one by one, so that no batch is referenced here longer than needed
            yield Batch(*parts.pop(0))


def block_steps(examples: ExampleSet, batch_size: int) -> int:
    """Number of steps in a block; depends on device and shapes alone, so that a resumed run has the same blocks."""
    if examples.reads_ahead or examples.device.type == "cpu":
        return 1  # no launch cost, and a small batch stays in the processor's cache
    numbers = sum(tensor[0].numel() for tensor in structure.tensors(examples.sample()))
    step_bytes = 4 * batch_size * max(1, numbers)
    return max(1, min(_BLOCK_STEPS, _BLOCK_BYTES // step_bytes))
