"""The image rules: one file becomes a uint8 array (C, H, W). Run as a script, it is a decoding worker.

This file imports nothing of the package: a worker starts with NumPy and Pillow alone, in a fraction of a
second, and never runs the user's own script a second time.

The rules, in order: the first frame counts; the EXIF orientation is applied; 16-bit values are divided by 257,
float values are 0 to 1 when none is above 1 and 0 to 255 otherwise; palettes become colours; transparent pixels
are laid on white; CMYK and the like become RGB; then RGB or grey as asked. To change size, the largest centred
window with the wanted proportions is resampled (bilinear, antialiased). JPEGs at least four times too large are
decoded at 1/2, 1/4 or 1/8, never below twice the wanted size.
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

VERSION = 1  # part of every cache key: raise it when a rule changes
MAX_PIXELS = 1 << 26  # 67 million: larger ones are taken for decompression bombs
MAX_FILE = 1 << 29
# No format that needs another program or embeds a language (EPS runs Ghostscript).
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
_MIN_SIDE, _MAX_RATIO = 4, 20


class Unreadable(Exception):
    """Why a file cannot be used, in words that follow its name."""


def open_image(content: bytes) -> Image.Image:
    """The image behind these bytes, header only, its size checked before a pixel is decoded."""
    if not content:
        raise Unreadable("is empty")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # checked just below, and lower
        image = Image.open(io.BytesIO(content), formats=FORMATS)
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Unreadable(f"has {width} x {height} pixels, more than the {MAX_PIXELS} that are decoded")
    if min(width, height) < _MIN_SIDE or max(width, height) > _MAX_RATIO * min(width, height):
        raise Unreadable(f"has the absurd size {width} x {height}")
    return image


def probe(path: str) -> tuple[int, int, bool]:
    """Height, width and whether it has colour, by the header alone."""
    image = open_image(read_bytes(path))
    width, height = image.size
    if image.getexif().get(0x0112, 1) in (5, 6, 7, 8):  # orientations that lie on their side
        width, height = height, width
    return height, width, image.mode not in ("1", "L", "LA", "La", "I", "F") and "I;16" not in image.mode


def read_bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        content = file.read(MAX_FILE + 1)
    if len(content) > MAX_FILE:
        raise Unreadable(f"is larger than {MAX_FILE >> 20} MiB")
    return content


def decode(content: bytes, height: int, width: int, channels: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """(channels, height, width) uint8."""
    image = open_image(content)
    if image.format == "JPEG":
        image.draft(None, (2 * max(width, height), 2 * max(width, height)))
    return pixels(image, height, width, channels)


def pixels(image: Image.Image, height: int, width: int, channels: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An opened image, by the rules, as (channels, height, width) uint8."""
    image.load()
    image = _plain(ImageOps.exif_transpose(image)).convert("RGB" if channels == 3 else "L")
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=_window(image.size, width, height))
    array = np.asarray(image)
    return array[None] if channels == 1 else array.transpose(2, 0, 1)


def _window(size: tuple[int, int], width: int, height: int) -> tuple[float, float, float, float]:
    """The largest centred box with the proportions of width x height."""
    scale = min(size[0] / width, size[1] / height)
    left, top = (size[0] - scale * width) / 2, (size[1] - scale * height) / 2
    return left, top, min(left + scale * width, size[0]), min(top + scale * height, size[1])


def _plain(image: Image.Image) -> Image.Image:
    """8 bits a channel and no transparency."""
    if image.mode in ("I", "F") or "I;16" in image.mode:
        return _eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values) * (255.0 if np.nanmax(values) <= 1 else 1.0)
    elif "I;16" in image.mode or values.max() > 255:
        values = values / 257.0
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


def reason(error: BaseException) -> str:
    """Why a file could not be read, to follow its name in a sentence."""
    if isinstance(error, Unreadable):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, UnidentifiedImageError):
        return "is not an image of a known kind"
    if isinstance(error, Image.DecompressionBombError):
        return "has more pixels than are decoded"
    return f"cannot be decoded ({' '.join(str(error).split()) or type(error).__name__})"


def fill(rows: Any, jobs: list[tuple[int, str]], shape: tuple[int, int, int]) -> list[tuple[int, str]]:
    """Decode each (row, path) into ``rows``; return what could not be, with the reason."""
    channels, height, width = shape
    bad = []
    for row, path in jobs:
        try:
            rows[row] = decode(read_bytes(path), height, width, channels)
        except Exception as error:  # Pillow raises many kinds; one bad file must not stop the others
            rows[row] = 0
            bad.append((row, reason(error)))
    return bad


def work() -> None:
    """A worker: the first line says where the array is, then one line of jobs in, one line of answers out."""
    header = json.loads(sys.stdin.readline())
    rows = np.memmap(header["array"], dtype=np.uint8, mode="r+", shape=tuple(header["shape"]))
    for line in sys.stdin:
        bad = fill(rows, [(row, path) for row, path in json.loads(line)], rows.shape[1:])
        print(json.dumps(bad), flush=True)


if __name__ == "__main__":
    work()
