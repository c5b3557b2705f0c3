"""Strong augmentation of image batches in the manner of RandAugment (Cubuk et al., 2020), vectorised over the batch.

Every image gets a few changes drawn from one list, each of a random size, then a random square of it is covered
(cutout). Geometric changes come first and are made in one resampling. An image that did not draw a change gets that
change with size zero, so that nothing depends on the values of the draws and the GPU is never waited for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.data.draws import Draws
from soseleto.errors import DataError, UsageError

# The list of changes; "none" leaves the image as it is.
CHANGES = (
    "none", "rotate", "shear_x", "shear_y", "shift_x", "shift_y",
    "brightness", "contrast", "colour", "sharpness", "posterise", "solarise", "autocontrast",
)  # fmt: skip
_ROTATE, _SHEAR, _SHIFT = math.radians(30.0), 0.3, 0.3  # at strength 1: angle, slant, share of the side
_BLEND = 0.9  # at strength 1 the factors of brightness, contrast, colour and sharpness lie between 0.1 and 1.9
_BITS_LOST = 4  # by posterising at strength 1
_GREY = 127.5  # covers what lies outside of the image and what cutout removes
_LUMA = (0.299, 0.587, 0.114)


@dataclass(frozen=True)
class StrongAugment:
    """Strong random changes of uint8 image batches (N, C, H, W) of any size.

    changes: how many changes of the list every image gets
    strength: their largest size, 1 is that of RandAugment
    cutout: largest side of the covered square, as a share of the image's side

    >>> images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    >>> StrongAugment()(images, Draws.of(0, torch.arange(8))).shape
    torch.Size([8, 3, 32, 32])
    """

    changes: int = 1
    strength: float = 1.0
    cutout: float = 0.5

    def __post_init__(self) -> None:
        if self.changes < 0:
            raise UsageError(f"changes of StrongAugment must be 0 or more, got {self.changes}.")
        for field in ("strength", "cutout"):
            if not 0.0 <= getattr(self, field) <= 1.0:
                raise UsageError(f"{field} of StrongAugment must lie in [0, 1], got {getattr(self, field)}.")

    def __call__(self, inputs: Tensor, draws: Draws) -> Tensor:
        """The changed batch; what happens to an image depends on its own draws alone."""
        if inputs.ndim != 4 or inputs.dtype != torch.uint8:
            raise DataError(
                f"strong augmentation is for uint8 images (N, C, H, W), got {inputs.dtype} of shape "
                f"{tuple(inputs.shape)}: give images as bytes, or leave it out."
            )
        if not self.changes and not self.cutout:
            return inputs
        images = inputs.float()
        if self.changes:
            rounds = [self._drawn(draws) for _ in range(self.changes)]
            images = _resampled(images, rounds)
            for kind, size in rounds:
                images = _recoloured(images, kind, size)
        if self.cutout:
            images = self._covered(images, draws)
        return images.round_().to(torch.uint8)

    def _drawn(self, draws: Draws) -> tuple[Tensor, Tensor]:
        """Which change each image gets, (N,), and its size between -strength and strength, (N,)."""
        kind, size = draws.uniform(2)
        return (kind * len(CHANGES)).to(torch.int64), (2 * size - 1) * self.strength

    def _covered(self, images: Tensor, draws: Draws) -> Tensor:
        side, x, y = (number.view(-1, 1, 1, 1) for number in draws.uniform(3))
        h, w = images.shape[2:]
        reach = side * self.cutout / 2
        rows = (torch.arange(h, device=images.device).view(1, 1, h, 1) + 0.5) / h
        columns = (torch.arange(w, device=images.device).view(1, 1, 1, w) + 0.5) / w
        return torch.where(((rows - y).abs() < reach) & ((columns - x).abs() < reach), _GREY, images)


def _sized(kind: Tensor, size: Tensor, change: str) -> Tensor:
    """The size of a change, (N,); 0 for images that drew another."""
    return torch.where(kind == CHANGES.index(change), size, 0.0)


def _resampled(images: Tensor, rounds: list[tuple[Tensor, Tensor]]) -> Tensor:
    """All geometric changes in one bilinear resampling."""
    h, w = images.shape[2:]
    matrix = _matrices(*rounds[0], h, w)
    for kind, size in rounds[1:]:
        matrix = matrix @ _matrices(kind, size, h, w)
    grid = F.affine_grid(matrix[:, :2], list(images.shape), align_corners=False)
    return F.grid_sample(images - _GREY, grid, padding_mode="zeros", align_corners=False) + _GREY


def _matrices(kind: Tensor, size: Tensor, h: int, w: int) -> Tensor:
    """(N, 3, 3) maps from output to input coordinates in units of half the sides; at most one change is not zero."""
    angle = _sized(kind, size, "rotate") * _ROTATE
    cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
    slant_x, slant_y = (_sized(kind, size, f"shear_{axis}") * _SHEAR for axis in "xy")
    shift_x, shift_y = (_sized(kind, size, f"shift_{axis}") * 2 * _SHIFT for axis in "xy")
    # Angles are in pixel units, so that rotating an image that is not square does not shear it.
    top = torch.stack([cos, (sin + slant_x) * (h / w), shift_x], 1)
    middle = torch.stack([(slant_y - sin) * (w / h), cos, shift_y], 1)
    return torch.stack([top, middle, torch.stack([zero, zero, zero + 1], 1)], 1)


def _recoloured(images: Tensor, kind: Tensor, size: Tensor) -> Tensor:
    """Every change of colours, on a scale from 0 to 255."""
    images = _blended(images, kind, size)
    lost = (_sized(kind, size.abs(), "posterise") * _BITS_LOST).round().view(-1, 1, 1, 1)
    images = torch.where(lost > 0, (images / lost.exp2()).floor() * lost.exp2(), images)
    threshold = 256 * (1 - _sized(kind, size.abs(), "solarise").view(-1, 1, 1, 1))
    images = torch.where(images >= threshold, 255 - images, images)
    low, high = images.amin((2, 3), keepdim=True), images.amax((2, 3), keepdim=True)
    stretched = (images - low) * (255 / (high - low).clamp(min=1))
    return torch.where((kind == CHANGES.index("autocontrast")).view(-1, 1, 1, 1), stretched, images)


def _blended(images: Tensor, kind: Tensor, size: Tensor) -> Tensor:
    """base + f·(x − base): base is black for brightness, the mean grey for contrast, grey for colour, blur for
    sharpness."""
    grey = _grey(images)
    bases = {"contrast": grey.mean((2, 3), keepdim=True), "colour": grey, "sharpness": _blurred(images)}
    base, factor = torch.zeros_like(images), 1 + _BLEND * _sized(kind, size, "brightness")
    for change, own in bases.items():
        base = torch.where((kind == CHANGES.index(change)).view(-1, 1, 1, 1), own, base)
        factor = factor + _BLEND * _sized(kind, size, change)
    return (base + factor.view(-1, 1, 1, 1) * (images - base)).clamp_(0, 255)


def _grey(images: Tensor) -> Tensor:
    """(N, 1, H, W)."""
    if images.shape[1] != len(_LUMA):
        return images.mean(1, keepdim=True)
    red, green, blue = (share * channel for share, channel in zip(_LUMA, images.split(1, dim=1), strict=True))
    return red + green + blue


def _blurred(images: Tensor) -> Tensor:
    """Every pixel mixed with its eight neighbours, as 5 to 1 each."""
    around = F.avg_pool2d(F.pad(images, (1, 1, 1, 1), mode="replicate"), 3, stride=1)
    return (9 * around + 4 * images) / 13
