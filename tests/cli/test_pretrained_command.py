"""``soseleto fit --model timm:... and hf:...`` from end to end, in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import soseleto
from real_models import import_timm
from typing_in import Type


@pytest.fixture
def data(tmp_path: Path) -> list[object]:
    draw = np.random.default_rng(0)
    for name, count in (("source", 40), ("target", 16)):
        y = np.arange(count) % 3
        x = draw.integers(0, 80, (count, 3, 32, 32)) + 60 * y[:, None, None, None]
        np.savez(tmp_path / f"{name}.npz", x=x.astype(np.uint8), y=y)
    sets = ["--source", tmp_path / "source.npz", "--target", tmp_path / "target.npz"]
    return [*sets, "--device", "cpu", "--epochs", 1, "--batch-size", 16, "--no-baselines", "--folds", 0]


def config(run: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run / "config.json").read_text("utf-8"))
    return found


def test_a_network_of_timm(type_: Type, data: list[object], tmp_path: Path) -> None:
    import_timm()
    run = tmp_path / "run"
    (tmp_path / "fit.toml").write_text("[pretrained]\nweights = 'none'\nbatch_norm = 'fixed'\n")
    options = ["--model", "timm:test_resnet", "--train", "last:2", "--config", tmp_path / "fit.toml"]
    code, said, err = type_("fit", *data, "--out", run, *options, "--image-size", 32)
    assert code == 0, err
    assert "report:" in said
    found = config(run)
    assert found["optimizer"] == "AdamW, betas 0.9 and 0.999"
    assert (found["lr"], found["schedule"]) == (1e-4, "warmup_cosine")
    assert found["pretrained"]["input_size"] == 32
    assert found["prepare"]["standardize"] == {"mean": [0.0] * 3, "std": [1.0] * 3}
    loaded = soseleto.load(run, device="cpu")
    assert loaded.predict(torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).shape == (2,)
    frozen = import_timm().create_model("test_resnet").state_dict()["layer1.0.bn1.running_mean"]
    assert torch.equal(loaded.model.network.layer1[0].bn1.running_mean, frozen)  # as it was: zeros
    inputs = tmp_path / "target.npz"
    code, said, err = type_("predict", run, inputs, "--out", tmp_path / "predicted.csv", "--device", "cpu")
    assert code == 0, err
    assert len((tmp_path / "predicted.csv").read_text("utf-8").splitlines()) == 17
    assert type_("rank", run, "--best", 3)[0] == 0


@pytest.mark.parametrize("command", ["fit", "scan"])
def test_a_network_of_timm_is_asked_of_timm(command: str, type_: Type, data: list[object], tmp_path: Path) -> None:
    """Also where timm is not installed: its name is in the sentence, and the name is not looked up among our own."""
    code, _, err = type_(command, *data[:6], "--out", tmp_path / "run", "--model", "timm:no_such_network")
    assert code in (1, 2)
    assert "timm has no model" in err or "needs timm, which is not installed" in err


@pytest.mark.long
def test_a_network_of_hugging_face_does_without_its_folder(type_: Type, data: list[object], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.ViTConfig(**sizes, image_size=16, patch_size=8)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
    command = ["fit", *data, "--mode", "transfer", "--model", f"hf:{tmp_path / 'vit'}", "--train", "last:1"]
    code, _, err = type_(*command, "--out", tmp_path / "run")
    assert code == 0, err
    images = torch.arange(2 * 3 * 32 * 32).view(2, 3, 32, 32).remainder(256).to(torch.uint8)
    before = soseleto.load(tmp_path / "run", device="cpu").predict_proba(images)
    for file in (tmp_path / "vit").iterdir():
        file.unlink()
    assert torch.equal(soseleto.load(tmp_path / "run", device="cpu").predict_proba(images), before)
