"""The run folder: everything one training leaves behind, in files anyone can read, and never a pickle.

``config.json``, ``metrics.jsonl``, ``ranking.parquet``, ``model.safetensors``, ``report.html``, and while the
training runs ``checkpoint/``. Whole
files are written aside, flushed to the disk and renamed, so a kill at any moment leaves the last whole one;
``metrics.jsonl`` grows by one flushed line a record, and a line torn by a kill is left out on reading.
Torch, safetensors and pyarrow are imported where they are needed: looking at a run must not cost seconds.
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

from soseleto.errors import DataError, UsageError, did_you_mean, need
from soseleto.run_folder.files import as_json, aside, device_name, sync, versions, write_text, writing

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "soseleto run 1"
CONFIG, METRICS, RANKING, MODEL, REPORT, PROBLEMS, SUSPECTS = (
    "config.json",
    "metrics.jsonl",
    "ranking.parquet",
    "model.safetensors",
    "report.html",
    "problems.json",
    "suspects.json",
)
PICTURES, REVIEW, SOURCE = "pictures.parquet", "review.jsonl", "source.json"
COMPARISON, CALIBRATION = "comparison.json", "calibration.json"
PARTS = "parts"  # a folder of runs: the rivals, and the folds of the target
CHECKPOINT = "checkpoint"  # a folder, see checkpoint.py
_TIED = "soseleto.tied"  # metadata entry of model.safetensors: alias -> the name its values are stored under


class RunFolder:
    """One run's files. ``create`` starts a run, ``open`` looks at one that exists."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, resume: bool = False) -> RunFolder:
        """Make the folder; one that holds an earlier run, or anything else, is refused.

        With ``resume`` a run that has not ended is taken as it is.
        """
        run = cls(path)
        if run.path.exists() and not run.path.is_dir():
            raise UsageError(f"{run.path} is a file, and a run needs a folder: give another --out.")
        with writing(run.path):
            run.path.mkdir(parents=True, exist_ok=True)
        if run.is_run():
            if resume and not run.has_ended():
                return run
            raise UsageError(f"{run.path} holds a run already: give --out another folder, or delete that one.")
        if any(not _is_leftover(entry) for entry in run.path.iterdir()):
            raise UsageError(f"{run.path} holds files that are no soseleto run: give --out an empty or a new folder.")
        return run

    @classmethod
    def clear(cls, path: str | os.PathLike[str]) -> None:
        """Take an earlier run's files away, so that ``create`` can follow; anything else is left alone."""
        run = cls(path)
        if run.is_run():
            for name in (CHECKPOINT, PARTS):
                shutil.rmtree(run.path / name, ignore_errors=True)
            files = (
                METRICS,
                RANKING,
                PICTURES,
                MODEL,
                REPORT,
                REVIEW,
                SOURCE,
                PROBLEMS,
                SUSPECTS,
                COMPARISON,
                CALIBRATION,
            )
            for name in (*files, CONFIG):  # the mark that it is a run goes last
                (run.path / name).unlink(missing_ok=True)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """A run that exists; anything else raises, with the nearest name that does."""
        run = cls(path)
        if not run.path.exists():
            near = [str(entry) for entry in _siblings(run.path)]
            raise UsageError(f"there is no run folder {run.path}{did_you_mean(str(run.path), near)}.")
        if not run.is_run():
            raise UsageError(f"{run.path} is no soseleto run: name a folder that `soseleto fit` or `demo` wrote.")
        return run

    def is_run(self) -> bool:
        """Whether the folder's ``config.json`` was written by this class (the name alone proves nothing)."""
        try:
            config = json.loads((self.path / CONFIG).read_text("utf-8"))
        except (OSError, ValueError):
            return False
        return isinstance(config, dict) and config.get("format") == FORMAT

    def has_ended(self) -> bool:
        """Whether the training came to its end (its last record says so)."""
        return any(record.get("event") == "end" for record in self.metrics()[-1:])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Inside, no other process can train into this folder; a killed one lets go by itself."""
        if os.name != "posix":
            yield
            return
        handle = os.open(self.path, os.O_RDONLY)
        try:
            self._lock(handle)
            yield
        finally:
            os.close(handle)

    def _lock(self, handle: int) -> None:
        import fcntl

        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(
                f"another process is training into {self.path}: wait for it, or give --out another folder."
            ) from error
        except OSError:  # a file system without locks
            return

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Everything needed to repeat the run; versions and the device's name are added."""
        device = str(config.get("device", "cpu"))
        added = {"format": FORMAT, "versions": versions(), "device_name": device_name(device)}
        write_text(self.path / CONFIG, as_json({**config, **added}, indent=2) + "\n")

    def write_problems(self, problems: Sequence[Mapping[str, Any]]) -> None:
        """What was wrong with the data, and which examples were left out because of it."""
        write_text(self.path / PROBLEMS, as_json(list(problems), indent=1) + "\n")

    def write_suspects(self, summary: Mapping[str, Any]) -> None:
        """What the probes tell of the suspects: threshold, estimates, and their curve over thresholds."""
        write_text(self.path / SUSPECTS, as_json(summary, indent=1) + "\n")

    def suspects(self) -> dict[str, Any] | None:
        """What ``write_suspects`` wrote; None where the run had no probes, or has not ended."""
        return self._json_or_none(SUSPECTS)

    def write_comparison(self, comparison: Mapping[str, Any]) -> None:
        """How this run and its rivals did on the same data."""
        write_text(self.path / COMPARISON, as_json(comparison, indent=1) + "\n")

    def comparison(self) -> dict[str, Any] | None:
        """What ``write_comparison`` wrote; None where nothing was compared."""
        return self._json_or_none(COMPARISON)

    def write_temperature(self, temperature: float, *, examples: int) -> None:
        """What the model's outputs are divided by, and by how many held-out examples that was found."""
        write_text(self.path / CALIBRATION, as_json({"temperature": temperature, "examples": examples}) + "\n")

    def temperature(self) -> float:
        """What ``write_temperature`` wrote; 1 where nothing was calibrated."""
        found = (self._json_or_none(CALIBRATION) or {}).get("temperature", 1.0)
        if not isinstance(found, int | float) or not found > 0:
            raise DataError(f"{self.path / CALIBRATION} holds no temperature above 0: delete the file.")
        return float(found)

    def source(self) -> dict[str, Any]:
        """Where the source came from, see manifest.py; empty where it was no file."""
        path = self.path / SOURCE
        return json.loads(path.read_text("utf-8")) if path.exists() else {}

    def config(self) -> dict[str, Any]:
        """What ``write_config`` wrote."""
        loaded: dict[str, Any] = json.loads(self._existing(CONFIG).read_text("utf-8"))
        return loaded

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record to ``metrics.jsonl``; a number that is not finite is written as null."""
        path = self.path / METRICS
        with writing(path), path.open("a+b") as file:
            _drop_torn_line(file)
            file.write(as_json(record).encode() + b"\n")
            file.flush()

    def kept_metrics(self) -> int:
        """How many bytes ``metrics.jsonl`` has, once they are on the disk."""
        path = self.path / METRICS
        if not path.exists():
            return 0
        sync(path)
        return path.stat().st_size

    def cut_metrics(self, size: int) -> bool:
        """Forget every record after the first ``size`` bytes; False where there are fewer."""
        path = self.path / METRICS
        there = path.stat().st_size if path.exists() else 0
        if there > size:
            with writing(path):
                os.truncate(path, size)
        return there >= size

    def drop_checkpoints(self) -> None:
        """An ended run needs none."""
        shutil.rmtree(self.path / CHECKPOINT, ignore_errors=True)

    def metrics(self) -> list[dict[str, Any]]:
        """Every whole record, in order; none yet is an empty list."""
        path = self.path / METRICS
        if not path.exists():
            return []
        *lines, _torn = path.read_bytes().split(b"\n")  # what follows the last newline is nothing, or torn
        return [_record(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]

    def write_ranking(self, columns: Mapping[str, Sequence[Any] | np.ndarray | Tensor]) -> None:
        """Write ``ranking.parquet`` from columns of equal length, best example first."""
        pyarrow, parquet = (need(name, to="writing a ranking") for name in ("pyarrow", "pyarrow.parquet"))
        arrays = {name: pyarrow.array(_plain_column(values)) for name, values in columns.items()}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of a ranking must have one length, got {lengths}.")
        with aside(self.path / RANKING) as part:
            parquet.write_table(pyarrow.table(arrays), part, compression="zstd")

    def ranking(self) -> dict[str, np.ndarray]:
        """The columns of ``ranking.parquet``, best example first."""
        path = self._existing(RANKING)
        table = need("pyarrow.parquet", to="reading a ranking").read_table(path, memory_map=False)
        return {name: table.column(name).to_numpy() for name in table.column_names}

    def write_model(self, state_dict: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write ``model.safetensors``; a tensor under two names is stored once, and tied again on reading."""
        tensors, tied = _untie(state_dict)
        notes = {**(metadata or {}), _TIED: json.dumps(tied)}
        with aside(self.path / MODEL) as part:
            need("safetensors.torch", to="saving a model").save_file(tensors, part, metadata=notes)
            if (self.path / CONFIG).exists():  # safetensors lets nobody else read its files: as open as the others
                shutil.copymode(self.path / CONFIG, part)

    def model_state(self) -> dict[str, Tensor]:
        """The state dict of ``model.safetensors``, on the CPU."""
        path = self._existing(MODEL)
        state: dict[str, Tensor] = need("safetensors.torch", to="loading a model").load_file(path)
        with need("safetensors", to="loading a model").safe_open(path, "pt") as file:
            tied = json.loads((file.metadata() or {}).get(_TIED, "{}"))
        return state | {alias: state[name] for alias, name in tied.items()}

    def model_metadata(self) -> dict[str, str]:
        """The strings that were stored beside the model."""
        with need("safetensors", to="loading a model").safe_open(self._existing(MODEL), "pt") as file:
            return {name: text for name, text in (file.metadata() or {}).items() if name != _TIED}

    def _json_or_none(self, name: str) -> dict[str, Any] | None:
        path = self.path / name
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_text("utf-8"))
        except ValueError as error:
            raise DataError(f"{path} is no JSON: restore the file, or delete it.") from error
        return dict(found)

    def _existing(self, name: str) -> Path:
        path = self.path / name
        if not path.exists():
            raise DataError(f"{self.path} has no {name}: the run has not ended, or was cut short.")
        return path


def _is_leftover(entry: Path) -> bool:
    return entry.name.startswith(".") and entry.suffix == ".part"


def _siblings(path: Path) -> list[Path]:
    return [entry for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []


def _drop_torn_line(file: Any) -> None:
    """Cut what a killed run left behind the last newline, or the next record would be glued to it."""
    end = file.seek(0, os.SEEK_END)
    if end == 0:
        return
    file.seek(end - 1)
    if file.read(1) != b"\n":
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)


def _record(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
    except ValueError as error:
        raise DataError(f"line {number} of {path} is no JSON: restore the file, or train again.") from error
    return record


def _plain_column(values: Any) -> Any:
    """Rows of ``values`` as Arrow takes them: a tensor through NumPy, anything else as it is."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else values


def _untie(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors with storage of their own, and alias -> name where one tensor has two names."""
    tensors: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        if not hasattr(tensor, "untyped_storage"):
            raise DataError(f"the model's state {name!r} is no tensor, and model.safetensors holds only tensors.")
        key = (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
        )
        if tensor.numel() and key in first:
            tied[name] = first[key]
            continue
        first[key] = name
        tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, tied
