"""Thumbnails of selected examples in the run folder, so that the report and the review do not need the data.

``pictures.parquet`` has the columns ``id`` and ``picture`` (the bytes of a PNG or a JPEG).
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from soseleto.errors import need
from soseleto.run_folder.files import parquet_columns, readable, verified
from soseleto.run_folder.folder import PICTURES, RunFolder
from soseleto.run_folder.ranking import shown_rows

if TYPE_CHECKING:
    from soseleto.data import ExampleSet

LARGEST = 96  # longer side, in pixels
LOSSLESS = 64  # images up to this side are stored as PNG
BATCH = 64


def save(folder: RunFolder, source: ExampleSet, also: Sequence[int] = ()) -> None:
    """Write thumbnails of the best, the worst, the suspects and the rows ``also``; nothing for other inputs."""
    import torch

    if not is_images(source.take(torch.tensor([0]))[0]):
        return
    ranking = folder.ranking()
    names = ranking["id"][shown_rows(ranking, also)].tolist()
    place = {source.id_of(at): at for at in range(len(source))}
    pictures = [_encode(pixels) for pixels in _pixels(source, [place[name] for name in names])]
    folder.write_parquet(PICTURES, {"id": names, "picture": pictures}, compression="none")


def load(folder: RunFolder) -> dict[str, bytes]:
    """Thumbnails by id; empty where the run has none."""
    path = verified(folder.path / PICTURES)
    if path is None:
        return {}
    with readable(path):
        columns = parquet_columns(path)
        ids, pictures = columns["id"].tolist(), columns["picture"].tolist()
        return dict(zip(ids, pictures, strict=True))


def media_type(picture: bytes) -> str:
    """From the first bytes."""
    return "image/png" if picture.startswith(b"\x89PNG") else "image/jpeg"


def from_file(path: str, largest: int) -> bytes | None:
    """An image file decoded and encoded again, so that only image data is served; None where it cannot be read.

    It is opened as for training: only in formats that need no other program, and after a check of its size.
    """
    from soseleto.data.images import open_image
    from soseleto.data.reading import existing

    try:
        return shrink(open_image(existing(path)).convert("RGB"), largest)
    except Exception:  # Pillow raises many kinds
        return None


def is_images(inputs: Any) -> bool:
    """Whether inputs (N, C, H, W) can be shown as images."""
    import torch

    if not isinstance(inputs, torch.Tensor) or inputs.ndim != 4:
        return False
    return inputs.shape[1] in (1, 3, 4) and min(inputs.shape[2:]) > 1


def shrink(image: Any, largest: int = LARGEST) -> bytes:
    """A Pillow image as PNG if it is small, else as a JPEG of at most ``largest`` pixels per side."""
    stream = io.BytesIO()
    if max(image.size) <= LOSSLESS:
        image.save(stream, "PNG", optimize=True)
    else:
        image = image.convert("RGB")
        image.thumbnail((largest, largest))
        image.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def _pixels(source: ExampleSet, places: list[int]) -> Iterator[np.ndarray]:
    """Images (C, H, W) one by one, read in batches."""
    import torch

    for piece in torch.tensor(places).split(BATCH):
        yield from source.take(piece)[0].detach().cpu().numpy()


def _encode(array: np.ndarray) -> bytes:
    """One image (C, H, W); values other than uint8 are scaled from [min, max] to [0, 255]."""
    image = need("PIL.Image", to="writing thumbnails")
    if array.dtype != np.uint8:
        low, high = float(array.min()), float(array.max())
        array = np.rint((array - low) * (255 / (high - low) if high > low else 0)).astype(np.uint8)
    array = np.ascontiguousarray(array[0] if len(array) == 1 else array.transpose(1, 2, 0))
    return shrink(image.fromarray(array))
