"""Loading a run: predict, export to ONNX, and no code run from a run folder."""

from __future__ import annotations

import csv
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import soseleto
from soseleto import prediction
from soseleto.data.feeding import Prepare
from soseleto.data.read import read_inputs
from soseleto.errors import DataError, UsageError
from soseleto.models import architectures
from soseleto.prediction import Predictor, export_onnx
from soseleto.run_folder.folder import CALIBRATION, RunFolder
from typing_in import run

CLASSES = ("cat", "dog", "owl")


def images(n: int = 12, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n, 1, 28, 28), dtype=torch.uint8, generator=draw), torch.arange(n) % 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> soseleto.Result:
    x, y = images()
    source = soseleto.data.Examples(x, y, classes=CLASSES)
    out = tmp_path_factory.mktemp("runs") / "pictures"
    checkpoints = soseleto.Checkpoints(notes={"model": "lenet", "n_classes": 3})
    model = architectures.lenet(3)
    return soseleto.fit(model, source, source, epochs=1, lr=0.01, device="cpu", out=out, checkpoints=checkpoints)


def test_load_restores_the_model(trained: soseleto.Result) -> None:
    x, _ = images(seed=1)
    loaded = soseleto.load(trained.out, device="cpu")
    assert torch.equal(loaded.outputs(x), trained.outputs(x))
    assert torch.equal(loaded.predict(x), trained.predict(x))
    assert (loaded.classes, loaded.shape, loaded.temperature) == (CLASSES, (1, 28, 28), 1.0)
    assert loaded.class_name(2) == "owl"


def test_predictions_are_those_of_evaluation_mode() -> None:
    """Without dropout, and by a norm's running statistics, also while the model is in training mode."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3)).train()
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    found = Predictor(model=model, prepare=Prepare(None, torch.float32), device=torch.device("cpu")).outputs(inputs)
    assert all(module.training for module in model.modules())
    assert torch.equal(model[1].running_mean, torch.zeros(4))
    with torch.no_grad():
        assert torch.allclose(found, model.eval()(inputs), atol=1e-6)


def test_the_temperature_is_kept_and_used(trained: soseleto.Result, tmp_path: Path) -> None:
    x, y = images(30, seed=2)
    calibrated = trained.calibrated((x, y))
    assert calibrated.temperature != 1.0
    assert torch.equal(calibrated.predict(x), trained.predict(x))
    loss = [float(torch.nn.functional.nll_loss(one.predict_proba(x).log(), y)) for one in (trained, calibrated)]
    assert loss[1] < loss[0]
    folder = RunFolder(trained.out)
    folder.write_json(CALIBRATION, {"temperature": 2.0})
    try:
        again = soseleto.load(folder.path, device="cpu")
        assert torch.allclose(again.predict_proba(x), (trained.outputs(x) / 2).softmax(1))
    finally:
        folder.write_json(CALIBRATION, {"temperature": 1.0})


def test_a_custom_model_is_rebuilt_only_when_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from torch import nn\nfrom pathlib import Path\nPath(__file__).with_name('ran').touch()\n"
        "def make(classes, shape):\n    return nn.Linear(shape[0], classes)\n"
    )
    name = f"{tmp_path}/mine.py:make"
    x, y = torch.randn(9, 4), torch.arange(9) % 3
    checkpoints = soseleto.Checkpoints(notes={"model": name, "n_classes": 3})
    model, out = nn.Linear(4, 3), tmp_path / "run"
    result = soseleto.fit(model, (x, y), (x, y), epochs=1, device="cpu", out=out, checkpoints=checkpoints)
    with pytest.raises(UsageError, match="name it again to allow running that file"):
        soseleto.load(tmp_path / "run")
    assert not (tmp_path / "ran").exists()  # loading a run folder runs no code
    for model in (name, nn.Linear(4, 3)):
        assert torch.equal(soseleto.load(tmp_path / "run", model, device="cpu").outputs(x), result.outputs(x))
    with pytest.raises(DataError, match="another architecture"):
        soseleto.load(tmp_path / "run", nn.Linear(5, 3))
    sys.modules.pop("mine", None)


def test_transfer_and_custom_losses(tmp_path: Path) -> None:
    x, y = torch.randn(12, 4), torch.arange(12) % 3
    trunk = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    result = soseleto.fit(trunk, (x, y), (x[:4], y[:4] % 2), "transfer", epochs=1, device="cpu", out=tmp_path / "t")
    same = nn.Sequential(nn.Linear(4, 5), nn.ReLU())
    assert torch.equal(soseleto.load(tmp_path / "t", same, device="cpu").outputs(x), result.outputs(x))

    def absolute(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (outputs[:, 0] - labels).abs()

    numbers = torch.randn(12)
    soseleto.fit(nn.Linear(4, 1), (x, numbers), (x, numbers), loss=absolute, epochs=1, device="cpu", out=tmp_path / "r")
    without = soseleto.load(tmp_path / "r", nn.Linear(4, 1), device="cpu")
    assert without.predict(x).shape == (12, 1)
    with pytest.raises(UsageError, match=r"write soseleto.load\(run, loss=...\)"):
        without.evaluate((x, numbers))
    loaded = soseleto.load(tmp_path / "r", nn.Linear(4, 1), loss=absolute, device="cpu")
    assert loaded.predict(x).shape == (12, 1)
    assert set(loaded.evaluate((x, numbers))) == {"loss"}
    with pytest.raises(UsageError, match="predict_proba is for classifiers"):
        loaded.predict_proba(x)


@pytest.mark.parametrize("shape", [(8, 9, 3), (8, 9)], ids=["channels last", "grey"])
@pytest.mark.parametrize("dtype", [np.uint8, np.float64])
def test_arrays_are_converted_alike_for_training_and_prediction(shape: tuple[int, ...], dtype: Any) -> None:
    x, y = np.random.default_rng(0).integers(0, 256, (24, *shape)).astype(dtype), np.arange(24) % 3
    x = x if dtype == np.uint8 else x / 255.0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 3))
    result = soseleto.fit(model, (x, y), (x[:6], y[:6]), epochs=1, device="cpu")
    stored = result.source
    assert isinstance(stored, soseleto.data.Examples)
    if len(shape) == 3 or dtype == np.uint8:
        assert stored.inputs.shape[1:] == (3 if len(shape) == 3 else 1, 8, 9)
    assert torch.equal(result.outputs(x), result.outputs(stored.inputs))
    right = 100.0 * float((result.predict(x).numpy() == y).mean())
    assert result.evaluate((x, y))["accuracy"] == pytest.approx(right)
    assert torch.equal(result.predict_proba(x), result.predict_proba(stored.inputs))


def test_onnx_takes_raw_inputs_and_returns_calibrated_probabilities(trained: soseleto.Result, tmp_path: Path) -> None:
    loaded = replace(soseleto.load(trained.out, device="cpu"), temperature=0.1)
    file = export_onnx(loaded, tmp_path / "new" / "model.onnx")
    x, _ = images(5, seed=3)
    session = onnxruntime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {"inputs": x.numpy()})
    assert np.abs(answer - loaded.predict_proba(x).numpy()).max() < 1e-5
    assert [entry.name for entry in file.parent.iterdir()] == ["model.onnx"]


def test_an_exported_model_that_answers_differently_is_not_written(
    trained: soseleto.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Program:
        def __call__(self, inputs: Tensor) -> list[Tensor]:
            return [torch.full((len(inputs), 3), 0.4)]

    monkeypatch.setattr(prediction, "_program", lambda whole, example: Program())
    with pytest.raises(DataError, match=r"model\.onnx was not written: onnxruntime differs from PyTorch by 0\."):
        export_onnx(soseleto.load(trained.out, device="cpu"), tmp_path / "model.onnx")
    assert list(tmp_path.iterdir()) == []


def test_predict_names_labels_images(trained: soseleto.Result, tmp_path: Path) -> None:
    x, _ = images(3, seed=4)
    (tmp_path / "new").mkdir()
    for at, image in enumerate(x):
        Image.fromarray(image[0].numpy()).save(tmp_path / "new" / f"{at}.png")
    printed = run("predict", trained.out, tmp_path / "new", tmp_path / "new" / "1.png")
    rows = list(csv.DictReader(io.StringIO(printed)))
    assert [Path(row["path"]).name for row in rows] == ["0.png", "1.png", "2.png", "1.png"]
    sure, best = trained.predict_proba(x).max(1)
    assert [row["label"] for row in rows[:3]] == [CLASSES[i] for i in best]
    assert [float(row["probability"]) for row in rows[:3]] == pytest.approx(sure.tolist(), abs=1e-4)
    out = tmp_path / "answers.json"
    run("predict", trained.out, tmp_path / "new", "--format", "json", "--out", out)
    assert [row["label"] for row in json.loads(out.read_text())] == [row["label"] for row in rows[:3]]


def test_every_kind_of_file_is_read_as_in_training(tmp_path: Path) -> None:
    x, _ = images(2)
    Image.fromarray(x[0, 0].numpy()).save(tmp_path / "a.png")
    (tmp_path / "list.csv").write_text("path,note\na.png,1\na.png,2\n")
    np.savez(tmp_path / "x.npz", x=x.numpy())
    shape = (1, 28, 28)
    assert torch.equal(read_inputs([tmp_path / "list.csv"], shape=shape).values, x[[0, 0]])
    both = read_inputs([tmp_path / "x.npz", tmp_path / "a.png"], shape=shape)
    assert torch.equal(both.values, x[[0, 1, 0]])
    assert both.names[:2] == (f"{tmp_path}/x.npz:0", f"{tmp_path}/x.npz:1")


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("gone.png", None, "is not there"),
        ("torn.png", b"\x89PNG\r\n", "is not an image of a known kind"),
        ("notes.txt", b"hello", "has an unknown ending"),
        ("table.csv", b"a,c\n1,2\n", r"holds a table, but the model takes inputs of shape \(1, 28, 28\)"),
        ("torn.npz", b"PK", "torn.npz cannot be read"),
        ("list.csv", b"path\n../secret.png\n", "with a path outside"),
    ],
)
def test_bad_inputs_are_one_sentence(tmp_path: Path, name: str, content: bytes | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, UsageError), match=sentence):
        read_inputs([tmp_path / name], shape=(1, 28, 28))
