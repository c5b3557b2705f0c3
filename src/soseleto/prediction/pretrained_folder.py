"""Export a run's text model as a folder of safetensors and JSON that transformers reads with ``from_pretrained``."""

from __future__ import annotations

import copy
import os
import shutil
import tempfile
from pathlib import Path

from torch import nn

from soseleto.errors import UsageError
from soseleto.models.pretrained_text import PretrainedText, TextClassifier, TextEncoder
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.prediction.load import LoadedRun
from soseleto.run_folder.files import writing


def export_folder(loaded: LoadedRun, path: str | os.PathLike[str]) -> Path:
    """Write the language model, its tokenizer and the linear classifier; the temperature is part of the classifier.

    The probabilities are softmax(classifier(mean of the last hidden states over the tokens of a text)).
    """
    folder = Path(path)
    parts = _parts(loaded.model)
    if parts is None:
        raise UsageError(
            f"{loaded.run.path} has no pretrained text model, and only those are written as a folder: use --onnx FILE."
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already: give a new folder.")
    encoder, head = copy.deepcopy(parts[0]).cpu(), copy.deepcopy(parts[1]).cpu()
    for p in head.parameters():
        p.data /= loaded.temperature
    names = [loaded.class_name(at) for at in range(head.out_features)]
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=".", suffix=".part", dir=folder.parent))
        try:
            PretrainedText.from_dict(loaded.run.pretrained()).save(encoder.language_model, head, part, names)
            part.chmod(0o755)
            if folder.exists():
                folder.rmdir()  # it is empty
            part.rename(folder)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    return folder


def _parts(model: nn.Module) -> tuple[TextEncoder, nn.Linear] | None:
    """The encoder, and the classifier of the target."""
    if isinstance(model, TextClassifier):
        return model.encoder, model.classifier
    if isinstance(model, TrunkAndHeads) and isinstance(model.trunk, TextEncoder):
        assert isinstance(model.target_head, nn.Linear)
        return model.trunk, model.target_head
    return None
