"""Embeddings of texts for the experiments."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed")

import tiny_text_model
from experiments import encoding


def test_embeddings_are_in_the_order_of_the_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOSELETO_CACHE", str(tmp_path / "cache"))
    folder = tiny_text_model.make_folder(tmp_path / "tiny")
    texts = [f"the film was {'very ' * (row % 40)}good {row}" for row in range(200)]
    together = encoding.embeddings(texts, folder, 64, "cpu")
    alone = torch.cat([encoding.embeddings([text], folder, 64, "cpu") for text in texts[::40]])
    torch.testing.assert_close(together[::40], alone, rtol=1e-4, atol=1e-5)
