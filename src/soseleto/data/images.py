"""Images of one shape, decoded once in a run: threads run Pillow and fill one array, which is on disk if it is large.

The rules, in order: the first frame is used; the EXIF orientation is applied; 16-bit values are divided by 257; float
values are taken as 0 to 1 if none is above 1, else as 0 to 255; transparent images are composited on white; other modes
become RGB or grey. To change the size, the largest centred window with the target aspect ratio is resampled (bilinear,
antialiased). JPEGs at least four times too large are decoded at 1/2, 1/4 or 1/8, never below twice the target size.
"""

from __future__ import annotations

import io
import math
import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from soseleto.data.reading import Problem, Raw, Reading, some
from soseleto.errors import DataError, counted

if TYPE_CHECKING:  # Pillow is imported by the functions that use it: arrays are trained on without it
    from PIL import Image

LARGE = 1 << 28  # bytes above which decoded images are kept on disk
MAX_PIXELS = 1 << 26  # 67 million: larger images are treated as decompression bombs
# No format that needs another program or embeds code (EPS runs Ghostscript), or that has no signature (TGA). HEIF is
# read where a plugin, such as pillow-heif, has been registered.
FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "MPO", "AVIF", "JPEG2000", "HEIF", "DIB", "ICO", "PCX")
_MIN_SIDE, _MAX_RATIO = 4, 20
_SAMPLED = 256  # source images, evenly spaced, whose headers decide size and colour
_LARGEST = 224  # the largest side chosen by default
_GREY = ("1", "L", "LA", "La", "I", "F", "I;16", "I;16B", "I;16L", "I;16N")
_ORIENTATION = 0x0112  # the EXIF tag
_NOT_UTF8 = re.compile("[\ud800-\udfff]")  # as the names of files have such bytes

Shape = tuple[int, int, int]  # channels, height, width


class Unreadable(Exception):
    """A file cannot be used; the message continues a sentence that starts with its name."""


def open_image(path: str) -> Image.Image:
    """Open an image, reading only the header; its size is checked before any pixel is decoded."""
    from PIL import Image

    if os.path.exists(path) and not os.path.isfile(path):  # a pipe would block
        raise Unreadable("is not a file")
    content = Path(path).read_bytes()
    if not content:
        raise Unreadable("is empty")
    Image.init()
    image = Image.open(io.BytesIO(content), formats=[name for name in FORMATS if name in Image.OPEN])
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise Unreadable(f"has {width} x {height} pixels, more than the limit of {MAX_PIXELS}")
    if min(width, height) < _MIN_SIDE or max(width, height) > _MAX_RATIO * min(width, height):
        raise Unreadable(f"has the absurd size {width} x {height}")
    return image


def pixels(image: Image.Image, shape: Shape) -> np.ndarray:
    """An opened image as (C, H, W) bytes."""
    from PIL import Image, ImageOps

    channels, height, width = shape
    image.draft(None, (2 * max(height, width),) * 2)  # of no effect on other formats than JPEG
    image = _eight_bits(ImageOps.exif_transpose(image)).convert("RGB" if channels == 3 else "L")
    if image.size != (width, height):
        image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
    array = np.asarray(image)
    return array.transpose(2, 0, 1) if channels == 3 else array[None]


def _eight_bits(image: Image.Image) -> Image.Image:
    """8 bits per channel, no transparency."""
    from PIL import Image

    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA"))
    if image.mode not in ("I", "F") and "I;16" not in image.mode:
        return image
    values = np.asarray(image)
    if image.mode == "F":
        values = np.nan_to_num(values) * (255.0 if np.nanmax(values) <= 1 else 1.0)
    elif "I;16" in image.mode or values.max() > 255:
        values = values / 257.0
    return Image.fromarray(np.clip(np.rint(values), 0, 255).astype(np.uint8))


def _reason(error: BaseException) -> str:
    """Why a file could not be read; continues a sentence that starts with its name."""
    from PIL import UnidentifiedImageError

    if isinstance(error, Unreadable):
        return str(error)
    if isinstance(error, FileNotFoundError):
        return "is missing"
    if isinstance(error, UnidentifiedImageError):
        return "is not an image of a known kind"
    return f"cannot be decoded ({' '.join(str(error).split()) or type(error).__name__})"


def decoded(images: Sequence[Any], shape: Shape, workers: int | None = None) -> tuple[Tensor, dict[str, list[int]]]:
    """(N, C, H, W) uint8, and by reason the rows that cannot be decoded, which are zero; "" is left out."""
    array = _zeros((len(images), *shape))

    def fill_row(row: int) -> str | None:
        try:
            image = images[row]
            if image != "":
                array[row] = pixels(open_image(image) if isinstance(image, str) else image, shape)
        except Exception as error:  # Pillow raises many kinds; one bad file must not stop the others
            return _reason(error)
        return None

    bad: dict[str, list[int]] = {}  # so that a thousand missing files are one line
    with warnings.catch_warnings(), ThreadPoolExecutor(workers or os.cpu_count()) as pool:
        warnings.simplefilter("ignore")  # Pillow's warnings about odd files: unreadable ones are reported as bad
        for row, why in enumerate(pool.map(fill_row, range(len(images)))):
            if why is not None:
                bad.setdefault(why, []).append(row)
    return torch.from_numpy(array), bad


def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    """Bytes in memory, or where they are many in a temporary file without a name, which is gone with the process."""
    size = math.prod(shape)
    if size <= LARGE:
        return np.zeros(shape, dtype=np.uint8)
    free = shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:
        raise DataError(
            f"the decoded images need {size / 2**30:.1f} GiB in {tempfile.gettempdir()} but {free / 2**30:.1f} GiB are "
            "free: give a smaller image_size, or set TMPDIR to a folder on another disk."
        )
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype=np.uint8, mode="w+", shape=shape)


def shape_for(source: Raw, reading: Reading) -> Shape | None:
    """Channels, height and width of every image; None if the inputs are not images.

    Defaults: the size of the source images if it is the same for all and no side is above 224, else a square with
    the median of the shorter sides, at most 224; grey if all source images are grey.
    """
    if source.images is None:
        inputs = source.inputs
        return (*inputs.shape[1:],) if isinstance(inputs, Tensor) and inputs.ndim == 4 else None
    images = source.images
    headers = []
    for row in range(0, len(images), max(1, len(images) // _SAMPLED)):
        try:
            headers.append(_header(images[row]))
        except Exception:  # reported when the image is decoded
            continue
    if not headers:
        raise DataError(f"none of the sampled {source.name} images can be read: check the files.")
    channels = reading.channels or (3 if any(colour for _, _, colour in headers) else 1)
    if reading.sides is not None:
        return (channels, *reading.sides)
    sizes = {(height, width) for height, width, _ in headers}
    if len(sizes) == 1 and max(max(sizes)) <= _LARGEST:
        return (channels, *sizes.pop())
    side = min(_LARGEST, round(median(min(height, width) for height, width, _ in headers)))
    return channels, side, side


def _header(image: Any) -> tuple[int, int, bool]:
    """Height, width and whether the image has colour."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        image = open_image(image) if isinstance(image, str) else image
        width, height = image.size
        if image.getexif().get(_ORIENTATION, 1) in (5, 6, 7, 8):  # rotated by a quarter turn
            width, height = height, width
    return height, width, image.mode not in _GREY


def pixels_of(raw: Raw, shape: Shape) -> tuple[Tensor, list[Problem]]:
    """All images of a data set as (N, C, H, W) uint8, and the unreadable ones as problems (their rows are zero)."""
    assert raw.images is not None
    # A data set that opens its images itself may not allow several threads.
    inputs, bad = decoded(raw.images, shape, workers=1 if raw.paths is None else None)
    return inputs, [_problem(raw, why, rows) for why, rows in bad.items()]


def _problem(raw: Raw, why: str, rows: list[int]) -> Problem:
    kind = "missing" if why == "is missing" else "absurd size" if "absurd" in why else "unreadable"
    names = some([raw.paths[row] if raw.paths else f"image {raw.id_of(row)}" for row in rows])
    text = f"each of {len(rows)} images {why}: {names}." if len(rows) > 1 else f"{names} {why}."
    return Problem(raw.name, kind, text, tuple(raw.id_of(row) for row in rows))


# Image folders: one subfolder per class; the path below the folder is the id


def read_folder(folder: Path, *, name: str, reading: Reading, labelled: bool = True) -> Raw:
    """All images at any depth below the class folders, sorted by path; hidden files are skipped, others named.

    labelled: else images beside the class folders are read too, and every label is 0
    """
    classes = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    if labelled and not classes:
        raise DataError(f"the {name} folder {folder} has no subfolders: make one for each class, with its images.")
    inside = [path for c in classes for path in sorted(_files(folder, c, allow_outside=reading.allow_outside))]
    beside = sorted(each.name for each in os.scandir(folder) if each.is_file() and not each.name.startswith("."))
    if odd := next(filter(_NOT_UTF8.search, [*inside, *beside]), None):
        raise DataError(f"the name of the file {odd!r} in {folder} is not UTF-8: rename it.")
    ids = list(filter(is_image, inside if labelled else sorted([*inside, *beside])))
    if not ids:
        place = f"into its subfolders ({some(classes)})" if labelled else "there"
        raise DataError(f"no images below {folder} of the {name}: put .jpg, .jpeg, .png ... files {place}.")
    problems, known = [], set(ids)
    if unused := [path for path in (*beside, *inside) if path not in known]:
        why = "since Pillow does not read them as images, or they are beside the class folders"
        text = f"{counted(len(unused), 'file is', 'files are')} not used, {why} ({some(unused)})."
        problems.append(Problem(name, "not read", text, stops=False))
    class_of = [path.partition("/")[0] for path in ids]
    if labelled and (empty := [c for c in classes if c not in class_of]):
        which = f"the class {empty[0]} has" if len(empty) == 1 else f"the classes {some(empty)} have"
        text = f"{which} no images: put images there, or remove the empty subfolders."
        problems.append(Problem(name, "empty class", text))
    if outsiders := [] if reading.allow_outside else [ids[row] for row in outside(folder, ids)]:
        text = f"{some(outsiders)} lead outside {folder}: type reading=Reading(allow_outside=True) if intended."
        problems.append(Problem(name, "outside", text, tuple(outsiders)))
    files = tuple(f"{folder}{os.sep}{path}" for path in ids)
    return Raw(
        name,
        tuple(class_of) if labelled else torch.zeros(len(ids)).long(),
        images=files,
        ids=tuple(ids),
        paths=files,
        problems=tuple(problems),
    )


def is_image(path: str | Path) -> bool:
    from PIL import Image

    return Image.registered_extensions().get(os.path.splitext(path)[1].lower()) in FORMATS


def _files(folder: Path, c: str, *, allow_outside: bool) -> Iterator[str]:
    """Posix paths relative to the folder; linked folders below the class are entered only if ``allow_outside``."""

    def fail(error: OSError) -> None:
        raise DataError(f"the folder {error.filename} cannot be read ({error.strerror}): check its permissions.")

    for here, folders, names in os.walk(folder / c, onerror=fail, followlinks=allow_outside):
        folders[:] = [below for below in folders if not below.startswith(".")]
        links = [] if allow_outside else [below for below in folders if os.path.islink(os.path.join(here, below))]
        visible = (name for name in (*names, *links) if not name.startswith("."))
        yield from (Path(here, name).relative_to(folder).as_posix() for name in visible)


def outside(root: Path, paths: Sequence[str]) -> list[int]:
    """The rows whose path, with links resolved, is not below the root."""
    real_folder = cache(os.path.realpath)  # once per folder, not once per file
    real_root = os.path.realpath(root)
    rows = []
    for row, path in enumerate(paths):
        folder, name = os.path.split(os.path.join(root, path))
        full = os.path.join(real_folder(folder), name)
        real = os.path.realpath(full) if name in ("", ".", "..") or os.path.islink(full) else full
        if os.path.commonpath([real_root, real]) != real_root:
            rows.append(row)
    return rows
