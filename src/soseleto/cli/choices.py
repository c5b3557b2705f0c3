"""What ``soseleto fit`` chooses by the data where an option is left out."""

from __future__ import annotations

from soseleto.data import Augment, TablePreparation
from soseleto.errors import UsageError, did_you_mean
from soseleto.models.by_name import default_name
from soseleto.suspects.probes import Share

FOLDS = 3
FEWEST = 4  # target examples left to train on beside a fold
PROBED_TARGET, PROBED_SOURCE = 34, 50  # the fewest examples that probes can be planted with
AUGMENTS = ("none", "crop", "crop+flip", "bend")
BEND = Augment(rotate=10.0, scale=0.15, shift=0.1, shear=20.0, elastic=0.12)  # for handwriting
CROP = 12  # an image is shifted by up to 1/12 of its side


def model_for(name: str | None, shape: tuple[int, ...], table: TablePreparation | None) -> str:
    """As given; else ``linear`` for texts, ``table`` for other tables, and by the shape for other inputs."""
    if name is not None:
        return name
    return default_name(shape) if table is None else "linear" if table.is_text else "table"


def folds_for(n_target: int) -> int:
    """Three, fewer for a tiny target, 0 for one that cannot be split."""
    return FOLDS if n_target >= 2 * FEWEST else 2 if n_target >= FEWEST else 0


def probes_for(share: float | None, n_source: int, n_target: int) -> Share:
    """The share of the target to plant among the source: as given, else "auto" if there are enough examples."""
    if share is not None:
        return share
    return "auto" if n_target >= PROBED_TARGET and n_source >= PROBED_SOURCE else 0.0


def target_share_for(share: float | None, mode: str) -> float:
    """The weight of the target's own gradient in the representation's step: as given, else 0.5 in transfer mode.

    In noisy mode a small target would be memorised, and a gradient that has vanished moves no weights.
    """
    return share if share is not None else 0.5 if mode == "transfer" else 0.0


def augment_for(name: str | None, shape: tuple[int, ...]) -> Augment | None:
    """Small shifts for images, nothing for tables; no mirroring by default, as a mirrored digit is not a digit."""
    if name is not None and name not in AUGMENTS:
        raise UsageError(f"unknown augmentation {name!r}{did_you_mean(name, AUGMENTS)}: use {', '.join(AUGMENTS)}.")
    if len(shape) != 3:
        if name not in (None, "none"):
            raise UsageError(f"--augment {name} is for images, and these inputs have shape {shape}: leave it out.")
        return None
    if name == "none":
        return None
    if name == "bend":
        return BEND
    return Augment(crop=max(1, min(shape[1:]) // CROP), flip=name == "crop+flip")
