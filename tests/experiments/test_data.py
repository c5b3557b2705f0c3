"""The public sets: the real files, and small ones in the official formats."""

from __future__ import annotations

import gzip
import hashlib
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import io

from experiments import data
from experiments.data import HUMAN, LABEL_SETS, load
from fabricated import Hostile
from soseleto.data import Preprocess
from soseleto.errors import DataError

# Shape, and MD5 sums of the first and the last image.
ENDS = {
    ("mnist", "train"): ((60000, 1, 28, 28), "2ce86e4daeeff3a0cdebce6897c784ba", "ef7f533798be7e6e26fc648e9e8bb37d"),
    ("mnist", "test"): ((10000, 1, 28, 28), "1081cd3611ed4bea23c5769d20d414e5", "4cbc26cd65a7520ac820c54476b7c1f8"),
    ("cifar10", "train"): ((50000, 3, 32, 32), "564903faacb68848fabcb0f46460d2b5", "1d99508f8690b4cb22da5996be54fbd7"),
    ("cifar10", "test"): ((10000, 3, 32, 32), "7fa1480f5617b07b9a04920865c7d55f", "afccc589d8e60a955e33d2042f535962"),
    ("svhn", "train"): ((73257, 3, 32, 32), "26c20a13e2f981f91c0ba7b7a6533f66", "605a82f870b9fa484c7c2d83a11bebd7"),
}


def digest(image: torch.Tensor) -> str:
    return hashlib.md5(image.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(("name", "split"), sorted(ENDS))
def test_real_sizes_and_ends(data_root: Path, name: str, split: str) -> None:
    shape, first, last = ENDS[name, split]
    examples = load(name, split, data_root)
    assert (tuple(examples.inputs.shape), examples.inputs.dtype) == (shape, torch.uint8)
    assert (digest(examples.inputs[0]), digest(examples.inputs[-1])) == (first, last)
    if (name, split) == ("cifar10", "train"):
        assert Preprocess.of(examples.inputs).mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=5e-5)


def test_real_human_labels_have_the_published_noise(data_root: Path) -> None:
    clean, sets = load("cifar10", "train", data_root).labels, data.human_labels(data_root)
    shares = {name: round(100 * float((labels != clean).double().mean()), 2) for name, labels in sets.items()}
    assert shares == dict(zip(LABEL_SETS, (40.21, 9.01, 17.23, 18.12, 17.64, 0.0), strict=True))
    by_default = load("cifar10n", "train", data_root)
    assert torch.equal(by_default.labels, sets["worse_label"])
    assert torch.equal(by_default.truth, clean)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_mnist(root: Path, split: str, images: np.ndarray, labels: np.ndarray, *, packed: bool) -> None:
    (root / "MNIST/raw").mkdir(parents=True, exist_ok=True)
    for name, array in (("images-idx3", images), ("labels-idx1", labels)):
        content = gzip.compress(idx(array)) if packed else idx(array)
        (root / "MNIST/raw" / f"{split}-{name}-ubyte{'.gz' if packed else ''}").write_bytes(content)


@pytest.mark.parametrize("packed", [False, True])
def test_mnist(tmp_path: Path, packed: bool) -> None:
    images = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)
    write_mnist(tmp_path, "t10k", images, np.array([3, 9], np.uint8), packed=packed)
    digits = load("mnist", "test", tmp_path)
    assert np.array_equal(digits.inputs[:, 0].numpy(), images)
    assert digits.labels.tolist() == [3, 9]
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte is missing: type python -m experiments data mnist"):
        load("mnist", "train", tmp_path)


def test_cifar_and_svhn(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 3, 32, 32), dtype=np.uint8)
    labels = np.array([4, 0, 9, 5], np.uint8)
    (tmp_path / "cifar-10-batches-bin").mkdir()
    rows = np.concatenate([labels[:, None], pixels.reshape(4, -1)], 1)
    (tmp_path / "cifar-10-batches-bin/test_batch.bin").write_bytes(rows.tobytes())
    (tmp_path / "svhn").mkdir()
    of_svhn = np.array([[4], [10], [9], [5]], np.uint8)  # 10 is the digit 0
    io.savemat(tmp_path / "svhn/test_32x32.mat", {"X": pixels.transpose(2, 3, 1, 0), "y": of_svhn})
    for name in ("cifar10", "svhn"):
        images = load(name, "test", tmp_path)
        assert np.array_equal(images.inputs.numpy(), pixels)
        assert images.labels.tolist() == labels.tolist()
    with pytest.raises(DataError, match=r"train_32x32.mat is missing"):
        load("svhn", "train", tmp_path)


def test_no_code_in_a_file_of_labels_runs(tmp_path: Path) -> None:
    (tmp_path / HUMAN).parent.mkdir()
    torch.save({name: Hostile(tmp_path / "was here") for name in LABEL_SETS}, tmp_path / HUMAN)
    with pytest.raises(pickle.UnpicklingError):
        data.human_labels(tmp_path)
    assert not (tmp_path / "was here").exists()


def test_missing_files_are_fetched_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    served = tmp_path / "server"
    images, labels = np.zeros((2, 28, 28), np.uint8), np.array([0, 1], np.uint8)
    for split in ("train", "t10k"):
        write_mnist(served, split, images, labels, packed=True)
    files = tuple(
        (path, (served / path).as_uri(), hashlib.md5((served / path).read_bytes()).hexdigest())
        for path, _, _ in data.FILES["mnist"]
    )
    monkeypatch.setattr(data, "FILES", {"mnist": files})
    lines: list[str] = []
    data.fetch("mnist", tmp_path / "root", lines.append)
    assert len(lines) == 6
    assert lines[-1].startswith("mnist test: 2 examples in")
    lines.clear()
    data.fetch("mnist", tmp_path / "root", lines.append)
    assert len(lines) == 2  # nothing is fetched twice
    monkeypatch.setattr(data, "FILES", {"mnist": [(path, url, "0" * 32) for path, url, _ in files]})
    with pytest.raises(DataError, match="has the MD5 sum"):
        data.fetch("mnist", tmp_path / "other")
