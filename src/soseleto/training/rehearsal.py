"""Before the first step: everything that follows the training, on a few examples and in a temporary folder.

A model that cannot predict in evaluation mode, cannot be saved or cannot be reported on is so refused at the start and
not after hours of training.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from soseleto.data import Examples, ExampleSet, structure
from soseleto.engines.shards import sharded_modules
from soseleto.errors import SoseletoError, UsageError, first_line
from soseleto.methods.wrappers import Signals
from soseleto.models.trunk_and_heads import evaluation_mode
from soseleto.parallel.micro_batches import Sharing
from soseleto.parallel.reducer import Single
from soseleto.prediction.predictor import fit_temperature
from soseleto.run_folder.folder import RunFolder
from soseleto.suspects.probes import PlantedProbes
from soseleto.training.data import Data
from soseleto.training.history import Records
from soseleto.training.out_of_memory import is_out_of_memory
from soseleto.weights import Weights

if TYPE_CHECKING:
    from soseleto.training.loop import Loop
    from soseleto.training.result import Result

FEW = 6  # examples of each side


def rehearse(loop: Loop, state: Any, config: dict[str, Any]) -> None:
    """Raise what the end of this training would raise; nothing of the training changes.

    A training without a folder and probes does nothing with the model after its last step. The forward
    passes of a sharded model need all ranks, so it is not rehearsed.
    """
    uses_model = loop.keeps or loop.data.probes is not None
    if not uses_model or sharded_modules(loop.task.model):
        return
    device = loop.task.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        _check_outputs(loop)
        with tempfile.TemporaryDirectory(prefix="soseleto-") as place:
            _finish(loop, state, config, RunFolder.create(place) if loop.keeps else None)


def _check_outputs(loop: Loop) -> None:
    model, target = loop.task.model, loop.data.target
    inputs, labels = target.take(torch.arange(min(FEW, len(target))))
    inputs = structure.to_device(inputs, loop.task.device)
    with _stage("prediction in evaluation mode"), evaluation_mode(model), torch.no_grad():
        outputs = structure.scores_of(structure.call(model, loop.setup.network.prepare(inputs)))
    if not isinstance(outputs, Tensor):
        raise UsageError(
            f"the model returns a {type(outputs).__name__}, and prediction needs a tensor with one row per example: "
            "return that tensor from forward, such as outputs.logits or the first of a tuple."
        )
    if outputs.shape[:1] != labels.shape[:1]:
        raise UsageError(
            f"the model returns shape {tuple(outputs.shape)} for {len(labels)} examples in evaluation mode: return one "
            "row per example."
        )


def _finish(loop: Loop, state: Any, config: dict[str, Any], folder: RunFolder | None) -> None:
    """One epoch's record and the end of the training, with the initial weights."""
    few = _with_few(loop, Records(folder))
    n = len(few.data.source)
    weights = None if state.weights is None else Weights(n, device=loop.task.device)
    start = SimpleNamespace(weights=weights, optimizer=state.optimizer, engine=None)
    config = {**config, "n_source": len(few.data.own_source)}
    if folder is not None:
        folder.write_config(config)
    with _stage("the record of an epoch"):
        few.records.epoch(few.epoch_record(start, 1, 1))
    with _stage("ranking and saving"):
        result = few.finish(start, config)
    with _stage("the calibration"):
        _calibrate(result, few.data.target)
    if folder is not None:
        with _stage("reading the model back"):
            _compare(folder.model_state(), loop.task.model.state_dict())
        with _stage("the report"):
            _report(folder)


def _with_few(loop: Loop, records: Records) -> Loop:
    """The same loop in one process, with few examples and other records."""
    data = loop.data
    few = Data(
        _few(data.source),
        _few(data.target),
        None if data.probes is None else _few_probes(data.probes),
    )
    if data.probes is not None:
        at = [*range(_own(data.probes)), *(data.probes.n_source + place for place in _places(data.probes))]
        few = replace(few, source=_in_memory(data.source, at))
    signals = None if loop.signals is None else Signals(len(few.source))
    if signals is not None:
        signals.to(loop.task.device)
    task = replace(loop.task, sharing=Sharing(Single(), None))
    return replace(loop, data=few, signals=signals, task=task, records=records)


def _few(examples: ExampleSet) -> ExampleSet:
    return _in_memory(examples, range(min(FEW, len(examples))))


def _in_memory(examples: ExampleSet, index: Sequence[int]) -> Examples:
    if isinstance(examples, Examples):
        return examples.subset(index)
    inputs, labels = examples.take(torch.tensor(index))
    return Examples(inputs, labels, tuple(map(examples.id_of, index)), examples.classes)


def _own(probes: PlantedProbes) -> int:
    return min(FEW, probes.n_source)


def _few_probes(probes: PlantedProbes) -> PlantedProbes:
    at = torch.tensor(_places(probes))
    checked = None if probes.checked is None else (len(at), int(probes.wrong[at].sum()))
    return PlantedProbes(_own(probes), probes.labels[at], probes.truth[at], checked, probes.share)


def _places(probes: PlantedProbes) -> list[int]:
    """Of the first wrong probes and the first right ones."""
    wrong = probes.wrong
    return sorted(wrong.nonzero().flatten()[:FEW].tolist() + (~wrong).nonzero().flatten()[:FEW].tolist())


def _calibrate(result: Result, target: ExampleSet) -> None:
    if result.task == "classification":
        fit_temperature(result.outputs_of(target), target.labels.cpu())


def _compare(saved: dict[str, Tensor], state: dict[str, Tensor]) -> None:
    if saved.keys() != state.keys():
        raise ValueError(f"{', '.join(sorted(saved.keys() ^ state.keys()))} differ")
    for name, tensor in state.items():
        if saved[name].shape != tensor.shape or saved[name].dtype != tensor.dtype:
            raise ValueError(f"{name} has another shape or type")


def _report(folder: RunFolder) -> None:
    from soseleto.report import write_report

    write_report(folder.path)


@contextmanager
def _stage(what: str) -> Iterator[None]:
    """Turn any error inside into one sentence."""
    try:
        yield
    except SoseletoError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise UsageError(
            f"{what} fails with this model, tried on {FEW} examples before the training ({type(error).__name__}: "
            f"{first_line(error)}): mend the model."
        ) from error
