"""The public data sets of the experiments: MNIST, CIFAR-10, CIFAR-10N and SVHN, fetched, verified and read.

Files are in the layout of their publishers below a root folder: ``root`` if given, else SOSELETO_DATA, else
``~/.cache/soseleto/data``.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import torch

from soseleto.data import Examples
from soseleto.errors import DataError, UsageError, did_you_mean, need

DIGITS = tuple("0123456789")
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
NAMES = ("mnist", "cifar10", "cifar10n", "svhn")
SPLITS = ("train", "test")
LABEL_SETS = ("worse_label", "aggre_label", "random_label1", "random_label2", "random_label3", "clean_label")
HUMAN = "cifar-10n/CIFAR-10_human.pt"
BATCHES = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
_CIFAR = ("cifar-10-binary.tar.gz", "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
          "c32a1d4ab5d03f1284b67883e8d87530")  # fmt: skip
_CIFAR_N = "https://github.com/UCSC-REAL/cifar-10-100n/raw/main/data/"
_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_SVHN = "http://ufldl.stanford.edu/housenumbers/"
# Path below the root, address and MD5 sum, which is what the publishers give.
FILES: Mapping[str, tuple[tuple[str, str, str], ...]] = {
    "mnist": tuple(
        (f"MNIST/raw/{name}.gz", f"{_MNIST}{name}.gz", md5)
        for name, md5 in (
            ("train-images-idx3-ubyte", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            ("train-labels-idx1-ubyte", "d53e105ee54ea40749a09fcbcd1e9432"),
            ("t10k-images-idx3-ubyte", "9fb629c4189551a2d022fa330f9573f3"),
            ("t10k-labels-idx1-ubyte", "ec29112dd5afa0611ce80d1b7f02629c"),
        )
    ),
    "cifar10": (_CIFAR,),
    "cifar10n": (_CIFAR, (HUMAN, f"{_CIFAR_N}CIFAR-10_human.pt", "96644db5574813cae939af5f7f2a0aec")),
    "svhn": (
        ("svhn/train_32x32.mat", f"{_SVHN}train_32x32.mat", "e26dedcc434d2e4c54c9b2d4a06d8373"),
        ("svhn/test_32x32.mat", f"{_SVHN}test_32x32.mat", "eb5a983be6a315427106f1b164d9cef3"),
    ),
}
Root = str | Path | None


def data_root(root: Root = None) -> Path:
    """``root``, else SOSELETO_DATA, else ~/.cache/soseleto/data."""
    return Path(root or os.environ.get("SOSELETO_DATA") or "~/.cache/soseleto/data").expanduser()


def load(name: str, split: str = "train", root: Root = None, *, label_set: str = "worse_label") -> Examples:
    """A split of a public data set, in its official order, as uint8 images.

    label_set: of "cifar10n", one of LABEL_SETS; the clean labels are ``truth``. Its test split is that of CIFAR-10.
    """
    _require("data set", name, NAMES)
    _require("split", split, SPLITS)
    _require("label set", label_set, LABEL_SETS)
    where = data_root(root)
    try:
        if name == "mnist":
            return _mnist(where, split)
        if name == "svhn":
            return _svhn(where, split)
        images = _cifar10(where, split)
        return images if name == "cifar10" or split == "test" else _with_human_labels(images, where, label_set)
    except FileNotFoundError as error:
        raise DataError(
            f"{error.filename} is missing: type python -m experiments data {name}, or set SOSELETO_DATA to the folder "
            "that has it."
        ) from error


def fetch(name: str, root: Root = None, report: Callable[[str], None] = print) -> None:
    """Download the files of a public data set that are missing, compare their MD5 sums, and read every split."""
    _require("data set", name, NAMES)
    where = data_root(root)
    for path, url, md5 in FILES[name]:
        if not _is_there(where, path):
            report(f"{name}: fetching {url} into {where}")
            _download(url, where / path, md5)
            if path.endswith(".tar.gz"):
                with tarfile.open(where / path) as archive:
                    archive.extractall(where, filter="data")
                (where / path).unlink()
    for split in SPLITS:
        report(f"{name} {split}: {len(load(name, split, where))} examples in {where}")


def _require(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"unknown {what} {value!r}{did_you_mean(value, known)}: choose from {', '.join(known)}.")


def _is_there(where: Path, path: str) -> bool:
    """A file, the same file unpacked, or the last batch of CIFAR-10's archive."""
    unpacked = "cifar-10-batches-bin/test_batch.bin" if path.endswith(".tar.gz") else path.removesuffix(".gz")
    return (where / path).is_file() or (where / unpacked).is_file()


def _download(url: str, path: Path, md5: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        torch.hub.download_url_to_file(url, str(part))
    except (URLError, OSError) as error:
        raise DataError(f"{url} cannot be downloaded ({error}): save it as {path}.") from error
    with open(part, "rb") as file:
        found = hashlib.file_digest(file, "md5").hexdigest()
    if found != md5:
        part.unlink()
        raise DataError(f"{url} has the MD5 sum {found}, not {md5}: try again.")
    part.replace(path)


def _mnist(where: Path, split: str) -> Examples:
    first = "train" if split == "train" else "t10k"
    images, labels = (_idx(where / "MNIST/raw" / f"{first}-{stem}-ubyte") for stem in ("images-idx3", "labels-idx1"))
    return _examples(images[:, None], labels, DIGITS)


def _idx(path: Path) -> np.ndarray:
    """The array in an IDX file, packed or not: two zeros, 8 for bytes, the number of sides, the sides, the bytes."""
    packed = path.with_name(path.name + ".gz")
    content = gzip.decompress(packed.read_bytes()) if packed.is_file() else path.read_bytes()
    sides = 4 * content[3]
    shape = np.frombuffer(content, ">u4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + sides).reshape(shape)


def _cifar10(where: Path, split: str) -> Examples:
    """From the binary version: of every image its label and 3,072 values, channels first."""
    batches = [np.fromfile(where / f"cifar-10-batches-bin/{name}.bin", np.uint8) for name in BATCHES[split]]
    rows = np.concatenate(batches).reshape(-1, 1 + 3 * 32 * 32)
    return _examples(rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0], OBJECTS)


def _with_human_labels(images: Examples, where: Path, label_set: str) -> Examples:
    labels = human_labels(where)
    if not torch.equal(images.labels, labels["clean_label"]):
        raise DataError(f"the clean labels of {where / HUMAN} are not those of CIFAR-10: fetch both again.")
    return Examples(images.inputs, labels[label_set], classes=OBJECTS, truth=images.labels)


def human_labels(where: Path) -> dict[str, torch.Tensor]:
    """The label sets of CIFAR-10N, (50000,) int64 each; no code in the file can run."""
    reconstruct: Any = np.empty(0).__reduce__()[0]  # which has another module in NumPy 1
    allowed = [(reconstruct, "numpy.core.multiarray._reconstruct"), np.ndarray, np.dtype, np.dtypes.Int64DType]
    with torch.serialization.safe_globals(allowed):
        content = torch.load(where / HUMAN, weights_only=True)
    return {name: torch.from_numpy(content[name].astype(np.int64)) for name in LABEL_SETS}


def _svhn(where: Path, split: str) -> Examples:
    path = where / f"svhn/{split}_32x32.mat"
    if not path.is_file():
        raise FileNotFoundError(2, "no such file", str(path))
    arrays = need("scipy.io", to="reading SVHN").loadmat(path)
    return _examples(arrays["X"].transpose(3, 2, 0, 1), arrays["y"].reshape(-1) % 10, DIGITS)  # 0 is stored as 10


def _examples(images: np.ndarray, labels: np.ndarray, classes: tuple[str, ...]) -> Examples:
    return Examples(
        torch.from_numpy(np.array(images, order="C")), torch.from_numpy(labels.astype(np.int64)), classes=classes
    )
