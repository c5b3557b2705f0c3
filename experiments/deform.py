"""Random deformations of images of digits, as table 2 has them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.data.augment import Augment, Random, uniform

_POINTS = 4  # control points of the elastic deformation, along each side


@dataclass(frozen=True)
class Deform(Augment):
    """Random changes of image batches (N, C, H, W), uint8 or float, before those of ``Augment``.

    rotate: rotate by up to this many degrees in either direction
    scale: enlarge or shrink by up to this fraction (0.1: factors from 0.9 to 1.1)
    shift: translate by up to this fraction of the width and of the height
    shear: shear by up to this many degrees in either direction, like slanted handwriting
    elastic: smooth deformation; a 4 x 4 grid of points moves by up to this fraction of width and height
    sign: with probability 1/2 take the negative (255 - x for uint8, -x for float)
    """

    rotate: float = 0.0
    scale: float = 0.0
    shift: float = 0.0
    sign: bool = False
    shear: float = 0.0
    elastic: float = 0.0

    def _changed(self, inputs: Tensor, generator: Random) -> Tensor:
        if self.rotate or self.scale or self.shift or self.shear or self.elastic:
            inputs = self._resample(inputs, generator)
        inputs = super()._changed(inputs, generator)
        if self.sign:
            chosen = uniform(1, inputs, generator)[0].view(-1, 1, 1, 1) < 0.5
            inputs = torch.where(chosen, -inputs if inputs.dtype.is_floating_point else 255 - inputs, inputs)
        return inputs

    def _resample(self, inputs: Tensor, generator: Random) -> Tensor:
        """Rotation, scale, shift, shear and elastic deformation in one bilinear resampling, padded with zeros."""
        floats = inputs if inputs.dtype.is_floating_point else inputs.float()
        matrix = self._matrices(floats, generator)
        grid = F.affine_grid(matrix, list(inputs.shape), align_corners=False)
        if self.elastic:
            grid = grid + self._displacements(floats, generator)
        moved = F.grid_sample(floats, grid.to(floats.dtype), padding_mode="zeros", align_corners=False)
        return moved if inputs.dtype.is_floating_point else moved.round_().clamp_(0, 255).to(inputs.dtype)

    def _matrices(self, inputs: Tensor, generator: Random) -> Tensor:
        """(N, 2, 3) affine maps from output to input coordinates, in units of half the image side."""
        n, _, h, w = inputs.shape
        angle, factor, x, y = uniform(4, inputs, generator) * 2 - 1
        angle = angle * math.radians(self.rotate)
        cos, sin = angle.cos(), angle.sin()
        inverse = 1 / (1 + factor * self.scale)
        # Rotation is in pixel units, so that a non-square image is not sheared.
        top = torch.stack([cos * inverse, sin * inverse * (h / w), -2 * x * self.shift], dim=1)
        bottom = torch.stack([-sin * inverse * (w / h), cos * inverse, -2 * y * self.shift], dim=1)
        if self.shear:
            slant = torch.tan((uniform(1, inputs, generator)[0] * 2 - 1) * math.radians(self.shear)) * (h / w)
            top = top + slant[:, None] * bottom
        return torch.stack([top, bottom], dim=1).view(n, 2, 3)

    def _displacements(self, inputs: Tensor, generator: Random) -> Tensor:
        """(N, H, W, 2) displacement of each pixel, in units of half the image side, interpolated from 4 x 4 points."""
        n, _, h, w = inputs.shape
        draws = uniform(2 * _POINTS**2, inputs, generator) * 2 - 1
        points = (2 * self.elastic * draws).T.reshape(n, 2, _POINTS, _POINTS)
        field = F.interpolate(points, (h, w), mode="bicubic", align_corners=True)
        return field.permute(0, 2, 3, 1)
