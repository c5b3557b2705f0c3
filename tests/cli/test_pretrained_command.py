"""``soseleto fit --model hf:...`` on images, from end to end."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import soseleto
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
