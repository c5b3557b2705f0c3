"""Standardisation with the statistics of the source, applied to a batch on its device."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data import structure
from soseleto.data.example_set import ExampleSet
from soseleto.data.precision import SHARE, rounded_away
from soseleto.data.preparation import TablePreparation
from soseleto.data.same_scale import like_trained
from soseleto.data.structure import Inputs
from soseleto.data.text import TextPreparation
from soseleto.errors import DataError, UsageError

EVALUATION_BATCH, TEXTS_AT_A_TIME = 1000, 64  # examples per forward pass without gradients
_ROWS = 1024  # examples at a time, to bound the memory for the statistics of a large set
_LARGE = 1 / 16  # how float32 rounds above 2²⁰


@dataclass(frozen=True)
class Preprocess:
    """``(x - mean) / std`` by channel of images (N, C, ...) or by column of features (N, D).

    uint8 inputs are divided by 255 first, and mean and std are on that 0-to-1 scale; float inputs are not rescaled.
    With an empty ``mean`` inputs such as integer tokens pass through unchanged.

    exact: computed in float64, for numbers such as Unix times that float32 would round away
    """

    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    exact: bool = False

    def __post_init__(self) -> None:
        if len(self.mean) != len(self.std):
            raise UsageError(f"Preprocess has {len(self.mean)} means but {len(self.std)} deviations: give as many.")
        if not all(math.isfinite(value) for value in self.mean + self.std) or min(self.std, default=1) <= 0:
            raise UsageError("Preprocess needs finite means and deviations above 0.")

    @classmethod
    def of(cls, inputs: Tensor) -> Preprocess:
        """The statistics of a source: by channel (3 or more dimensions) or by column (2 dimensions).

        Values that are not finite are ignored; a constant channel or column gets deviation 1, so it becomes 0.
        """
        if not inputs.dtype.is_floating_point and inputs.dtype != torch.uint8:
            return cls()
        total, squares, count = _sums(inputs)
        mean = torch.where(count > 0, total / count.clamp(min=1), 0.0)
        variance = torch.where(count > 0, squares / count.clamp(min=1), 0.0) - mean**2
        std, least = variance.clamp(min=0).sqrt(), 1e-6
        if inputs.dtype == torch.float64 and bool((std < 1e-3 * mean.abs()).any()):  # the squares cancel
            _, squares, count = _sums(inputs, about=mean)
            std, least = (squares / count.clamp(min=1)).sqrt(), 1e-10
        constant = ~(std > least * (1 + mean.abs()))
        std = torch.where(constant, 1.0, std)
        scale = 255.0 if inputs.dtype == torch.uint8 else 1.0
        return cls(
            tuple((mean / scale).tolist()),
            tuple(torch.where(constant, 1.0, std / scale).tolist()),
            exact=rounded_away(inputs, SHARE * std),
        )

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
            return inputs.to(scale.dtype, copy=True).mul_(scale).add_(offset).to(torch.float32)
        return torch.mul(inputs, scale).add_(offset).to(torch.float32)

    def to_dict(self) -> dict[str, Any]:
        return {"mean": list(self.mean), "std": list(self.std)} | ({"exact": True} if self.exact else {})

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Preprocess:
        exact = fields.get("exact") is True
        return cls(tuple(map(float, fields["mean"])), tuple(map(float, fields["std"])), exact)


@lru_cache(maxsize=32)
def _constants(preprocess: Preprocess, device: str, ndim: int, bytes_in: bool) -> tuple[Tensor, Tensor]:
    """Scale and offset of x·scale + offset, each of shape (1, C, 1, ...)."""
    shape = (1, -1) + (1,) * (ndim - 2)
    mean = torch.tensor(preprocess.mean, dtype=torch.float64).reshape(shape)
    std = torch.tensor(preprocess.std, dtype=torch.float64).reshape(shape)
    scale = 1 / (std * (255.0 if bytes_in else 1.0))
    dtype = torch.float64 if preprocess.exact else torch.float32
    return scale.to(device, dtype), (-mean / std).to(device, dtype)


def single_precision(inputs: Tensor) -> Tensor:
    """float32, or float64 as it is where float32 would round differences away, for standardisation."""
    if inputs.dtype != torch.float64 or inputs.ndim < 2 or not len(inputs):
        return inputs.to(torch.float32)
    # Large values count whatever their spread: that of the source, by which they are divided, may be smaller.
    keep = rounded_away(inputs, torch.tensor([_LARGE])) or Preprocess.of(inputs).exact
    return inputs if keep else inputs.to(torch.float32)


def _sums(inputs: Tensor, about: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Sum, sum of squares and count of the finite values, by channel or column, in float64.

    about: (C,) what is subtracted first
    """
    if len(inputs) == 0 or inputs.ndim < 2:
        raise DataError(f"inputs of shape {tuple(inputs.shape)} have no channels or columns to standardise by.")
    one = _byte_sums if inputs.dtype == torch.uint8 else partial(_float_sums, about=about)
    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:  # torch releases the GIL
        pieces = list(pool.map(lambda piece: one(piece.cpu()), torch.split(inputs, _ROWS)))
    total, squares, count = (torch.stack(parts).sum(0) for parts in zip(*pieces, strict=True))
    return total, squares, count


def _byte_sums(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """From a histogram of the 256 values: exact, and many times faster than arithmetic on every pixel."""
    counts = torch.stack([torch.bincount(rows[:, c].flatten(), minlength=256) for c in range(rows.shape[1])])
    values = torch.arange(256)
    return (counts * values).sum(1).double(), (counts * values**2).sum(1).double(), counts.sum(1).double()


def _float_sums(rows: Tensor, about: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    reduced = [d for d in range(rows.ndim) if d != 1]
    finite = rows.isfinite()
    if about is not None:
        rows = rows - about.reshape((1, -1) + (1,) * (rows.ndim - 2))
    rows = torch.where(finite, rows, 0.0).double()
    return rows.sum(reduced), (rows * rows).sum(reduced), finite.sum(reduced).double()


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

    def like_trained(self, inputs: Inputs, name: str) -> Inputs:
        """Inputs of another set than the source, on the source's scale."""
        if isinstance(self.standardize, TablePreparation | TextPreparation):
            return inputs
        if self.standardize is None and self.trained == torch.uint8:  # the model gets numbers from 0 to 255
            return inputs
        return like_trained(inputs, self.trained, name)

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


def standardization_from(fields: dict[str, Any]) -> Preprocess | TablePreparation:
    """What ``to_dict`` of either class wrote."""
    return TablePreparation.from_dict(fields) if "columns" in fields else Preprocess.from_dict(fields)


def make_prepare(source: ExampleSet, model: nn.Module, *, standardize: Standardize | bool | None) -> Prepare:
    """Statistics come from the source alone; by default uint8 inputs are standardised and float inputs are not.

    Images get the memory format of the model's convolutions: ``model.to(memory_format=torch.channels_last)`` is enough.
    """
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    last = any(_channels_last(p) for p in model.parameters())
    first, _ = source.take(torch.tensor([0]))
    trained = first.dtype if isinstance(first, Tensor) else None
    if isinstance(standardize, Standardize):
        return Prepare(standardize, dtype, last, trained)
    if not isinstance(first, Tensor):
        if standardize:
            raise UsageError("standardize=True is for inputs that are one tensor: standardise the parts in the data.")
        return Prepare(None, dtype, last)
    wanted = first.dtype == torch.uint8 if standardize is None else standardize
    return Prepare(Preprocess.of(source.sample()) if wanted else None, dtype, last, trained)


def _channels_last(p: Tensor) -> bool:
    return p.ndim == 4 and not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last)
