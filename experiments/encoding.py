"""Texts as inputs: tokens for a model that is fine-tuned, or its embeddings for a linear classifier of them.

Tokens and embeddings are cached (``SOSELETO_CACHE``), by the content of the texts, the tokenizer and the weights.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from experiments.data import data_root
from soseleto.data.examples import in_order
from soseleto.data.text import TextExamples, TextPreparation, Tokenizer
from soseleto.errors import DataError, UsageError
from soseleto.models.pretrained import make_text_model, open_text_model
from soseleto.parallel.reducer import choose_device
from soseleto.run_folder.files import aside

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
    tokens = prepare.tokens(texts)
    file = _cache() / f"embeddings-{len(texts)}x{max_tokens}-{_key(tokens, folder)}.npy"
    found = _cached(file, len(texts))
    if found is None:
        found = _embedded(tokens, prepare, folder, choose_device(device))
        file.parent.mkdir(parents=True, exist_ok=True)
        with aside(file) as unfinished, open(unfinished, "wb") as out:
            np.save(out, found.numpy(), allow_pickle=False)
    return found


def _cache() -> Path:
    return Path(os.environ.get("SOSELETO_CACHE") or "~/.cache/soseleto/images").expanduser()


def _embedded(tokens: Tensor, prepare: TextPreparation, folder: Path, device: torch.device) -> Tensor:
    """Texts of similar length are embedded together."""
    encoder = make_text_model(f"hf:{folder}", "transfer", classes=0).to(device).eval()
    examples = TextExamples(tokens, torch.zeros(len(tokens), dtype=torch.int64))
    pieces = examples.pieces(_TOGETHER)
    with torch.no_grad():
        parts = [encoder(**prepare(some.to(device))).float().cpu() for some, _ in examples.read(pieces)]
    return in_order(pieces, parts)


def _key(tokens: Tensor, folder: Path) -> str:
    return hashlib.sha256(tokens.numpy().tobytes() + _fingerprint(folder)).hexdigest()


@lru_cache(maxsize=2)
def _fingerprint(folder: Path) -> bytes:
    """Of the model's configuration and weights."""
    files = sorted(file for pattern in ("config.json", "*.safetensors") for file in folder.glob(pattern))
    if len(files) < 2:
        raise DataError(f"{folder} has no weights (*.safetensors) beside config.json: name another folder.")
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return digest.digest()


def _cached(file: Path, count: int) -> Tensor | None:
    """Of an earlier run; None where there is none, or it is damaged."""
    try:
        found = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return torch.from_numpy(found) if found.ndim == 2 and len(found) == count else None
