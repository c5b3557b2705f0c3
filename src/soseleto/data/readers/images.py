"""Images decoded to one shape, which is chosen from the source."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

from soseleto.data import optional
from soseleto.data.image_decoding.cache import decoded
from soseleto.data.image_decoding.workers import Bad, Progress, Shape
from soseleto.data.readers.file_names import escaped
from soseleto.data.readers.problems import Problem, some
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.reading import Reading
from soseleto.errors import DataError

_SAMPLED = 256  # source images, evenly spaced, whose headers decide size and colour
_LARGEST = 224  # the largest side chosen by default

Header = tuple[int, int, bool]  # height, width, whether the image has colour


def shape_for(source: Raw, reading: Reading) -> Shape | None:
    """Channels, height and width of every image; None if the inputs are not images.

    Defaults: the size of the source images if it is the same for all and no side is above 224, else a square with
    the median of the shorter sides, at most 224; grey if all source images are grey.
    """
    if source.inputs is not None:
        if not isinstance(source.inputs, Tensor) or source.inputs.ndim != 4:
            return None
        return (int(source.inputs.shape[1]), int(source.inputs.shape[2]), int(source.inputs.shape[3]))
    headers = _headers(source)
    if not headers:
        raise DataError(f"none of the sampled {source.name} images can be read: check the files.")
    height, width = reading.sides or _default_size(headers)
    colour = any(header[2] for header in headers)
    return (reading.channels or (3 if colour else 1), height, width)


def pixels_of(
    raw: Raw, shape: Shape, reading: Reading, progress: Progress | None = None
) -> tuple[Tensor, list[Problem]]:
    """All images of a data set as (N, C, H, W) uint8, and the unreadable ones as problems (their rows are zero)."""
    if raw.files is not None:
        made = decoded(raw.files, shape, cache=reading.cache, workers=reading.workers, progress=progress)
        inputs, bad = made.inputs, [(row, why) for row, why in made.bad if raw.files[row]]
    else:
        assert raw.images is not None
        inputs, bad = _convert(raw.images, shape)
    names = [escaped(raw.files[row]) if raw.files else f"image {raw.id_of(row)}" for row, _ in bad]
    return inputs, _problems(raw, bad, names)


def _convert(images: Sequence[Any], shape: Shape) -> tuple[Tensor, Bad]:
    rules = optional.decoding()
    made = torch.zeros((len(images), *shape), dtype=torch.uint8)
    bad: Bad = []
    for row in range(len(images)):
        try:
            made[row] = torch.frombuffer(bytearray(rules.pixels(images[row], shape)), dtype=torch.uint8).view(shape)
        except Exception as error:  # as in rules.fill: one bad image must not stop the others
            bad.append((row, rules.reason(error)))
    return made, bad


def _problems(raw: Raw, bad: Bad, names: list[str]) -> list[Problem]:
    """One problem per reason, so that a thousand missing files are one line."""
    reasons: dict[str, list[int]] = {}
    for at, (_, why) in enumerate(bad):
        reasons.setdefault(why, []).append(at)
    made = []
    for why, places in reasons.items():
        kind = "missing" if why == "is missing" else "absurd size" if "absurd" in why else "unreadable"
        ids = tuple(raw.id_of(bad[at][0]) for at in places)
        shown = some([names[at] for at in places])
        text = f"each of {len(places)} images {why}: {shown}." if len(places) > 1 else f"{shown} {why}."
        made.append(Problem(raw.name, kind, text, ids))
    return made


def _headers(source: Raw) -> list[Header]:
    rules = optional.decoding()
    every: Sequence[Any] = source.files if source.files is not None else source.images or ()
    step = max(1, len(every) // _SAMPLED)
    headers = []
    for row in range(0, len(every), step):
        try:
            one = every[row]
            headers.append(rules.probe(one) if isinstance(one, str) else _header(one))
        except Exception:  # reported when the image is decoded
            continue
    return headers


def _header(image: Any) -> Header:
    return image.size[1], image.size[0], image.mode not in ("1", "L", "LA", "I", "F")


def _default_size(headers: list[Header]) -> tuple[int, int]:
    sizes = [(height, width) for height, width, _ in headers]
    if len(set(sizes)) == 1 and max(sizes[0]) <= _LARGEST:
        return sizes[0]
    side = min(_LARGEST, round(median(min(size) for size in sizes)))
    return side, side
