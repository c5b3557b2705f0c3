"""The run folder: everything a training writes, in open formats and never a pickle.

``config.json``, ``metrics.jsonl``, ``ranking.parquet``, ``model.safetensors``, ``report.html``, and ``checkpoint/``
while the training runs. Files are replaced atomically and compared with their checksums before they are used
(files.py); ``metrics.jsonl`` grows by one line per record.
Torch, safetensors and pyarrow are imported only where they are used: opening a run must not take seconds.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soseleto.errors import DataError, DiskError, UsageError, did_you_mean, need
from soseleto.run_folder.files import (
    CHECKSUMS,
    append_line,
    as_json,
    checksums_of,
    device_name,
    json_of,
    lines_of,
    locked,
    parquet_columns,
    readable,
    regular,
    replacing,
    sync,
    tensors_of,
    verified,
    versions,
    write_checksums,
    writing,
)
from soseleto.run_folder.ranking import is_known

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "soseleto run 1"
CONFIG, METRICS, RANKING = "config.json", "metrics.jsonl", "ranking.parquet"
MODEL = "model.safetensors"
LEARNER = "learner.skops"  # a scikit-learn classifier in place of the model's last layer, see models/trunk_and_heads.py
KEPT = "kept.safetensors"  # the model of another training, in place of model.safetensors
PRETRAINED = "pretrained.json"  # architecture and tokenizer of a pretrained text model
SOURCE = "source.json"  # where the source was read from, see source.py
PROBLEMS = "problems.json"  # problems found in the data, and the examples left out because of them
ACCURACY, EXPLAINED = "accuracy", "explained_variance"  # what a comparison measures, of classes and of numbers
COMPARISON = "comparison.json"  # accuracies of this run and its baselines on the same data
CALIBRATION = "calibration.json"  # the temperature of the model's outputs
SUSPECTS = "suspects.json"  # estimates
AUDIT, REVIEW = "audit.json", "review.jsonl"
PICTURES, REPORT = "pictures.parquet", "report.html"
FILES = (
    *(CONFIG, METRICS, RANKING, MODEL, LEARNER, KEPT, PRETRAINED, SOURCE, PROBLEMS, COMPARISON, CALIBRATION, SUSPECTS),
    *(AUDIT, REVIEW, PICTURES, REPORT),
)
PARTS = "parts"  # a folder of runs: baselines, and the folds of the target
FIRST = "first"  # a run of its own: the first answer, which commands read until the training has ended
CHECKPOINT = "checkpoint"  # a folder, see checkpoint.py
_NOTES = "soseleto"  # metadata entry of a safetensors file, a JSON object with ...
_TIED = "soseleto.tied"  # ... alias -> the name its values are stored under


class RunFolder:
    """The files of one run. ``create`` starts a new run, ``open`` reads an existing one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    # The folder

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, resume: bool = False) -> RunFolder:
        """Make the folder; UsageError where it holds an earlier run or any other files.

        With ``resume`` a run that has not finished is accepted.
        """
        run = cls(path)
        run.require_place()
        with writing(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        if run.is_run() and not (resume and not run.has_ended()):
            raise UsageError(f"{run.path} holds a run already: give --out another folder, or delete that one.")
        return run

    def require_place(self) -> None:
        """UsageError where a run can never be: at or below a file, or among other files; makes nothing."""
        path = self.path
        if file := next((above for above in (path, *path.parents) if above.exists() and not above.is_dir()), None):
            raise UsageError(f"{file} is a file, but a run needs a folder: give --out another path.")
        if path.exists() and not self.is_run() and not all(map(_is_leftover, path.iterdir())):
            raise UsageError(f"{path} holds files that are not a soseleto run: give --out an empty or new folder.")

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """An existing run, or its first answer while it trains; UsageError with the closest name otherwise."""
        run = cls(path)
        first = cls(run.path / FIRST)
        trains = not any((run.path / name).exists() for name in (MODEL, CHECKSUMS))  # which are written at the end
        if trains and first.is_run() and first.has_ended():
            return first
        if not run.path.exists():
            near = [str(entry) for entry in run.path.parent.glob("*/")]
            raise UsageError(f"there is no run folder {run.path}{did_you_mean(str(run.path), near)}.")
        if not run.is_run():
            raise UsageError(f"{run.path} is not a soseleto run: name a folder that `soseleto fit` or `demo` wrote.")
        verified(run.path / CONFIG)
        return run

    def is_run(self) -> bool:
        """Whether a training wrote the folder, by its ``config.json`` (others use that name too) or its checksums."""
        with contextlib.suppress(OSError, DataError):
            if regular(self.path / CONFIG) and json_of(self.path / CONFIG).get("format") == FORMAT:
                return True
        with contextlib.suppress(OSError, DataError):
            return CONFIG in (checksums_of(self.path) or {})
        return False

    def has_ended(self) -> bool:
        """Whether the training finished: its last record is the end event."""
        return any(record.get("event") == "end" for record in self.metrics()[-1:])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        refusal = f"another process is training into {self.path}: wait for it, or give --out another folder."
        with locked(self.path, refusal):
            yield

    def tidy(self) -> None:
        for entry in self.path.iterdir():
            if _is_leftover(entry) and entry.is_file():
                entry.unlink(missing_ok=True)

    def has(self, name: str) -> bool:
        """Whether the run has this file; raises where it is damaged or was lost."""
        return verified(self.path / name) is not None

    def existing(self, name: str) -> Path:
        """The path of a file that every finished run has."""
        path = verified(self.path / name)
        if path is None:
            raise DataError(f"{self.path} has no {name}: the run has not finished, or was interrupted.")
        return path

    # JSON files

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Everything needed to repeat the run; adds versions and the device name."""
        device = str(config.get("device", "cpu"))
        added = {"format": FORMAT, "versions": versions(), "device_name": device_name(device)}
        self.write_json(CONFIG, {**config, **added}, indent=2)

    def config(self) -> dict[str, Any]:
        return json_of(self.existing(CONFIG))

    def write_json(self, name: str, value: object, indent: int | None = 1) -> None:
        with replacing(self.path / name) as part:
            part.write_text(as_json(value, indent=indent) + "\n", "utf-8")

    def read_json(self, name: str) -> dict[str, Any] | None:
        path = verified(self.path / name)
        return None if path is None else json_of(path)

    def require_noisy(self) -> None:
        """UsageError in transfer mode, where nothing is known about labels."""
        if self.config().get("mode") == "transfer":
            raise UsageError(
                f"{self.path} was trained in transfer mode, where weights are about the target and not about wrong "
                f"labels: list the lowest weights with `soseleto rank {self.path} --worst N`."
            )

    def suspects(self) -> dict[str, Any] | None:
        """The figures, audited ones in place of estimates; None where there are none yet."""
        estimates, audit = self.read_json(SUSPECTS), self.read_json(AUDIT)
        audited = {name: figure for name, figure in (audit or {}).get("figures", {}).items() if is_known(figure)}
        return {**(estimates or {}), **audited} or None

    def comparison(self) -> dict[str, Any] | None:
        """None without a comparison."""
        return self.read_json(COMPARISON)

    def source(self) -> dict[str, Any]:
        """Where the source was read from, see source.py; empty where it was not a file."""
        return self.read_json(SOURCE) or {}

    def problems(self) -> list[str]:
        """The problems of the data, one sentence each."""
        path = verified(self.path / PROBLEMS)
        with readable(self.path / PROBLEMS):
            problems = [] if path is None else json.loads(path.read_bytes())
            return [f"{problem['where']}: {problem['text']}" for problem in problems]

    def temperature(self) -> float:
        """The calibration temperature of the model's outputs; 1 without calibration."""
        with readable(self.path / CALIBRATION):
            return float((self.read_json(CALIBRATION) or {}).get("temperature", 1.0))

    # The history

    def log(self, record: Mapping[str, Any]) -> None:
        append_line(self.path / METRICS, record)

    def metrics(self) -> list[dict[str, Any]]:
        """Every complete record, in order."""
        verified(self.path / METRICS)
        return lines_of(self.path / METRICS, dict, what="a JSON object")

    def end(self, record: Mapping[str, Any]) -> None:
        """Write the last record, and then the checksums of all files."""
        append_line(self.path / METRICS, record, durable=True)
        with contextlib.suppress(DiskError):  # the run is complete, and can be read without them
            write_checksums(self.path, FILES)

    def kept_metrics(self) -> int:
        """Flush ``metrics.jsonl`` to disk and return its size in bytes."""
        sync(self.path / METRICS)
        return (self.path / METRICS).stat().st_size

    def cut_metrics(self, size: int) -> bool:
        """Truncate ``metrics.jsonl`` to ``size`` bytes; False where it is shorter."""
        path = self.path / METRICS
        before = path.stat().st_size if path.exists() else 0
        if before > size:
            with writing(path):
                os.truncate(path, size)
        return before >= size

    def drop_checkpoints(self) -> None:
        shutil.rmtree(self.path / CHECKPOINT, ignore_errors=True)

    # The ranking

    def write_ranking(self, columns: Mapping[str, Sequence[Any] | np.ndarray | Tensor]) -> None:
        """Write ``ranking.parquet`` from columns of equal length, best example first."""
        self.write_parquet(RANKING, columns)

    def write_parquet(self, name: str, columns: Mapping[str, Any], compression: str = "zstd") -> None:
        pyarrow, parquet = (need(module, to="writing a run") for module in ("pyarrow", "pyarrow.parquet"))
        arrays = {
            column: values.detach().cpu().numpy() if hasattr(values, "detach") else values
            for column, values in columns.items()
        }
        with replacing(self.path / name) as part:
            parquet.write_table(pyarrow.table(arrays), part, compression=compression)

    def ranking(self) -> dict[str, np.ndarray]:
        """The columns of ``ranking.parquet``, best example first."""
        path = self.existing(RANKING)
        columns = parquet_columns(path)
        if missing := [name for name in ("id", "label", "weight") if name not in columns]:
            raise DataError(f"{path} has no column {missing[0]}: restore it from a copy, or train again.")
        return columns

    # Models

    def write_model(self, state_dict: Mapping[str, Tensor]) -> None:
        """Write ``model.safetensors``; a tensor with two names is stored once, and shared again on reading."""
        tensors, tied = _untied(state_dict)
        save = need("safetensors.torch", to="saving a model").save_file
        with replacing(self.path / MODEL) as part:
            save(tensors, part, metadata={_NOTES: as_json({_TIED: tied})})
            if (self.path / CONFIG).exists():  # safetensors writes mode 600: use the mode of the other files
                shutil.copymode(self.path / CONFIG, part)

    def write_learner(self, content: bytes) -> None:
        """Write ``learner.skops``."""
        with replacing(self.path / LEARNER) as part:
            part.write_bytes(content)

    def keep_model(self, rival: RunFolder) -> None:
        """Keep the model of a rival's training; it is the run's model once the comparison names the rival."""
        with replacing(self.path / KEPT) as part:
            shutil.copyfile(rival.existing(MODEL), part)

    def model_state(self) -> dict[str, Tensor]:
        """The state dict of the model that the run keeps, on the CPU."""
        kept = (self.comparison() or {}).get("kept", "soseleto")
        path = self.existing(MODEL if kept == "soseleto" else KEPT)
        state, metadata = tensors_of(path)
        with readable(path):
            tied = json.loads(metadata[_NOTES])[_TIED]
            return state | {alias: state[name] for alias, name in tied.items()}


def require_writable(out: Path, *, run: RunFolder, force: bool, reads: Sequence[Path] = ()) -> None:
    """Raise where ``out`` is inside a run folder or is a file that this command reads; any other needs ``force``.

    Files are compared by identity, so that links, relative paths and the case of a name make no difference.
    """
    link = Path(os.path.realpath(out.parent), out.name)
    for folder in (*link.parents, *Path(os.path.realpath(out)).parents):
        if RunFolder(folder).is_run():
            raise UsageError(f"{out} is inside the run folder {folder}: write it elsewhere.")
    if not os.path.lexists(out):
        return
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give the name of a file.")
    source = run.source().get("path")
    for path in (*([Path(source)] if source else []), *reads):
        if path.exists() and out.exists() and out.samefile(path):
            raise UsageError(f"{out} is an input of this command: write to another file.")
    if not force:
        raise UsageError(
            f"{out} exists already: add --force (in Python force=True) to replace it, or write to another file."
        )


def _is_leftover(entry: Path) -> bool:
    return entry.name == FIRST or (entry.name.startswith(".") and entry.suffix == ".part")


def require_storable(state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        if not hasattr(value, "untyped_storage"):
            raise DataError(f"the model's state {name!r} is not a tensor: model.safetensors can only hold tensors.")


def _untied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Copies of the distinct tensors of a state dict, and alias -> name for tensors that appear under two names.

    safetensors refuses tensors that share storage.
    """
    require_storable(state)
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        storage = tensor.untyped_storage().data_ptr()
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        if tensor.numel() and key in first:
            aliases[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, aliases


def measure_of(comparison: Mapping[str, Any]) -> str:
    return ACCURACY if ACCURACY in comparison["rows"][0] else EXPLAINED
