"""Images that are decoded in every epoch, from an image folder or from tar shards: sets of any size in flat memory.

The fingerprint of such a set is made of the names, sizes and times of its files and of a few decoded items; other bytes
are not read.
"""

from __future__ import annotations

import glob
import hashlib
import io
import os
import tarfile
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from soseleto.data import optional
from soseleto.data.live import Live
from soseleto.data.readers.class_indices import number_labels
from soseleto.data.readers.image_folder import SUFFIXES, read_folder
from soseleto.data.readers.problems import ProblemsError
from soseleto.data.readers.raw import Raw
from soseleto.data.readers.reading import Reading
from soseleto.data.storage import cache_root
from soseleto.errors import DataError, UsageError

Size = int | tuple[int, int]


def live_images(
    folder: str | Path,
    *,
    image_size: Size,
    channels: int = 3,
    classes: Sequence[str] | None = None,
    workers: int | None = None,
) -> Live:
    """An image folder with one subfolder per class, decoded by worker processes in every epoch.

    ``fit`` reads a folder given by its path once and keeps the decoded images in a cache; this is for folders whose
    decoded images would not fit there, or that change often.

    Args:
        folder: with one subfolder per class.
        image_size: side of every image in pixels, or (height, width).
        channels: 3 for RGB, 1 for grey.
        classes: class names by index; by default the sorted names of the subfolders. Source and target must agree.
        workers: number of decoding processes, as for ``Live``.
    """
    reading = Reading(image_size=image_size, channels=channels)
    assert reading.sides is not None
    raw = read_folder(Path(folder).expanduser(), name="given", reading=reading)
    raw = _numbered(raw, classes)
    assert isinstance(raw.labels, Tensor)
    assert raw.files is not None
    made = Live(ImageFiles(raw.files, raw.labels, (channels, *reading.sides)), workers=workers)
    made.ids, made.paths, made.classes = raw.ids, raw.paths, raw.classes
    made.know_labels(raw.labels)
    return made


def tar_shards(
    paths: str | Path | Sequence[str | Path],
    *,
    image_size: Size | None = None,
    channels: int = 3,
    label: str = "cls",
    workers: int | None = None,
) -> Live:
    """WebDataset shards: tar files in which members of one key are one example, such as 00012.jpg and 00012.cls.

    The place of every example is found once for each shard, from the headers alone, and kept in the image cache; after
    that examples are read in any order, and ranks and workers read only their own. The id of an example is its key.

    Args:
        paths: the shards, or a pattern such as ``"shards/*.tar"``.
        image_size: side of every image in pixels, or (height, width); needed for images, not for ``.npy`` arrays.
        channels: 3 for RGB, 1 for grey.
        label: the ending of the member that holds the class index as text.
        workers: number of reading processes, as for ``Live``.
    """
    sides = Reading(image_size=image_size, channels=channels).sides
    shape = None if sides is None else (channels, *sides)
    shards = TarShards(_existing(paths), label, shape)
    made = Live(shards, workers=workers)
    made.ids = shards.keys
    if len(set(made.ids)) != len(made.ids):
        raise DataError("two examples of the shards have the same key: name the members of all shards differently.")
    return made


class ImageFiles(Dataset[Any]):
    """Image files with their labels, each decoded when it is asked for."""

    def __init__(self, files: Sequence[str], labels: Tensor, shape: tuple[int, int, int]) -> None:
        self._files, self._labels, self._shape = _Texts(files), labels, shape

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, at: int) -> tuple[Tensor, Tensor]:
        rules, path = optional.decoding(), self._files[at]
        try:
            content = rules.decode(rules.read_bytes(path), self._shape)
        except Exception as error:
            raise DataError(f"{path} {rules.reason(error)}") from error
        return _image(content, self._shape), self._labels[at]

    def fingerprint(self) -> str:
        return _of_files(self._files[at] for at in range(len(self)))


class TarShards(Dataset[Any]):
    """Examples inside tar files, read at their offsets."""

    def __init__(self, paths: Sequence[str], label: str, shape: tuple[int, int, int] | None) -> None:
        self._paths, self._shape = list(paths), shape
        indices = [_index_of(path, label) for path in paths]
        self._places = np.concatenate([places for places, _ in indices])  # (N, 2, 2): input and label, offset and size
        self._starts = [0, *accumulate(len(places) for places, _ in indices)]
        self._names = np.concatenate([names for _, names in indices])  # of the input members
        self._files: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._places)

    @property
    def keys(self) -> tuple[str, ...]:
        return tuple(_key(str(name))[0] for name in self._names)

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        which = bisect_right(self._starts, at) - 1
        content, label = (self._bytes(which, *place) for place in self._places[at].tolist())
        name = str(self._names[at])
        if name.lower().endswith(".npy"):
            return torch.from_numpy(np.load(io.BytesIO(content), allow_pickle=False)), int(label)
        if self._shape is None:
            raise UsageError(
                "image_size must be given for shards with images, as in tar_shards(paths, image_size=224)."
            )
        rules = optional.decoding()
        try:
            return _image(rules.decode(content, self._shape), self._shape), int(label)
        except Exception as error:
            raise DataError(f"{name} in {self._paths[which]} {rules.reason(error)}") from error

    def fingerprint(self) -> str:
        return _of_files(self._paths)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": {}}

    def _bytes(self, which: int, offset: int, size: int) -> bytes:
        if which not in self._files:
            self._files[which] = os.open(self._paths[which], os.O_RDONLY)
        content = os.pread(self._files[which], size, offset)  # processes may share the file: it has no position
        if len(content) != size:
            raise DataError(f"{self._paths[which]} is shorter than when it was indexed: restore it from a copy.")
        return content

    def __del__(self) -> None:
        for handle in getattr(self, "_files", {}).values():
            os.close(handle)


class _Texts(Sequence[str]):
    """Many strings in two arrays, which worker processes share without copying (a list's reference counts are not)."""

    def __init__(self, texts: Iterable[str]) -> None:
        encoded = [os.fsencode(text) for text in texts]
        self._ends = np.cumsum([len(text) for text in encoded])
        self._bytes = np.frombuffer(b"".join(encoded), np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: Any) -> Any:
        begin = int(self._ends[at - 1]) if at else 0
        return os.fsdecode(self._bytes[begin : int(self._ends[at])].tobytes())


def _numbered(raw: Raw, classes: Sequence[str] | None) -> Raw:
    (made,) = number_labels([raw], shared=True)
    problems = [problem for problem in made.problems if problem.stops]
    if problems:
        raise ProblemsError(problems)
    if classes is None:
        return made
    assert made.classes is not None
    assert isinstance(made.labels, Tensor)
    if unknown := [name for name in made.classes if name not in classes]:
        raise UsageError(
            f"the folder has the class {unknown[0]!r}, which is not among classes: add it, or move it away."
        )
    order = torch.tensor([list(classes).index(name) for name in made.classes])
    return Raw(made.name, order[made.labels], files=made.files, ids=made.ids, paths=made.paths, classes=tuple(classes))


def _existing(paths: str | Path | Sequence[str | Path]) -> list[str]:
    given = [paths] if isinstance(paths, str | Path) else list(paths)
    found = [file for one in given for file in sorted(glob.glob(str(Path(one).expanduser()))) or [str(one)]]
    for file in found:
        if not os.path.isfile(file):
            raise UsageError(f"the shard {file!r} is not there: check the path.")
    return found


def _index_of(path: str, label: str) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and sizes (n, 2, 2) of input and label, and the input's names; from the cache if the file is the same."""
    found = os.stat(path)
    times = f"{found.st_mtime_ns}\n{found.st_ctime_ns}"  # the second also shows a file that got its old time back
    name = f"{os.path.abspath(path)}\n{found.st_size}\n{times}\n{label}"
    entry = cache_root() / "tar-index" / f"{hashlib.sha256(os.fsencode(name)).hexdigest()}.npz"
    if entry.is_file():
        with np.load(entry, allow_pickle=False) as kept:
            return kept["places"], kept["names"]
    places, names = _scanned(path, label)
    entry.parent.mkdir(parents=True, exist_ok=True)
    part = entry.with_name(f".{entry.name}.{os.getpid()}.npz")
    np.savez(part, places=places, names=names)
    part.rename(entry)
    return places, names


def _scanned(path: str, label: str) -> tuple[np.ndarray, np.ndarray]:
    inputs: dict[str, tuple[str, int, int]] = {}
    labels: dict[str, tuple[int, int]] = {}
    try:
        with tarfile.open(path, "r:") as archive:  # uncompressed: members are read at their offsets
            for member in archive:
                key, ending = _key(member.name)
                if not member.isfile():
                    continue
                if ending == label:
                    labels[key] = (member.offset_data, member.size)
                elif f".{ending}" in (*SUFFIXES, ".npy"):
                    inputs[key] = (member.name, member.offset_data, member.size)
    except tarfile.TarError as error:
        raise DataError(f"{path} is not an uncompressed tar file ({error}): unpack it, or write it again.") from error
    if missing := sorted(set(inputs) ^ set(labels)):
        what = "label" if missing[0] in inputs else "image or array"
        raise DataError(f"{missing[0]!r} in {path} has no {what}: add a member with the ending .{label} beside it.")
    if not inputs:
        raise DataError(f"{path} holds no image or array: put 000.jpg and 000.{label} into it, and so on.")
    places = [[place, labels[key]] for key, (_, *place) in inputs.items()]
    return np.array(places, np.int64), np.array([name for name, _, _ in inputs.values()])


def _key(name: str) -> tuple[str, str]:
    """Key and ending of a member: what is before and after the first dot of its file name."""
    folder, _, file = name.rpartition("/")
    key, _, ending = file.partition(".")
    return (f"{folder}/{key}" if folder else key), ending.lower()


def _image(content: bytes, shape: tuple[int, int, int]) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(shape)


def _of_files(paths: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        found = os.stat(path)
        digest.update(os.fsencode(f"{path}\n{found.st_size}\n{found.st_mtime_ns}\n"))
    return f"names, sizes and times {digest.hexdigest()}"
