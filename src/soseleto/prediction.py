"""Trained models with their preprocessing, class names and temperature: prediction, calibration, loading and export.

``soseleto.load("runs/photos").predict(images)`` reads JSON and safetensors only. A model built by a user's Python file
is rebuilt only when the user names that file again: a run folder may come from an untrusted place, and loading it never
runs code.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import tee
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from soseleto.data import ExampleSet, as_example_set, structure
from soseleto.data.arrays import inputs_of
from soseleto.data.examples import in_order
from soseleto.data.feeding import Prepare, Preprocess
from soseleto.data.preparation import Preparation, TablePreparation, prepared
from soseleto.data.structure import Inputs
from soseleto.data.tables import frame_table, is_frame
from soseleto.data.text import TextExamples, TextPreparation
from soseleto.errors import DataError, UsageError, need
from soseleto.models.architectures import is_file, make_model
from soseleto.models.pretrained import PretrainedText, TextClassifier, TextEncoder, is_pretrained, rebuilt
from soseleto.models.trunk_and_heads import InUnits, Learned, TrunkAndHeads, evaluation_mode, from_bytes
from soseleto.parallel.reducer import choose_device
from soseleto.run_folder.files import aside, json_of, readable, writing
from soseleto.run_folder.folder import FIRST, LEARNER, PRETRAINED, RunFolder, require_writable
from soseleto.task.losses import Loss, cross_entropy, squared_error

TaskKind = Literal["classification", "regression"]
_LOWEST, _HIGHEST = 0.05, 20.0  # temperatures
TOLERANCE = 1e-4  # on probabilities, between onnxruntime and PyTorch
CLASSES, TABLE = "soseleto.classes", "soseleto.table"  # in an ONNX file's metadata: names, and the preparation as JSON
_LOSSES: Mapping[str, Loss] = {"cross_entropy": cross_entropy, "squared_error": squared_error}
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


@dataclass(frozen=True, kw_only=True)
class Predictor:
    """Predicts from raw inputs.

    model: the trained model (in transfer mode trunk and heads; its forward pass is the target's)
    task: ``"classification"`` where labels are class indices and outputs (B, classes), whatever the loss
    temperature: outputs are divided by it before the softmax; 1 without calibration
    """

    model: nn.Module
    prepare: Prepare
    device: torch.device
    loss: Loss = cross_entropy
    task: TaskKind = "classification"
    classes: tuple[str, ...] | None = None
    temperature: float = 1.0

    @property
    def preparation(self) -> Preparation | None:
        """How the columns of a table become inputs; None for other inputs."""
        preparation = self.prepare.standardize
        return preparation if isinstance(preparation, TablePreparation | TextPreparation) else None

    def outputs(self, inputs: Any) -> Tensor:
        """The model's outputs (logits) on the CPU: for images, features, dicts, a data frame, a list of texts.

        Arrays are converted as ``fit`` converts them: images (N, H, W, C) become (N, C, H, W). A row of a data frame
        without any value that can be used gets NaN; other values that are not as in the training are logged.
        """
        usable = None
        if self.preparation is not None and is_frame(inputs):
            inputs, usable = prepared(frame_table(inputs), self.preparation, "the data frame")
        stored = self._stored(inputs)
        if isinstance(self.preparation, TextPreparation) and isinstance(stored, Tensor) and len(stored):
            outputs = self.outputs_of(TextExamples(stored, torch.zeros(len(stored), dtype=torch.int64)))
        else:
            pieces = structure.split(stored, self.prepare.evaluation_batch)
            outputs = torch.cat([structure.scores_of(raw).cpu() for raw in self._forward(self.model, pieces)])
        if usable is not None:
            outputs[~usable] = torch.nan
        return outputs

    def outputs_of(self, examples: ExampleSet, model: nn.Module | None = None) -> Tensor:
        """Outputs for every example, on the CPU, of ``self.model`` or of another model that is made of parts of it."""
        pieces = examples.pieces(self.prepare.evaluation_batch)
        inputs = (inputs for inputs, _ in examples.read(pieces))
        return in_order(pieces, [structure.scores_of(raw).cpu() for raw in self._forward(model or self.model, inputs)])

    def _forward(self, model: nn.Module, pieces: Iterable[Inputs]) -> Iterator[Any]:
        with evaluation_mode(self.model), torch.no_grad():
            for piece in pieces:
                inputs = self.prepare.match_input_range(structure.to_device(piece, self.device), "the data")
                yield structure.call(model, self.prepare(inputs))

    def _stored(self, inputs: Any) -> Inputs:
        if isinstance(self.preparation, TextPreparation) and isinstance(inputs, list | tuple):
            return self.preparation.tokenizer.encode(inputs)
        if isinstance(inputs, list) and any(isinstance(part, Tensor) for part in inputs):  # arguments of the model
            return pytree.tree_map(torch.as_tensor, structure.plain(inputs))
        return inputs_of(inputs, name="given")

    def predict(self, inputs: Any) -> Tensor:
        """Class indices of a classifier, -1 for a row without any value; otherwise the outputs themselves."""
        outputs = self.outputs(inputs)
        if self.task != "classification":
            return outputs
        return torch.where(outputs.isnan().all(1), -1, outputs.argmax(1))

    def predict_proba(self, inputs: Any) -> Tensor:
        """One probability per class, (B, classes): softmax(outputs / temperature)."""
        self._need_classes("predict_proba")
        return (self.outputs(inputs) / self.temperature).softmax(1)

    def evaluate(self, dataset: Any) -> dict[str, float]:
        """Mean loss, and for classification the accuracy in percent."""
        examples = as_example_set(dataset, name="test", preparation=self.preparation)
        pieces, kept = tee(examples.read(examples.pieces(self.prepare.evaluation_batch)))
        losses, right = [], []
        for (_, labels), raw in zip(kept, self._forward(self.model, (inputs for inputs, _ in pieces)), strict=True):
            truth = structure.to_device(labels, self.device)
            losses.append(self.loss(raw, truth).double().cpu())
            if self.task == "classification":
                right.append((structure.scores_of(raw).argmax(1) == truth).cpu())
        numbers = {"loss": float(torch.cat(losses).mean())}
        return numbers | ({"accuracy": 100.0 * float(torch.cat(right).double().mean())} if right else {})

    def calibrated(self, dataset: Any) -> Self:
        """A copy whose temperature is fitted on ``dataset``: labelled examples that were not used in training."""
        self._need_classes("calibrated")
        examples = as_example_set(dataset, name="calibration", preparation=self.preparation)
        return replace(self, temperature=fit_temperature(self.outputs_of(examples), examples.labels.cpu()))

    def _need_classes(self, what: str) -> None:
        if self.task != "classification":
            raise UsageError(f"{what} is for classifiers, and this is a {self.task}: use outputs() or predict().")


def fit_temperature(outputs: Tensor, labels: Tensor) -> float:
    """Temperature scaling (Guo et al. 2017): T = argmin Σ_i −log softmax(z_i / T)[y_i] over held-out examples.

    In [0.05, 20], by Brent's method, since the loss is convex in 1/T. The predicted classes do not change.

    >>> logits = torch.tensor([[4.0, 0.0], [4.0, 0.0], [4.0, 0.0], [4.0, 0.0]])
    >>> round(fit_temperature(logits, torch.tensor([0, 0, 0, 1])), 2)  # 3 of 4 correct: logit log 3
    3.64
    """
    if outputs.ndim != 2 or labels.shape != (len(outputs),) or labels.is_floating_point() or not len(labels):
        raise DataError(
            f"outputs of shape {tuple(outputs.shape)} and labels of shape {tuple(labels.shape)} cannot be calibrated: "
            "give (N, classes) outputs and N class indices."
        )
    from scipy.optimize import minimize_scalar

    logits = outputs.detach().to("cpu", torch.float64)
    if not bool(logits.isfinite().all()):
        raise DataError("some outputs are NaN or infinite and cannot be calibrated: check the inputs.")
    optimum = minimize_scalar(
        lambda inverse: float(F.cross_entropy(logits * inverse, labels)),
        bounds=(1 / _HIGHEST, 1 / _LOWEST),
        method="bounded",
        options={"xatol": 1e-6},
    )
    return float(1 / optimum.x)


# Loading a run


@dataclass(frozen=True, kw_only=True)
class LoadedRun(Predictor):
    """The model of a run, ready to predict, and the run's configuration."""

    run: RunFolder
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of one input, or None where the run did not record it or inputs are structures."""
        shape = self.config.get("input_shape")
        return tuple(shape) if isinstance(shape, list) else None

    def class_name(self, index: int) -> str:
        names = self.classes or ()
        return names[index] if index < len(names) else str(index)


def load(
    run: str | os.PathLike[str],
    model: nn.Module | str | None = None,
    *,
    loss: Loss | None = None,
    device: str | torch.device = "auto",
) -> LoadedRun:
    """The model of a finished run, ready to predict.

    Args:
        run: the run folder.
        model: a module of the same architecture (in transfer mode the trunk), or ``"FILE.py:FUNCTION"``; not needed
            for the models that ``soseleto fit`` knows by name.
        loss: the training loss, if it was a custom one; only ``evaluate`` needs it.
        device: ``"auto"``, ``"cpu"``, ``"cuda"``, ...
    """
    return load_run(RunFolder.open(run), model, loss=loss, device=device)


def load_run(
    folder: RunFolder,
    model: nn.Module | str | None,
    *,
    loss: Loss | None = None,
    device: str | torch.device = "auto",
    text: TextPreparation | None = None,
) -> LoadedRun:
    """As ``load``; ``text`` is the preparation of texts where the folder has no tokenizer, as while it trains."""
    where = choose_device(device)
    if (folder.comparison() or {}).get("kept") == "scan":
        first = load_run(RunFolder(folder.path / FIRST), model, loss=loss, device=device, text=text)
        return replace(first, temperature=folder.temperature())
    with readable(folder.path):
        config, state = folder.config(), folder.model_state()
        if config.get("method") == "scan" and config.get("model") == "linear":
            model = None  # a first answer on the inputs themselves, not on the network that is trained
        prepare = _prepare(config, folder, text)
        whole = _with_heads(_module(model, config, folder, prepare), state)
        _fill(whole, state, folder)
        if folder.has(LEARNER):
            path = folder.existing(LEARNER)
            whole = Learned(whole, from_bytes(path.read_bytes(), str(path)), config["n_classes"])
        classes = config.get("classes")
        return LoadedRun(
            model=whole.to(where).eval(),
            prepare=prepare,
            device=where,
            loss=loss or _loss(config, folder),
            task="classification" if config["task"] == "classification" else "regression",
            classes=None if classes is None else tuple(classes),
            temperature=folder.temperature(),
            run=folder,
            config=config,
        )


def _module(model: nn.Module | str | None, config: Mapping[str, Any], folder: RunFolder, prepare: Prepare) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    name = model or config.get("model")
    if name is None:
        raise UsageError(
            f"{folder.path} was trained from Python and does not record how to build its model: "
            "call soseleto.load(run, model=...) with a module of the same architecture."
        )
    if model is None and is_file(name):
        raise UsageError(
            f"the model of {folder.path} was built by {name}: name it again to allow running that file, "
            f"model={name!r} (--model {name})."
        )
    mode, classes, table = config["mode"], config["n_classes"], prepare.standardize
    if isinstance(table, TextPreparation):  # from the architecture that the run keeps
        return _pretrained_text(folder).build(mode, classes=classes)
    if is_pretrained(name) and "pretrained" in config:
        return rebuilt(name, mode, classes=classes, described=config["pretrained"])
    shape = (table.width,) if isinstance(table, TablePreparation) else tuple(config["input_shape"])
    return make_model(name, mode, classes=classes, shape=shape, seed=0)


def _pretrained_text(folder: RunFolder) -> PretrainedText:
    return PretrainedText(**json_of(folder.existing(PRETRAINED)))


def _with_heads(module: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Add the linear heads of transfer mode, with the sizes found in the file, or the unit of labels that are numbers.

    Custom heads come with the module.
    """
    if "label_deviation" in state and not isinstance(module, InUnits):
        return InUnits(module)
    heads = [state.get(f"{side}_head.weight") for side in ("source", "target")]
    trained_whole = not any(name.startswith("trunk.") for name in state)
    if isinstance(module, TrunkAndHeads) or trained_whole or any(head is None or head.ndim != 2 for head in heads):
        return module
    source, target = (nn.Linear(head.shape[1], head.shape[0]) for head in heads if head is not None)
    return TrunkAndHeads(module, source, target)


def _fill(module: nn.Module, state: Mapping[str, Tensor], folder: RunFolder) -> None:
    try:
        module.load_state_dict(dict(state))
    except RuntimeError as error:
        first = " ".join(str(error).split())[:300]
        raise DataError(
            f"the model of {folder.path} has another architecture than the one given ({first}): give the trained one."
        ) from error


def _prepare(config: Mapping[str, Any], folder: RunFolder, text: TextPreparation | None) -> Prepare:
    dtype, fields = _DTYPES[config["prepare"]["dtype"]], config["prepare"]["standardize"]
    if text is not None:
        return Prepare(text, dtype)
    if fields is not None and "text" in fields:
        return Prepare(TextPreparation.from_dict(fields, _pretrained_text(folder).tokenizer), dtype)
    trained = getattr(torch, str(config.get("input_dtype")), None)  # None where inputs are structures
    if fields is None:
        return Prepare(None, dtype, trained=trained)
    kept = TablePreparation.from_dict(fields) if "columns" in fields else Preprocess.from_dict(fields)
    return Prepare(kept, dtype, trained=trained)


def _loss(config: Mapping[str, Any], folder: RunFolder) -> Loss:
    name = config.get("target_loss") or config.get("loss") or ""

    def missing(outputs: Tensor, labels: Tensor) -> Tensor:
        raise UsageError(
            f"{folder.path} was trained with the loss {name!r}, which evaluate needs: write soseleto.load(run, "
            "loss=...) with it."
        )

    return _LOSSES.get(name, missing)


# Export: as ONNX, or as a folder that transformers reads with ``from_pretrained``

# The ONNX graph takes raw inputs and gives class probabilities: standardisation and temperature are part of it, so that
# users of the file need not repeat them. A table's rows go in as its preparation stores them (numbers, and codes of
# categories).


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
        _pretrained_text(loaded.run).save(encoder.language_model, head, folder, names)
    return folder
