"""Load the model of a finished run: ``soseleto.load("runs/photos").predict(images)``.

Only JSON and safetensors are read. A model built by a user's Python file is rebuilt only when the user names that file
again: a run folder may come from an untrusted place, and loading it never runs code.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.data.feeding import Prepare, Preprocess
from soseleto.data.preparation import TablePreparation
from soseleto.data.text import TextPreparation
from soseleto.errors import DataError, UsageError
from soseleto.models.architectures import is_file, make_model
from soseleto.models.learned import Learned, from_bytes
from soseleto.models.pretrained_images import is_pretrained, rebuilt
from soseleto.models.pretrained_text import PretrainedText
from soseleto.models.trunk_and_heads import InUnits, TrunkAndHeads
from soseleto.parallel.reducer import choose_device
from soseleto.prediction.predictor import Predictor
from soseleto.run_folder.files import json_of, readable
from soseleto.run_folder.folder import FIRST, LEARNER, PRETRAINED, RunFolder
from soseleto.task.losses import Loss, cross_entropy, squared_error

_LOSSES: Mapping[str, Loss] = {"cross_entropy": cross_entropy, "squared_error": squared_error}
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}


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


def _module(
    model: nn.Module | str | None,
    config: Mapping[str, Any],
    folder: RunFolder,
    prepare: Prepare,
) -> nn.Module:
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
        return PretrainedText.from_dict(json_of(folder.existing(PRETRAINED))).build(mode, classes=classes)
    if is_pretrained(name) and "pretrained" in config:
        return rebuilt(name, mode, classes=classes, described=config["pretrained"])
    shape = (table.width,) if isinstance(table, TablePreparation) else tuple(config["input_shape"])
    return make_model(name, mode, classes=classes, shape=shape, seed=0)


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
        tokenizer = PretrainedText.from_dict(json_of(folder.existing(PRETRAINED))).tokenizer
        return Prepare(TextPreparation.from_dict(fields, tokenizer), dtype)
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
