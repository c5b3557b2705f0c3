"""Choices that depend on the size of the data, where the user made none."""

from __future__ import annotations

from soseleto.data import Augment
from soseleto.errors import UsageError, did_you_mean
from soseleto.suspects.probes import Share

LARGEST_BATCH, SMALLEST_BATCH, TARGET_BATCH = 256, 16, 32
STEPS = 48  # at least so many steps an epoch, where the source is large enough for them
FOLDS = 3
FEWEST = 4  # target examples left to train on beside a fold
PROBED_TARGET, PROBED_SOURCE = 34, 50  # the fewest examples that probes can be planted with
AUGMENTS = ("none", "crop", "crop+flip", "bend")
BEND = Augment(rotate=10.0, scale=0.15, shift=0.1, shear=20.0, elastic=0.12)  # what handwriting does
CROP = 12  # an image is shifted by up to 1/12 of its side


def batch_size_for(n: int) -> int:
    """A power of two from 16 to 256 that makes about 48 steps an epoch, or more; never above ``n``.

    >>> [batch_size_for(n) for n in (10, 500, 3000, 50_000)]
    [10, 16, 64, 256]
    """
    wanted = max(1, n // STEPS)
    power = 1 << (wanted.bit_length() - 1)
    if wanted >= 1.5 * power:
        power *= 2
    return min(n, max(SMALLEST_BATCH, min(LARGEST_BATCH, power)))


def folds_for(n_target: int) -> int:
    """Three, fewer where the target is tiny, 0 where it cannot be split at all."""
    return FOLDS if n_target >= 2 * FEWEST else 2 if n_target >= FEWEST else 0


def probes_for(share: float | None, n_source: int, n_target: int) -> Share:
    """The share of the target to plant among the source: as asked, else some where there are enough examples."""
    if share is not None:
        return share
    return "auto" if n_target >= PROBED_TARGET and n_source >= PROBED_SOURCE else 0.0


def target_share_for(share: float | None, mode: str) -> float:
    """How much of the representation's step is the target's own gradient: as asked, else half of it in transfer mode.

    In noisy mode a small target would be learned by heart, and a gradient that has vanished moves no weights.
    """
    return share if share is not None else 0.5 if mode == "transfer" else 0.0


def augment_for(words: str | None, shape: tuple[int, ...]) -> Augment | None:
    """Small shifts for images, nothing for tables; mirroring only when asked for, as a mirrored digit is none."""
    if words is not None and words not in AUGMENTS:
        raise UsageError(f"unknown augmentation {words!r}{did_you_mean(words, AUGMENTS)}: use {', '.join(AUGMENTS)}.")
    if len(shape) != 3:
        if words not in (None, "none"):
            raise UsageError(f"--augment {words} is for images, and these inputs have shape {shape}: leave it out.")
        return None
    if words == "none":
        return None
    if words == "bend":
        return BEND
    return Augment(crop=max(1, min(shape[1:]) // CROP), flip=words == "crop+flip")
