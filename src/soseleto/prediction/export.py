"""Export a run's model: as ONNX, or as a folder that transformers reads with ``from_pretrained``.

The ONNX graph takes raw inputs and gives class probabilities: standardisation and temperature are part of it, so that
users of the file need not repeat them. A table's rows go in as its preparation stores them (numbers, and codes of
categories); the file's metadata has that preparation as JSON, under ``soseleto.table``, and the class names under
``soseleto.classes``. The exported model is run once with onnxruntime and compared with PyTorch before the file gets its
final name.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data.preparation import Preparation, TablePreparation
from soseleto.data.text import TextPreparation
from soseleto.errors import DataError, UsageError, need
from soseleto.models.pretrained_text import PretrainedText, TextClassifier, TextEncoder
from soseleto.models.trunk_and_heads import TrunkAndHeads
from soseleto.prediction.load import LoadedRun
from soseleto.run_folder.files import aside, writing
from soseleto.run_folder.folder import PRETRAINED, require_writable

TOLERANCE = 1e-4  # on probabilities
CLASSES, TABLE = "soseleto.classes", "soseleto.table"  # in the metadata of the file
_ROWS = 3  # of the batch given to the exporter


class _Pipeline(nn.Module):
    def __init__(self, loaded: LoadedRun) -> None:
        super().__init__()
        self.loaded, self.model = loaded, copy.deepcopy(loaded.model).cpu()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.model(self.loaded.prepare(inputs))
        return (outputs / self.loaded.temperature).softmax(1) if self.loaded.task == "classification" else outputs


def export_onnx(loaded: LoadedRun, path: str | os.PathLike[str], *, force: bool = False) -> Path:
    """Write ``loaded`` to ``path``, with a dynamic batch size. Needs ``soseleto[onnx]``.

    force: replace an existing file, but never the data or a file of the run
    """
    require_writable(Path(path), run=loaded.run, force=force)
    for package in ("onnx", "onnxscript", "onnxruntime"):
        need(package, to="writing ONNX")
    if isinstance(loaded.preparation, TextPreparation):
        raise UsageError(f"{loaded.run.path} reads texts, and those are exported as a folder: use --pretrained FOLDER.")
    if isinstance(loaded.config.get("input_shape"), dict):
        raise UsageError(f"{loaded.run.path} has inputs of several tensors, and ONNX is written for one tensor only.")
    if loaded.shape is None:
        raise UsageError(f"{loaded.run.path} does not record the shape of its inputs: train it again.")
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    whole = _Pipeline(loaded).eval()
    with aside(file) as part:
        _export(whole, _example(loaded, _ROWS), part)
        _describe(part, loaded.classes, loaded.preparation)
        _compare(whole, _example(loaded, _ROWS - 1), part, file)
    return file


def _example(loaded: LoadedRun, rows: int) -> Tensor:
    dtype, draw = _dtype(loaded), torch.Generator().manual_seed(0)
    highest = 2 if dtype == torch.int64 else 256  # indices, of which any embedding has two
    return torch.randint(highest, (rows, *(loaded.shape or ())), generator=draw).to(dtype)


def _dtype(loaded: LoadedRun) -> torch.dtype:
    """The type of the inputs that the model was trained on."""
    recorded = str(loaded.config.get("input_dtype"))
    if "float" in recorded:
        exact = getattr(getattr(loaded.prepare, "standardize", None), "exact", False)
        return torch.float64 if exact else torch.float32
    return torch.uint8 if recorded == "uint8" else torch.int64


def _export(whole: nn.Module, example: Tensor, part: Path) -> None:
    with _quiet():
        torch.onnx.export(
            whole,
            (example,),
            str(part),
            input_names=["inputs"],
            output_names=["probabilities"],
            dynamic_shapes={"inputs": {0: torch.export.Dim("rows")}},
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def _describe(part: Path, classes: Sequence[str] | None, preparation: Preparation | None) -> None:
    """Write the class names and a table's preparation to the metadata."""
    onnx: Any = need("onnx", to="writing ONNX")
    model, props = onnx.load(str(part)), {}
    if classes is not None:
        props[CLASSES] = json.dumps(list(classes))
    if isinstance(preparation, TablePreparation):
        props[TABLE] = json.dumps(preparation.to_dict())
    onnx.helper.set_model_props(model, props)
    onnx.save(model, str(part))


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporter's log and warnings, which mention optional packages."""
    logger = logging.getLogger("torch.onnx")
    was = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(was)


def _compare(whole: nn.Module, inputs: Tensor, part: Path, file: Path) -> None:
    """Compare with PyTorch, at other sizes than the exporter saw."""
    runtime: Any = need("onnxruntime", to="checking ONNX")
    session = runtime.InferenceSession(part.read_bytes(), providers=["CPUExecutionProvider"])
    (answer,) = session.run(None, {"inputs": inputs.numpy()})
    with torch.no_grad():
        gap = float((torch.from_numpy(answer) - whole(inputs)).abs().max())
    if not gap <= TOLERANCE:
        raise DataError(f"{file} was not written: onnxruntime differs from PyTorch by {gap:.2g}.")


# A folder for transformers


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
            PretrainedText.from_dict(loaded.run.read_json(PRETRAINED) or {}).save(
                encoder.language_model, head, part, names
            )
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
