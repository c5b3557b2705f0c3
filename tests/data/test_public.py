"""The public sets: the real files, and small ones in every official format."""

import gzip
import hashlib
import pickle
import struct

import numpy as np
import pytest
import torch

from experiments.public import load
from experiments.public.cifar import LABEL_SETS, read_binary, read_human, read_python
from experiments.public.fetch import COUNTS, FILES, main, verify
from experiments.public.idx import read_idx
from experiments.public.mat import read_mat
from experiments.public.sets import NAMES, SPLITS
from soseleto.errors import DataError, UsageError


def digest(image: torch.Tensor) -> str:
    return hashlib.md5(image.contiguous().numpy().tobytes()).hexdigest()


ENDS = {
    ("mnist", "train"): ((60000, 1, 28, 28), "2ce86e4daeeff3a0cdebce6897c784ba", "ef7f533798be7e6e26fc648e9e8bb37d"),
    ("mnist", "test"): ((10000, 1, 28, 28), "1081cd3611ed4bea23c5769d20d414e5", "4cbc26cd65a7520ac820c54476b7c1f8"),
    ("cifar10", "train"): ((50000, 3, 32, 32), "564903faacb68848fabcb0f46460d2b5", "1d99508f8690b4cb22da5996be54fbd7"),
    ("cifar10", "test"): ((10000, 3, 32, 32), "7fa1480f5617b07b9a04920865c7d55f", "afccc589d8e60a955e33d2042f535962"),
    ("svhn", "train"): ((73257, 3, 32, 32), "26c20a13e2f981f91c0ba7b7a6533f66", "605a82f870b9fa484c7c2d83a11bebd7"),
}


@pytest.mark.parametrize(("name", "split"), sorted(ENDS))
def test_real_counts_and_ends(real_root, name, split):
    shape, first, last = ENDS[(name, split)]
    examples = load(name, split, real_root)
    assert tuple(examples.inputs.shape) == shape
    assert examples.inputs.dtype == torch.uint8
    assert tuple(torch.bincount(examples.labels).tolist()) == COUNTS[(name, split)]
    assert (digest(examples.inputs[0]), digest(examples.inputs[-1])) == (first, last)


def test_real_statistics_are_the_published_ones(real_root):
    from soseleto.data import Preprocess

    assert Preprocess.of(load("mnist", "train", real_root).inputs).mean == pytest.approx((0.1307,), abs=5e-5)
    cifar = Preprocess.of(load("cifar10", "train", real_root).inputs)
    assert cifar.mean == pytest.approx((0.4914, 0.4822, 0.4465), abs=5e-5)
    assert cifar.std == pytest.approx((0.2470, 0.2435, 0.2616), abs=5e-5)


def test_real_human_labels_have_the_published_noise(real_root):
    rates = {}
    for label_set in LABEL_SETS:
        examples = load("cifar10n", "train", real_root, label_set=label_set)
        rates[label_set] = round(100 * float((examples.labels != examples.truth).double().mean()), 2)
    assert rates == {
        "clean_label": 0.0,
        "aggre_label": 9.01,
        "random_label1": 17.23,
        "random_label2": 18.12,
        "random_label3": 17.64,
        "worse_label": 40.21,
    }
    by_default = load("cifar10n", "train", real_root)
    assert float((by_default.labels != by_default.truth).double().mean()) == pytest.approx(0.40208)
    assert len(load("cifar10n", "test", real_root)) == 10000


def test_real_mnist_bytes_are_the_official_ones(real_root):
    official = {
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    }
    for name, md5 in official.items():
        content = (real_root / "MNIST" / "raw" / name).read_bytes()
        assert hashlib.md5(content).hexdigest() == md5


def test_real_svhn_agrees_with_scipy(real_root):
    from scipy import io

    theirs = io.loadmat(real_root / "svhn" / "train_32x32.mat", variable_names=["y"])["y"]
    assert np.array_equal(read_mat(real_root / "svhn" / "train_32x32.mat", ("y",))["y"], theirs)


def test_what_the_command_reports(real_root):
    said = []
    main("mnist", real_root, said.append)
    assert said[0].startswith("mnist train: 60000 examples")
    assert said[1].startswith("mnist test: 10000 examples")
    assert verify("cifar10n", "test", real_root) == 10000


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("folder", ["MNIST/raw", "mnist", "."])
def test_mnist_in_every_layout(tmp_path, folder, end):
    images = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(2, 28, 28)
    (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for name, array in (("images-idx3", images), ("labels-idx1", np.array([3, 9], np.uint8))):
        content = idx(array)
        content = gzip.compress(content) if end else content
        (tmp_path / folder / f"t10k-{name}-ubyte{end}").write_bytes(content)
    made = load("mnist", "test", tmp_path)
    assert np.array_equal(made.inputs[:, 0].numpy(), images)
    assert made.labels.tolist() == [3, 9]
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte.* missing.*type soseleto data mnist"):
        load("mnist", "train", tmp_path)


def python2_pickle(pixels: np.ndarray, labels: list[int]) -> bytes:
    """A batch as Python 2 wrote the official files: byte strings, protocol 2, NumPy's old name."""

    def text(value: bytes) -> bytes:
        short = len(value) < 256
        return (b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<I", len(value))) + value

    shape = b"".join(b"M" + struct.pack("<H", side) for side in pixels.shape)
    return (
        b"\x80\x02}q\x01(" + text(b"batch_label") + text(b"training batch 1 of 5")
        + text(b"labels") + b"]q\x02(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
        + text(b"data") + b"cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85"
        + text(b"b") + b"\x87R(K\x01" + shape + b"\x86"
        + b"cnumpy\ndtype\nq\x05" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|")
        + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89" + text(pixels.tobytes()) + b"tbu."
    )  # fmt: skip


def test_cifar_python_and_binary_versions_agree(tmp_path):
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (3, 3072), dtype=np.uint8)
    labels = [4, 0, 9]
    old = tmp_path / "data_batch_1"
    old.write_bytes(python2_pickle(pixels, labels))
    assert pickle.loads(old.read_bytes(), encoding="bytes")[b"labels"] == labels  # the imitation is fair
    new = tmp_path / "data_batch_2"
    new.write_bytes(pickle.dumps({"data": pixels, "labels": labels}, protocol=4))
    plain = tmp_path / "data_batch_1.bin"
    plain.write_bytes(b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True)))
    for images, found in (read_python(old), read_python(new), read_binary(plain)):
        assert np.array_equal(images.reshape(3, -1), pixels)
        assert found.tolist() == labels
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    (folder / "test_batch").write_bytes(old.read_bytes())
    assert load("cifar10", "test", tmp_path).labels.tolist() == labels


@pytest.mark.parametrize("zipped", [True, False])
def test_human_labels_in_both_formats_of_torch(tmp_path, zipped):
    labels = {name: np.arange(50000) % 10 for name in LABEL_SETS}
    path = tmp_path / "CIFAR-10_human.pt"
    torch.save(labels, path, _use_new_zipfile_serialization=zipped)
    assert all(np.array_equal(read_human(path)[name], labels[name]) for name in LABEL_SETS)
    torch.save(labels | {"worse_label": np.arange(10)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(DataError, match="no 'worse_label' of 50000 labels"):
        read_human(path)


@pytest.mark.parametrize("packed", [True, False])
def test_mat_files_as_scipy_writes_them(tmp_path, packed):
    from scipy import io

    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    labels = np.array([[10], [1], [9], [5]], np.uint8)
    path = tmp_path / "svhn" / "test_32x32.mat"
    path.parent.mkdir()
    io.savemat(path, {"other": np.eye(3), "X": images, "y": labels}, do_compression=packed)
    made = load("svhn", "test", tmp_path)
    assert np.array_equal(made.inputs.numpy(), images.transpose(3, 2, 0, 1))
    assert made.labels.tolist() == [0, 1, 9, 5]
    io.savemat(path, {"X": images, "y": labels.astype(float)}, do_compression=packed)
    assert load("svhn", "test", tmp_path).labels.tolist() == [0, 1, 9, 5]
    io.savemat(path, {"X": images}, do_compression=packed)
    with pytest.raises(DataError, match="no variable 'y'"):
        load("svhn", "test", tmp_path)
    io.savemat(path, {"X": images[:16], "y": labels}, do_compression=packed)
    with pytest.raises(DataError, match="it is not SVHN"):
        load("svhn", "test", tmp_path)


def test_words_that_are_off():
    with pytest.raises(UsageError, match="did you mean 'cifar10'"):
        load("cifar-10")
    with pytest.raises(UsageError, match="did you mean 'train'"):
        load("mnist", "trian")
    with pytest.raises(UsageError, match="no effect on mnist train"):
        load("mnist", label_set="worse_label")
    with pytest.raises(UsageError, match="did you mean 'worse_label'"):
        load("cifar10n", label_set="worst_label")
    with pytest.raises(UsageError, match="did you mean 'svhn'"):
        main("shvn")


def test_idx_says_what_is_wrong(tmp_path):
    path = tmp_path / "a"
    whole = idx(np.zeros((2, 3), np.uint8))
    for content, words in (
        (b"", "not an IDX file"),
        (b"\0\0\x0d\2" + whole[4:], "not an IDX file"),
        (whole[:6], "ends inside its header"),
        (whole[:-1], "but has only 5"),
        (whole + b"x", "but has more"),
        (gzip.compress(whole)[:-5], "damaged"),
    ):
        path.write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_idx(path)


def test_the_tables_of_the_sets_fit_together():
    assert set(FILES) == set(NAMES)
    for name, split in COUNTS:
        assert split in SPLITS
        assert sum(COUNTS[(name, split)]) == {
            "mnist": (60000, 10000), "cifar10": (50000, 10000), "svhn": (73257, 26032)
        }[name][split == "test"]  # fmt: skip
