"""Random changes of data: augmentation of batches on their device, weak and strong views, and label noise."""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from soseleto.data.batches import ExampleRandom, generator
from soseleto.data.structure import Inputs
from soseleto.data.text import NO_TOKEN
from soseleto.errors import DataError, UsageError

_LIMITS = {"crop": math.inf, "rotate": math.inf, "scale": 1, "shift": math.inf, "shear": 90, "elastic": math.inf}
_POINTS = 4  # control points of the elastic deformation, along each side


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
    >>> augment(torch.zeros(8, 3, 32, 32, dtype=torch.uint8), ExampleRandom.of(0, torch.arange(8))).shape
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
        for field, limit in _LIMITS.items():
            value = getattr(self, field)
            if not 0 <= value < limit:
                below = f" and below {limit}" if limit < math.inf else ""
                raise UsageError(f"{field} of Augment must be a number of at least 0{below}, got {value!r}.")
        if self.crop != int(self.crop):
            raise UsageError(f"crop of Augment must be a whole number of pixels, got {self.crop!r}.")

    def __call__(self, inputs: Tensor, random: ExampleRandom) -> Tensor:
        """The augmented batch; what happens to an image depends on its own draws alone."""
        if not len(inputs):  # a rank without examples in this batch
            return inputs
        if inputs.ndim != 4:
            raise DataError(f"augmentation is for images (N, C, H, W), got shape {tuple(inputs.shape)}: leave it out.")
        if self.rotate or self.scale or self.shift or self.shear or self.elastic:
            inputs = self._resample(inputs, random)
        if self.crop or self.flip:
            inputs = self._crop_flip(inputs, random)
        if self.sign:
            chosen = random.uniform(1)[0].view(-1, 1, 1, 1) < 0.5
            inputs = torch.where(chosen, -inputs if inputs.dtype.is_floating_point else 255 - inputs, inputs)
        return inputs

    def _crop_flip(self, inputs: Tensor, random: ExampleRandom) -> Tensor:
        pad = int(self.crop)
        draws = random.uniform(3)
        top, left = (draws[:2] * (2 * pad + 1)).to(torch.int64).clamp_(max=2 * pad)  # (N,) each
        n, c, h, w = inputs.shape
        padded = F.pad(inputs, (pad, pad, pad, pad)) if pad else inputs
        # One gather, with the flat index of every output pixel in the padded image.
        rows = torch.arange(h, device=inputs.device) + top[:, None]
        columns = torch.arange(w, device=inputs.device)
        if self.flip:
            columns = torch.where(draws[2, :, None] < 0.5, w - 1 - columns, columns)
        columns = columns + left[:, None]
        flat = (rows[:, :, None] * (w + 2 * pad) + columns[:, None, :]).view(n, 1, h * w).expand(n, c, h * w)
        return padded.reshape(n, c, -1).gather(2, flat).view(n, c, h, w)

    def _resample(self, inputs: Tensor, random: ExampleRandom) -> Tensor:
        """Rotation, scale, shift, shear and elastic deformation in one bilinear resampling, padded with zeros."""
        floats = inputs if inputs.dtype.is_floating_point else inputs.float()
        matrix = self._matrices(floats, random)
        grid = F.affine_grid(matrix, list(inputs.shape), align_corners=False)
        if self.elastic:
            grid = grid + self._displacements(floats, random)
        moved = F.grid_sample(floats, grid.to(floats.dtype), padding_mode="zeros", align_corners=False)
        return moved if inputs.dtype.is_floating_point else moved.round_().clamp_(0, 255).to(inputs.dtype)

    def _matrices(self, inputs: Tensor, random: ExampleRandom) -> Tensor:
        """(N, 2, 3) affine maps from output to input coordinates, in units of half the image side."""
        n, _, h, w = inputs.shape
        angle, factor, x, y = random.uniform(4) * 2 - 1
        angle = angle * math.radians(self.rotate)
        cos, sin = angle.cos(), angle.sin()
        inverse = 1 / (1 + factor * self.scale)
        # Rotation is in pixel units, so that a non-square image is not sheared.
        top = torch.stack([cos * inverse, sin * inverse * (h / w), -2 * x * self.shift], dim=1)
        bottom = torch.stack([-sin * inverse * (w / h), cos * inverse, -2 * y * self.shift], dim=1)
        if self.shear:
            slant = torch.tan((random.uniform(1)[0] * 2 - 1) * math.radians(self.shear)) * (h / w)
            top = top + slant[:, None] * bottom
        return torch.stack([top, bottom], dim=1).view(n, 2, 3)

    def _displacements(self, inputs: Tensor, random: ExampleRandom) -> Tensor:
        """(N, H, W, 2) displacement of each pixel, in units of half the image side, interpolated from 4 x 4 points."""
        n, _, h, w = inputs.shape
        draws = random.uniform(2 * _POINTS**2) * 2 - 1
        points = (2 * self.elastic * draws).T.reshape(n, 2, _POINTS, _POINTS)
        field = F.interpolate(points, (h, w), mode="bicubic", align_corners=True)
        return field.permute(0, 2, 3, 1)


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
    """Strong random changes of uint8 image batches (N, C, H, W), in the manner of RandAugment (Cubuk et al., 2020).

    Every image gets a few changes drawn from one list, each of a random size, then a random square of it is covered
    (cutout). Geometric changes come first and are made in one resampling. An image that did not draw a change gets
    that change with size zero: nothing depends on the values of the draws, so the GPU is never waited for.

    changes: how many changes of the list every image gets
    strength: their largest size, 1 is that of RandAugment
    cutout: largest side of the covered square, as a share of the image's side

    >>> images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    >>> StrongAugment()(images, ExampleRandom.of(0, torch.arange(8))).shape
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

    def __call__(self, inputs: Tensor, random: ExampleRandom) -> Tensor:
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
            rounds = [self._drawn(random) for _ in range(self.changes)]
            images = _resampled(images, rounds)
            for kind, size in rounds:
                images = _recoloured(images, kind, size)
        if self.cutout:
            images = self._covered(images, random)
        return images.round_().to(torch.uint8)

    def _drawn(self, random: ExampleRandom) -> tuple[Tensor, Tensor]:
        """Which change each image gets, (N,), and its size between -strength and strength, (N,)."""
        kind, size = random.uniform(2)
        return (kind * len(CHANGES)).to(torch.int64), (2 * size - 1) * self.strength

    def _covered(self, images: Tensor, random: ExampleRandom) -> Tensor:
        side, x, y = (number.view(-1, 1, 1, 1) for number in random.uniform(3))
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


# Views of every example: a weak one to judge it by and strong ones to learn from

IDS, MASK = "input_ids", "attention_mask"


class AnyViews(ABC):
    """Makes of a batch the tuple (weak view, strong view, ...), for methods that take such batches.

    made_of: what ``kind_of_inputs`` calls the inputs that the views are made of; wanted: the same in words
    """

    made_of: ClassVar[str]
    wanted: ClassVar[str]

    @abstractmethod
    def __call__(self, inputs: Inputs, random: ExampleRandom) -> tuple[Inputs, ...]: ...


@dataclass(frozen=True)
class Views(AnyViews):
    """Views of uint8 images: each is shifted and mirrored at random, and the strong ones are changed further.

    crop: of every view, the most that it is shifted, as a share of the shorter side
    flip: of every view, mirror left to right with probability 1/2
    strong: what strong views get besides
    count: strong views of every image, each with its own draws
    """

    crop: float = 0.125
    flip: bool = True
    strong: StrongAugment = dataclasses.field(default_factory=StrongAugment)
    count: int = 2
    made_of, wanted = "images", "views of images are made of uint8 tensors (C, H, W)"

    def __post_init__(self) -> None:
        _check(self, 0.0 <= self.crop <= 1.0, "crop must be a share of the side in [0, 1], such as 0.125")

    def __call__(self, inputs: Tensor, random: ExampleRandom) -> tuple[Tensor, ...]:
        weak = Augment(crop=round(self.crop * min(inputs.shape[2:])), flip=self.flip)
        return weak(inputs, random), *(self.strong(weak(inputs, random), random) for _ in range(self.count))


@dataclass(frozen=True)
class TokenViews(AnyViews):
    """Views of texts.

    The weak view is the text itself. In a strong view the attention mask is 0 at dropped tokens, so that the model does
    not see them; the others keep their positions, and the first and the last token are never dropped. A network with
    dropout makes further differences: the teacher judges without it.

    Batches are dicts with ``input_ids`` and ``attention_mask`` (N, L), or the tokens that a text column is stored as.

    drop: the probability that a token is dropped
    count: strong views of every text, each with its own draws
    """

    drop: float = 0.1
    count: int = 2
    made_of, wanted = "tokens", "views of texts are made of dicts with input_ids and attention_mask"

    def __post_init__(self) -> None:
        _check(self, 0.0 <= self.drop < 1.0, "drop must be a probability below 1, such as 0.1")

    def __call__(self, inputs: Inputs, random: ExampleRandom) -> tuple[Inputs, ...]:
        known = inputs[MASK] != 0 if isinstance(inputs, Mapping) else inputs != NO_TOKEN
        dropped = self._dropped(known, random)
        if not isinstance(inputs, Mapping):
            return inputs, *(torch.where(mask, NO_TOKEN, inputs) for mask in dropped)
        return inputs, *({**inputs, MASK: inputs[MASK].masked_fill(mask, 0)} for mask in dropped)

    def _dropped(self, known: Tensor, random: ExampleRandom) -> Tensor:
        """(count, N, L) bool, of the known tokens (N, L); padding to another width changes nothing."""
        n, width = known.shape
        numbers = random.uniform(width * self.count).view(width, self.count, n).permute(1, 2, 0)
        position = known.cumsum(1)
        inside = known & (position > 1) & (position < position[:, -1:])
        return inside & (numbers < self.drop)


def _check(views: Any, valid: bool, wanted: str) -> None:
    if not valid or views.count < 1:
        raise UsageError(f"{wanted}, and count at least 1, got {views}.")


def has_mask(inputs: Inputs) -> bool:
    """Whether tokens of the inputs can be masked."""
    if not isinstance(inputs, Mapping) or not all(isinstance(inputs.get(name), Tensor) for name in (IDS, MASK)):
        return False
    return bool(inputs[MASK].ndim == 2 and inputs[MASK].shape == inputs[IDS].shape)


# Label noise. Each function returns ``Noisy(labels, flipped)``: ``flipped`` is the boolean mask of the examples whose
# label has changed, so ``labels[~flipped]`` are original. The random draws depend on the seed alone.


class Noisy(NamedTuple):
    labels: Tensor  # (N,) int64
    flipped: Tensor  # (N,) bool


def symmetric(labels: Tensor, rate: float, classes: int, seed: int) -> Noisy:
    """Exactly round(rate·N) examples get another label, drawn uniformly from the other classes.

    Some papers draw the new label from all classes, including the old one; their rate r corresponds to
    rate = r·(classes - 1)/classes here.

    >>> noisy, flipped = symmetric(torch.zeros(10, dtype=torch.int64), 0.4, classes=3, seed=0)
    >>> int(flipped.sum()), bool((noisy[flipped] > 0).all())
    (4, True)
    """
    labels = _checked(labels, rate, classes)
    random = generator(seed, "noise/symmetric")
    at = torch.randperm(len(labels), generator=random)[: round(rate * len(labels))]
    shift = torch.randint(1, classes, (len(at),), generator=random)
    return _flip(labels, at, (labels[at] + shift) % classes)


def pair_flip(labels: Tensor, rate: float, classes: int, seed: int) -> Noisy:
    """Exactly round(rate·N) examples get the next class: c becomes (c + 1) mod classes."""
    labels = _checked(labels, rate, classes)
    at = torch.randperm(len(labels), generator=generator(seed, "noise/pair"))[: round(rate * len(labels))]
    return _flip(labels, at, (labels[at] + 1) % classes)


def _flip(labels: Tensor, at: Tensor, new: Tensor) -> Noisy:
    noisy = labels.clone()
    noisy[at] = new
    return Noisy(noisy, noisy != labels)


def _checked(labels: Tensor, rate: float, classes: int) -> Tensor:
    labels = torch.as_tensor(labels).to("cpu")
    if labels.ndim != 1 or labels.dtype.is_floating_point or labels.dtype == torch.bool:
        raise UsageError(f"labels must be (N,) class indices, got {labels.dtype} of shape {tuple(labels.shape)}.")
    if not 0.0 <= rate <= 1.0:
        raise UsageError(f"rate must be between 0 and 1, got {rate!r}: for 40 % write 0.4.")
    if classes < 2:
        raise UsageError(f"classes must be at least 2, got {classes!r}.")
    labels = labels.to(torch.int64)
    if len(labels) and (int(labels.min()) < 0 or int(labels.max()) >= classes):
        raise UsageError(
            f"labels range from {int(labels.min())} to {int(labels.max())}, outside 0 to {classes - 1}: "
            "set classes to the number of classes."
        )
    return labels
