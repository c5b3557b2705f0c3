"""Texts as inputs: tokens for a model that is fine-tuned, or its embeddings for a linear classifier of them.

Embeddings are cached (``SOSELETO_CACHE``) by the content of the tokens; the first are compared with new ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch import Tensor

from experiments.data import data_root
from soseleto.data.examples import in_order
from soseleto.data.text import TextExamples, TextPreparation, Tokenizer
from soseleto.errors import UsageError
from soseleto.models.pretrained import make_text_model, open_text_model
from soseleto.parallel.reducer import choose_device
from soseleto.run_folder.files import CHECKED, kept_features

_TOGETHER = 128  # texts per forward pass


def model_folder(model: str, root: str | Path | None = None) -> Path:
    """``model`` itself if it is a folder, else the folder of that name below ``ROOT/pretrained``."""
    given = Path(model).expanduser()
    folder = given if given.is_dir() else data_root(root) / "pretrained" / model
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder}: name that of a pretrained text model, --model FOLDER.")
    return folder


@lru_cache(maxsize=2)
def preparation(folder: Path, max_tokens: int) -> TextPreparation:
    """The model's tokenizer, for texts of at most ``max_tokens``."""
    opened = open_text_model(f"hf:{folder}")
    return TextPreparation("text", Tokenizer(opened.tokenizer, min(max_tokens, opened.longest), opened.pad))


def embeddings(texts: Sequence[str], folder: Path, max_tokens: int, device: str = "auto") -> Tensor:
    """(N, width) float32 on the CPU: the mean of the last hidden states over the tokens of each text."""
    prepare = preparation(folder, max_tokens)
    tokens = prepare.tokenizer.encode(texts)
    made = partial(_embedded, prepare=prepare, folder=folder, device=choose_device(device))
    key = f"{folder.name}-{hashlib.sha256(tokens.numpy().tobytes()).hexdigest()}"
    return torch.from_numpy(kept_features(key, lambda: made(tokens).numpy(), lambda: made(tokens[:CHECKED]).numpy()))


def _embedded(tokens: Tensor, prepare: TextPreparation, folder: Path, device: torch.device) -> Tensor:
    """Texts of similar length are embedded together."""
    encoder = make_text_model(f"hf:{folder}", "transfer", classes=0).to(device).eval()
    examples = TextExamples(tokens, torch.zeros(len(tokens), dtype=torch.int64))
    pieces = examples.pieces(_TOGETHER)
    with torch.no_grad():
        parts = [encoder(**prepare(some.to(device))).float().cpu() for some, _ in examples.read(pieces)]
    return in_order(pieces, parts)
