"""The one shape that all images of a pair get, chosen from the source; and the images in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from soseleto.data import optional
from soseleto.data.image_decoding.cache import decoded
from soseleto.data.readers.problems import Problem, some
from soseleto.data.readers.raw import Raw, Reading
from soseleto.errors import DataError, UsageError

_LOOKED_AT = 256  # source images, evenly spaced, whose headers settle size and colour
_LARGEST = 224  # the largest side chosen without being asked

Shape = tuple[int, int, int]  # channels, height, width


def shape_for(source: Raw, reading: Reading) -> Shape | None:
    """Channels, height and width of every image; None when there are no images to decode.

    Where the user did not say: the source's own size when all its images have the same and no side is above 224,
    else a square with the median of the shorter sides, at most 224. Grey when all source images are grey.
    """
    if source.inputs is not None:
        if source.inputs.ndim != 4:
            return None
        return (int(source.inputs.shape[1]), int(source.inputs.shape[2]), int(source.inputs.shape[3]))
    looked_at = _look(source)
    if not looked_at:
        raise DataError(f"none of the {source.name} images looked at can be read: check the files.")
    height, width = _sides(reading.image_size) or _usual_size(looked_at)
    colour = any(seen[2] for seen in looked_at)
    return (reading.channels or (3 if colour else 1), height, width)


def check_options(reading: Reading) -> None:
    _sides(reading.image_size)
    if reading.channels not in (None, 1, 3):
        raise UsageError(f"channels must be 1 (grey) or 3 (RGB), got {reading.channels!r}.")
    if reading.workers is not None and reading.workers < 0:
        raise UsageError(f"workers must be 0 or more, got {reading.workers}.")


def pixels_of(
    raw: Raw, shape: Shape, reading: Reading, progress: Callable[[int, int], None] | None = None
) -> tuple[Tensor, list[Problem]]:
    """All images of a data set as (N, C, H, W) uint8, and those that could not be read (their rows are zero)."""
    if raw.files is not None:
        made = decoded(raw.files, shape, cache=reading.cache, workers=reading.workers, progress=progress)
        inputs, bad = made.inputs, [(row, why) for row, why in made.bad if raw.files[row]]
    else:
        assert raw.images is not None
        inputs, bad = _convert(raw.images, shape)
    names = [raw.files[row] if raw.files else f"image {raw.id_of(row)}" for row, _ in bad]
    return inputs, _problems(raw, bad, names)


def _convert(images: Sequence[Any], shape: Shape) -> tuple[Tensor, list[tuple[int, str]]]:
    rules = optional.decoding()
    made = torch.zeros((len(images), *shape), dtype=torch.uint8)
    bad = []
    for row in range(len(images)):
        try:
            made[row] = torch.frombuffer(bytearray(rules.pixels(images[row], shape)), dtype=torch.uint8).view(shape)
        except Exception as error:  # as in decoding.fill: one bad image must not stop the others
            bad.append((row, rules.reason(error)))
    return made, bad


def _problems(raw: Raw, bad: list[tuple[int, str]], names: list[str]) -> list[Problem]:
    """One problem a reason, so that a thousand missing files are one line."""
    reasons: dict[str, list[int]] = {}
    for at, (_, why) in enumerate(bad):
        reasons.setdefault(why, []).append(at)
    made = []
    for why, places in reasons.items():
        kind = "missing" if why == "is missing" else "absurd size" if "absurd" in why else "unreadable"
        ids = tuple(raw.id_of(bad[at][0]) for at in places)
        many = f"{len(places)} images: each " if len(places) > 1 else ""
        made.append(Problem(raw.name, kind, f"{many}{some([names[at] for at in places])} {why}.", ids))
    return made


def _look(source: Raw) -> list[tuple[int, int, bool]]:
    rules = optional.decoding()
    every: Sequence[Any] = source.files if source.files is not None else source.images or ()
    step = max(1, len(every) // _LOOKED_AT)
    seen = []
    for row in range(0, len(every), step):
        try:
            one = every[row]
            seen.append(rules.probe(one) if isinstance(one, str) else _seen(one))
        except Exception:  # it is reported when it is decoded
            continue
    return seen


def _seen(image: Any) -> tuple[int, int, bool]:
    return image.size[1], image.size[0], image.mode not in ("1", "L", "LA", "I", "F")


def _usual_size(seen: list[tuple[int, int, bool]]) -> tuple[int, int]:
    sizes = [(height, width) for height, width, _ in seen]
    if len(set(sizes)) == 1 and max(sizes[0]) <= _LARGEST:
        return sizes[0]
    side = min(_LARGEST, round(median(min(size) for size in sizes)))
    return side, side


def _sides(size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    if size is None:
        return None
    sides = (size, size) if isinstance(size, int) else tuple(size)
    if len(sides) != 2 or not all(isinstance(side, int) and 4 <= side <= 4096 for side in sides):
        raise UsageError(f"image_size must be one side or (height, width), each from 4 to 4096, got {size!r}.")
    return sides
