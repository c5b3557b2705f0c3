"""Export a run's model: as ONNX, or as a folder that transformers reads with ``from_pretrained``.

The ONNX graph takes raw inputs and gives class probabilities: standardisation and temperature are part of it, so that
users of the file need not repeat them. A table's rows go in as its preparation stores them (numbers, and codes of
categories); the file's metadata has that preparation as JSON, under ``soseleto.table``, and the class names under
``soseleto.classes``.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data.preparation import TablePreparation
from soseleto.errors import DataError, UsageError, need
from soseleto.models.pretrained_text import PretrainedText, TextClassifier, TextEncoder
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.prediction.predictor import LoadedRun
from soseleto.run_folder.files import aside, json_of, writing
from soseleto.run_folder.folder import PRETRAINED, require_writable

TOLERANCE = 1e-4  # on probabilities
CLASSES, TABLE = "soseleto.classes", "soseleto.table"  # in the metadata of the file


class _Pipeline(nn.Module):
    def __init__(self, loaded: LoadedRun) -> None:
        super().__init__()
        self.loaded, self.model = loaded, copy.deepcopy(loaded.model).cpu()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.model(self.loaded.prepare(inputs))
        return (outputs / self.loaded.temperature).softmax(1) if self.loaded.task == "classification" else outputs


def export_onnx(loaded: LoadedRun, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write ``loaded`` to ``path``, with a dynamic batch size. Needs ``soseleto[onnx]``.

    onnxruntime runs the graph once, and its answer is compared with PyTorch's before the file is written.

    force: replace an existing file, but never the data or a file of the run
    """
    file = Path(path)
    require_writable(file, run=loaded.run, force=force)
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, to="writing ONNX")
    if loaded.shape is None:
        raise UsageError(
            f"{loaded.run.path} has inputs of several tensors, and ONNX is written for one tensor only: a text model "
            "can be written with --pretrained FOLDER."
        )
    whole = _Pipeline(loaded).eval()
    program = _program(whole, _example(loaded, rows=3))
    other = _example(loaded, rows=2)  # not the size that the exporter saw
    with torch.no_grad():
        gap = float((program(other)[0] - whole(other)).abs().max())
    if not gap <= TOLERANCE:
        raise DataError(f"{file} was not written: onnxruntime differs from PyTorch by {gap:.2g}.")
    if loaded.classes is not None:
        program.model.metadata_props[CLASSES] = json.dumps(list(loaded.classes))
    if isinstance(loaded.preparation, TablePreparation):
        program.model.metadata_props[TABLE] = json.dumps(loaded.preparation.to_dict())
    file.parent.mkdir(parents=True, exist_ok=True)
    with aside(file) as part:
        program.save(part, external_data=False)
    return file


def _program(whole: nn.Module, example: Tensor) -> Any:
    """The ONNX program, made without the exporter's log and warnings, which are about optional packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            return torch.onnx.export(
                whole,
                (example,),
                input_names=["inputs"],
                output_names=["probabilities"],
                dynamic_shapes={"inputs": {0: torch.export.Dim("rows")}},
                dynamo=True,
                verbose=False,
            )
    finally:
        logger.setLevel(level)


def _example(loaded: LoadedRun, rows: int) -> Tensor:
    dtype: torch.dtype = getattr(torch, loaded.config["input_dtype"])
    highest = 2 if dtype == torch.int64 else 256  # indices, of which any embedding has two
    return torch.randint(highest, (rows, *(loaded.shape or ())), generator=torch.Generator().manual_seed(0)).to(dtype)


def export_folder(loaded: LoadedRun, path: str | os.PathLike[str]) -> Path:
    """Write the language model, its tokenizer and the linear classifier; the temperature is part of the classifier.

    The probabilities are softmax(classifier(mean of the last hidden states over the tokens of a text)).
    """
    folder, model = Path(path), copy.deepcopy(loaded.model).cpu()
    if isinstance(model, TextClassifier):
        encoder, head = model.encoder, model.classifier
    elif isinstance(model, TrunkAndHeads) and isinstance(model.trunk, TextEncoder):
        assert isinstance(model.target_head, nn.Linear)
        encoder, head = model.trunk, model.target_head
    else:
        raise UsageError(f"{loaded.run.path} has no pretrained text model to write as a folder: use --onnx FILE.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{folder} exists already: give a new folder.")
    for p in head.parameters():
        p.data /= loaded.temperature
    names = [loaded.class_name(at) for at in range(head.out_features)]
    with writing(folder):
        described = PretrainedText.from_dict(json_of(loaded.run.existing(PRETRAINED)))
        described.save(encoder.language_model, head, folder, names)
    return folder
