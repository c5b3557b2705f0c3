"""Random augmentation of image batches, vectorised over the batch and run on its device."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.data.draws import Draws
from soseleto.errors import DataError, UsageError

_POINTS = 4  # control points of the elastic deformation, along each side
_NUMPY = (torch.uint8, torch.float32, torch.float64, torch.float16)  # dtypes that NumPy has too


@dataclass(frozen=True)
class Rows:
    """Random draws for some rows of a batch of ``total`` examples: a row's draws do not depend on the other rows."""

    generator: torch.Generator
    total: int
    rows: Tensor


@dataclass(frozen=True)
class Augment:
    """Random changes of image batches (N, C, H, W), uint8 or float; the dtype is kept.

    crop: pad this many zero pixels on every side, then crop the original size at a random position
    flip: mirror left to right, with probability 1/2
    rotate: rotate by up to this many degrees in either direction
    scale: enlarge or shrink by up to this fraction (0.1: factors from 0.9 to 1.1)
    shift: translate by up to this fraction of the width and of the height
    shear: shear by up to this many degrees in either direction, like slanted handwriting
    elastic: smooth deformation; a 4 x 4 grid of points moves by up to this fraction of width and height
    sign: with probability 1/2 take the negative (255 - x for uint8, -x for float)

    >>> augment = Augment(crop=4, flip=True)
    >>> augment(torch.zeros(8, 3, 32, 32, dtype=torch.uint8), torch.Generator()).shape
    torch.Size([8, 3, 32, 32])
    """

    crop: int = 0
    flip: bool = False
    rotate: float = 0.0
    scale: float = 0.0
    shift: float = 0.0
    sign: bool = False
    shear: float = 0.0
    elastic: float = 0.0

    def __post_init__(self) -> None:
        for field in ("crop", "rotate", "scale", "shift", "shear", "elastic"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise UsageError(f"{field} of Augment must be 0 or more, got {value!r}.")
        if self.crop != int(self.crop):
            raise UsageError(f"crop of Augment must be a whole number of pixels, got {self.crop!r}.")
        if self.scale >= 1:
            raise UsageError(f"scale of Augment must be below 1, got {self.scale!r}: for ±10 % write 0.1.")
        if self.shear >= 90:
            raise UsageError(f"shear of Augment must be below 90 degrees, got {self.shear!r}: write 20, for example.")

    @property
    def nothing(self) -> bool:
        """Whether batches are returned unchanged."""
        return self == Augment()

    def __call__(self, inputs: Tensor, generator: torch.Generator | Rows | Draws) -> Tensor:
        """The augmented batch; random numbers are drawn from ``generator``, on its device, in a fixed order."""
        if self.nothing:
            return inputs
        if inputs.ndim != 4:
            raise DataError(
                f"augmentation is for image batches (N, C, H, W), got shape {tuple(inputs.shape)}: "
                "leave it out for tables and tokens."
            )
        if self.rotate or self.scale or self.shift or self.shear or self.elastic:
            inputs = self._resample(inputs, generator)
        if self.crop or self.flip:
            inputs = self._crop_flip(inputs, generator)
        if self.sign:
            inputs = _negative(inputs, _uniform(1, inputs, generator)[0] < 0.5)
        return inputs

    def _crop_flip(self, inputs: Tensor, generator: torch.Generator | Rows | Draws) -> Tensor:
        pad = int(self.crop)
        draws = _uniform(3, inputs, generator)
        top, left = (draws[:2] * (2 * pad + 1)).to(torch.int64).clamp_(max=2 * pad)  # (N,) each
        mirrored = draws[2] < 0.5 if self.flip else None
        padded = F.pad(inputs, (pad, pad, pad, pad)) if pad else inputs
        if inputs.device.type == "cpu" and inputs.dtype in _NUMPY:
            return _windows_by_copy(padded, top, left, mirrored, pad)
        return _windows_by_gather(padded, top, left, mirrored, pad)

    def _resample(self, inputs: Tensor, generator: torch.Generator | Rows | Draws) -> Tensor:
        """Rotation, scale, shift, shear and elastic deformation in one bilinear resampling, padded with zeros."""
        floats = inputs if inputs.dtype.is_floating_point else inputs.float()
        matrix = self._matrices(floats, generator)
        grid = F.affine_grid(matrix, list(inputs.shape), align_corners=False)
        if self.elastic:
            grid = grid + self._displacements(floats, generator)
        moved = F.grid_sample(floats, grid.to(floats.dtype), padding_mode="zeros", align_corners=False)
        return moved if inputs.dtype.is_floating_point else moved.round_().clamp_(0, 255).to(inputs.dtype)

    def _matrices(self, inputs: Tensor, generator: torch.Generator | Rows | Draws) -> Tensor:
        """(N, 2, 3) affine maps from output to input coordinates, in units of half the image side."""
        n, _, h, w = inputs.shape
        angle, factor, x, y = _uniform(4, inputs, generator) * 2 - 1
        angle = angle * math.radians(self.rotate)
        cos, sin = angle.cos(), angle.sin()
        inverse = 1 / (1 + factor * self.scale)
        # Rotation is in pixel units, so that a non-square image is not sheared.
        top = torch.stack([cos * inverse, sin * inverse * (h / w), -2 * x * self.shift], dim=1)
        bottom = torch.stack([-sin * inverse * (w / h), cos * inverse, -2 * y * self.shift], dim=1)
        if self.shear:
            slant = torch.tan((_uniform(1, inputs, generator)[0] * 2 - 1) * math.radians(self.shear)) * (h / w)
            top = top + slant[:, None] * bottom
        return torch.stack([top, bottom], dim=1).view(n, 2, 3)

    def _displacements(self, inputs: Tensor, generator: torch.Generator | Rows | Draws) -> Tensor:
        """(N, H, W, 2) displacement of each pixel, in units of half the image side, interpolated from 4 x 4 points."""
        n, _, h, w = inputs.shape
        draws = _uniform(2 * _POINTS**2, inputs, generator) * 2 - 1
        points = (2 * self.elastic * draws).T.reshape(n, 2, _POINTS, _POINTS)
        field = F.interpolate(points, (h, w), mode="bicubic", align_corners=True)
        return field.permute(0, 2, 3, 1)


def _windows_by_gather(padded: Tensor, top: Tensor, left: Tensor, mirrored: Tensor | None, pad: int) -> Tensor:
    """One gather, with the flat index of every output pixel in the padded image."""
    n, c, high, wide = padded.shape
    h, w = high - 2 * pad, wide - 2 * pad
    rows = torch.arange(h, device=padded.device) + top[:, None]
    columns = torch.arange(w, device=padded.device)
    if mirrored is not None:
        columns = torch.where(mirrored[:, None], w - 1 - columns, columns)
    columns = columns + left[:, None]
    flat = (rows[:, :, None] * wide + columns[:, None, :]).view(n, 1, h * w).expand(n, c, h * w)
    return padded.reshape(n, c, -1).gather(2, flat).view(n, c, h, w)


def _windows_by_copy(padded: Tensor, top: Tensor, left: Tensor, mirrored: Tensor | None, pad: int) -> Tensor:
    """The same for the CPU, where copying whole rows is several times faster than gathering pixels."""
    array = padded.detach().numpy()
    h, w = padded.shape[2] - 2 * pad, padded.shape[3] - 2 * pad
    windows = np.lib.stride_tricks.sliding_window_view(array, (h, w), axis=(2, 3)).transpose(0, 2, 3, 1, 4, 5)
    made = windows[np.arange(len(array)), top.numpy(), left.numpy()]
    if mirrored is not None:
        chosen = mirrored.numpy()
        made[chosen] = made[chosen][..., ::-1]
    return torch.from_numpy(made)


def _uniform(count: int, inputs: Tensor, generator: torch.Generator | Rows | Draws) -> Tensor:
    """(count, N) numbers in [0, 1), drawn on the generator's device and moved to that of the inputs."""
    if isinstance(generator, Draws):
        return generator.uniform(count)
    if isinstance(generator, Rows):
        random = generator.generator
        draws = torch.rand(count, generator.total, generator=random, device=random.device)[:, generator.rows]
    else:
        draws = torch.rand(count, len(inputs), generator=generator, device=generator.device)
    return draws.to(inputs.device, non_blocking=True)


def _negative(inputs: Tensor, chosen: Tensor) -> Tensor:
    chosen = chosen.view(-1, 1, 1, 1)
    if inputs.dtype.is_floating_point:
        return torch.where(chosen, -inputs, inputs)
    return torch.where(chosen, 255 - inputs, inputs)
