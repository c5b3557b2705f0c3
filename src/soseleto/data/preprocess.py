"""Standardisation with the statistics of the source, applied to a batch on its device."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from soseleto.errors import DataError, UsageError

_ROWS = 1024  # examples at a time, to bound the memory for the statistics of a large set


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
