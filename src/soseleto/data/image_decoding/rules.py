"""The decoding rules: an image file becomes (C, H, W) bytes. Run as a script, this file is a decoding worker.

It imports nothing from the package: a worker starts with Pillow alone, in a fraction of a second, and does not run the
user's script a second time.

The rules, in order: the first frame is used; the EXIF orientation is applied; 16-bit values are divided by 257; float
values are taken as 0 to 1 if none is above 1, else as 0 to 255; palettes become colours; transparent images are
composited on white; CMYK and other modes become RGB; then RGB or grey as requested. To change the size, the largest
centred window with the target aspect ratio is resampled (bilinear, antialiased). JPEGs at least four times too large
are decoded at 1/2, 1/4 or 1/8, never below twice the target size.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import stat
import struct
import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

VERSION = 2  # part of every cache key: increase it when a rule changes
MAX_PIXELS = 1 << 26  # 67 million: larger images are treated as decompression bombs
MAX_FILE = 1 << 29
# No format that needs another program or embeds code (EPS runs Ghostscript).
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM")
_MIN_SIDE, _MAX_RATIO = 4, 20
_ORIENTATION = 0x0112  # the EXIF tag


class Unreadable(Exception):
    """A file cannot be used; the message continues a sentence that starts with its name."""


def open_image(content: bytes) -> Image.Image:
    """Open the image, reading only the header; its size is checked before any pixel is decoded."""
    if not content:
        raise Unreadable("is empty")
    image = Image.open(io.BytesIO(content), formats=FORMATS)
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Unreadable(f"has {width} x {height} pixels, more than the limit of {MAX_PIXELS}")
    if min(width, height) < _MIN_SIDE or max(width, height) > _MAX_RATIO * min(width, height):
        raise Unreadable(f"has the absurd size {width} x {height}")
    return image


def probe(path: str) -> tuple[int, int, bool]:
    """Height, width and whether the image has colour, from the header alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = open_image(read_bytes(path))
    width, height = image.size
    if _orientation(image) in (5, 6, 7, 8):  # rotated by a quarter turn
        width, height = height, width
    return height, width, image.mode not in ("1", "L", "LA", "La", "I", "F") and "I;16" not in image.mode


def read_bytes(path: str) -> bytes:
    """The whole file; type and size are checked first, so that a pipe does not block and a huge file is not read."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode):
            raise Unreadable("is not a file")
        if found.st_size > MAX_FILE:
            raise Unreadable(f"is larger than {MAX_FILE >> 20} MiB")
        with open(handle, "rb", buffering=0, closefd=False) as file:
            return file.readall()
    finally:
        os.close(handle)


def decode(content: bytes, shape: tuple[int, int, int]) -> bytes:
    """An image file as channels x height x width bytes."""
    side = 2 * max(shape[1:])
    return pixels(load_image(content, draft=(side, side)), shape)


def load_image(content: bytes, *, draft: tuple[int, int] | None = None) -> Image.Image:
    """Open and decode an image; ``draft`` is a size that a large JPEG need not exceed. Incomplete images raise."""
    image = open_image(content)
    if draft is not None and image.format == "JPEG":
        image.draft(None, draft)
    with _truncated_images_raise():
        image.load()
    if image.format == "PNG":
        _check_png_rows(image, content)
    return image


@contextlib.contextmanager
def _truncated_images_raise() -> Iterator[None]:
    before, ImageFile.LOAD_TRUNCATED_IMAGES = ImageFile.LOAD_TRUNCATED_IMAGES, False
    try:
        yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _check_png_rows(image: Image.Image, content: bytes) -> None:
    """Pillow leaves the rows black that a PNG should have and does not: count the bytes of its pixels.

    That is needed only if the last row is black, or if the rows are interlaced.
    """
    width, height = image.size
    last = image.crop((0, height - 1, width, height))
    interlaced = content[28] != 0
    if not interlaced and any(low or high for low, high in _extrema(last)):
        return
    depth, kind = content[24], content[25]
    bits = depth * {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(kind, 1)
    passes = _ADAM7 if interlaced else ((0, 0, 1, 1),)
    needed = 0
    for left, top, right, down in passes:
        columns, rows = -(-(width - left) // right), -(-(height - top) // down)
        needed += rows * (1 + -(-columns * bits // 8)) if columns > 0 else 0
    if _png_bytes(content, needed) < needed:
        raise Unreadable("holds fewer rows than it declares")


_ADAM7 = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def _extrema(image: Image.Image) -> tuple[tuple[float, float], ...]:
    found: Any = image.getextrema()
    return found if isinstance(found[0], tuple) else (found,)


def _png_bytes(content: bytes, most: int) -> int:
    """The number of bytes in the decompressed IDAT chunks, counted up to ``most``."""
    inflate, found, at = zlib.decompressobj(), 0, 8
    while at + 8 <= len(content) and found < most:
        length, kind = struct.unpack(">I4s", content[at : at + 8])
        piece = content[at + 8 : at + 8 + length] if kind == b"IDAT" else b""
        while piece and found < most:
            found += len(inflate.decompress(piece, min(1 << 20, most - found)))
            piece = inflate.unconsumed_tail
        at += 12 + length
    return found


def pixels(image: Image.Image, shape: tuple[int, int, int]) -> bytes:
    """An opened image as channels x height x width bytes."""
    channels, height, width = shape
    image.load()
    if _orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    image, mode = _plain(image), "RGB" if channels == 3 else "L"
    if image.mode != mode:
        image = image.convert(mode)
    if image.size != (width, height):
        image = image.resize((width, height), Image.Resampling.BILINEAR, box=_window(image.size, width, height))
    return b"".join(band.tobytes() for band in image.split())


def _orientation(image: Image.Image) -> int:
    """1 to 8; 1 is upright."""
    if image.format == "JPEG" and not image.info.keys() & {"exif", "xmp"}:
        return 1  # most images: nothing to parse
    return int(image.getexif().get(_ORIENTATION, 1))


def _window(size: tuple[int, int], width: int, height: int) -> tuple[float, float, float, float]:
    """The largest centred box with the aspect ratio of width x height."""
    scale = min(size[0] / width, size[1] / height)
    left, top = (size[0] - scale * width) / 2, (size[1] - scale * height) / 2
    return left, top, min(left + scale * width, size[0]), min(top + scale * height, size[1])


def _plain(image: Image.Image) -> Image.Image:
    """8 bits per channel, no transparency."""
    if image.mode in ("I", "F") or "I;16" in image.mode:
        return _eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    import numpy as np  # only here: workers start twice as fast without it

    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values) * (255.0 if np.nanmax(values) <= 1 else 1.0)
    elif "I;16" in image.mode or values.max() > 255:
        values = values / 257.0
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


def reason(error: BaseException) -> str:
    """Why a file could not be read; continues a sentence that starts with its name."""
    if isinstance(error, Unreadable):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, UnidentifiedImageError):
        return "is not an image of a known kind"
    if isinstance(error, Image.DecompressionBombError):
        return "has more pixels than the limit"
    return f"cannot be decoded ({' '.join(str(error).split()) or type(error).__name__})"


def digests(paths: list[str]) -> list[str]:
    """sha256 of each file, or the name of the error if it cannot be read."""
    made = []
    for path in paths:
        try:
            made.append(hashlib.sha256(read_bytes(path)).hexdigest())
        except (OSError, Unreadable) as error:
            made.append(type(error).__name__)
    return made


def fill(
    array: int, first: int, paths: list[str], shape: tuple[int, int, int]
) -> tuple[list[str], list[tuple[int, str]]]:
    """Decode files into consecutive rows of an open array file; returns digests, and (row, reason) of bad files."""
    size = shape[0] * shape[1] * shape[2]
    made: list[str] = []
    rows: list[bytes] = []
    bad: list[tuple[int, str]] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Pillow's warnings about odd files: unreadable ones are reported as bad
        for row, path in enumerate(paths, start=first):
            digest, image = "", bytes(size)
            try:
                content = read_bytes(path)
                digest = hashlib.sha256(content).hexdigest()
                image = decode(content, shape)
            except Exception as error:  # Pillow raises many kinds; one bad file must not stop the others
                digest = digest or type(error).__name__
                bad.append((row, reason(error)))
            made.append(digest)
            rows.append(image)
    _write(array, b"".join(rows), first * size)
    return made, bad


def decode_file(path: str, shape: tuple[int, int, int]) -> tuple[bytes, str | None]:
    """The pixels of one file, or zeros and the reason."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return decode(read_bytes(path), shape), None
        except Exception as error:  # as in fill
            return bytes(shape[0] * shape[1] * shape[2]), reason(error)


def _write(array: int, content: bytes, at: int) -> None:
    left = memoryview(content)
    while left:
        done = os.pwrite(array, left, at)
        left, at = left[done:], at + done


def run_job(job: dict[str, Any]) -> tuple[list[str], list[tuple[int, str]]]:
    """Hash the files of a job, or decode them into its array file; returns digests, and (row, reason) of bad files."""
    if job["array"] is None:
        return digests(job["paths"]), []
    array = os.open(job["array"], os.O_WRONLY)
    try:
        return fill(array, job["first"], job["paths"], tuple(job["shape"]))
    finally:
        os.close(array)


def work() -> None:
    """A worker process: one JSON job per line on stdin, one JSON result per line on stdout."""
    for line in sys.stdin:
        print(json.dumps(run_job(json.loads(line))), flush=True)


if __name__ == "__main__":
    work()
