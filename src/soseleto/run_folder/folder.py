"""The run folder: everything a training writes, in open formats and never a pickle.

``config.json``, ``metrics.jsonl``, ``ranking.parquet``, ``model.safetensors``, ``report.html``, and ``checkpoint/``
while the training runs. Files are written to a temporary name, flushed to disk and renamed, so that a kill at any
moment leaves the previous file intact; ``metrics.jsonl`` grows by one line per record (json_lines.py). Of a finished
run every file is compared with its checksum (checksums.py) before it is used.
Torch, safetensors and pyarrow are imported only where they are used: opening a run must not take seconds.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from soseleto.data.readers.table_files import values_of
from soseleto.errors import DataError, UsageError, did_you_mean, need
from soseleto.run_folder import checksums, json_lines
from soseleto.run_folder.checksums import CHECKSUMS, logger
from soseleto.run_folder.figures import with_audit
from soseleto.run_folder.files import as_json, aside, device_name, locked, sync, untie, versions, writing
from soseleto.run_folder.plausible import check_config, check_ranking, check_tensors, readable
from soseleto.run_folder.reading import MOST_TOKENIZER, complete_lines, json_of, regular, table_of, tensors_of

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "soseleto run 1"
CONFIG, METRICS, RANKING, MODEL, REPORT = (
    "config.json",
    "metrics.jsonl",
    "ranking.parquet",
    "model.safetensors",
    "report.html",
)
PROBLEMS, SUSPECTS, PICTURES = "problems.json", "suspects.json", "pictures.parquet"
REVIEW, AUDIT = "review.jsonl", "audit.json"
SOURCE, COMPARISON, CALIBRATION = "source.json", "comparison.json", "calibration.json"
FINAL = "final.safetensors"  # what a final scikit-learn model is trained on, and its recipe
PRETRAINED = "pretrained.json"  # architecture and tokenizer of a pretrained text model
KEPT = "kept.safetensors"  # the model of another training, in place of model.safetensors
ROWS = "rows.parquet"  # of a source table, see source_rows.py
PARTS = "parts"  # a folder of runs: baselines, and the folds of the target
CHECKPOINT = "checkpoint"  # a folder, see checkpoint.py
WRITTEN_BY = "written_by"  # entry of config.json: the command whose runs may be replaced by the same command
_FILES = (
    METRICS,
    RANKING,
    MODEL,
    KEPT,
    REPORT,
    PROBLEMS,
    SUSPECTS,
    PICTURES,
    REVIEW,
    AUDIT,
    SOURCE,
    ROWS,
    COMPARISON,
    CALIBRATION,
    FINAL,
    PRETRAINED,
)
_NOTES = "soseleto"  # metadata entry of model.safetensors, a JSON object with ...
_TIED = "soseleto.tied"  # ... alias -> the name its values are stored under


class RunFolder:
    """The files of one run. ``create`` starts a new run, ``open`` reads an existing one."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

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
        if above := next((one for one in (path, *path.parents) if one.exists() and not one.is_dir()), None):
            raise UsageError(f"{above} is a file, but a run needs a folder: give --out another path.")
        if path.exists() and not self.is_run() and any(not _is_leftover(entry) for entry in path.iterdir()):
            raise UsageError(f"{path} holds files that are not a soseleto run: give --out an empty or new folder.")

    @classmethod
    def clear(cls, path: str | os.PathLike[str], *, written_by: str) -> None:
        """Delete an earlier run of the command ``written_by``, so that ``create`` accepts the folder.

        UsageError, with nothing deleted, where the run is of another origin, is in use, has been reviewed or has other
        files beside it.
        """
        run = cls(path)
        if not run.is_run():
            return
        with run.held(), run._review_held():
            if reason := run._reason_to_keep(written_by):
                raise UsageError(f"{run.path} {reason}: give --out another folder, or delete that one.")
            for name in (CHECKPOINT, PARTS):
                shutil.rmtree(run.path / name, ignore_errors=True)
            for name in (CHECKSUMS, *_FILES, CONFIG):  # last, because it marks the folder as a run
                (run.path / name).unlink(missing_ok=True)

    def _review_held(self) -> contextlib.AbstractContextManager[None]:
        """Lock the decisions, where there are any, against a review."""
        path = self.path / REVIEW
        if not path.exists():
            return contextlib.nullcontext()
        return locked(path, f"{self.path} is being reviewed: give --out another folder, or stop that review.")

    def _reason_to_keep(self, written_by: str) -> str | None:
        if self.config().get(WRITTEN_BY) != written_by:
            return f"holds a run that `{written_by}` did not write"
        review = self.path / REVIEW
        if review.exists() and review.stat().st_size:
            return "holds review decisions"
        known = {*_FILES, CONFIG, CHECKSUMS, CHECKPOINT, PARTS}
        others = [entry.name for entry in self.path.iterdir() if entry.name not in known and not _is_leftover(entry)]
        return f"holds {others[0]} beside the run" if others else None

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        """An existing run; UsageError with the closest name otherwise. Warns about a finished run without checksums."""
        run = cls(path)
        if not run.path.exists():
            near = [str(entry) for entry in _siblings(run.path)]
            raise UsageError(f"there is no run folder {run.path}{did_you_mean(str(run.path), near)}.")
        if not run.is_run():
            raise UsageError(f"{run.path} is not a soseleto run: name a folder that `soseleto fit` or `demo` wrote.")
        checksums.verified(run.path, CONFIG)
        if not (run.path / CHECKSUMS).exists() and (run.path / MODEL).exists():
            logger.warning("%s has no checksums, so that damage to its files may not be noticed", run.path)
        return run

    def is_run(self) -> bool:
        """Whether this class wrote the folder, by its ``config.json`` (others use that name too) or its checksums."""
        try:
            config = json_of(self.path / CONFIG) if regular(self.path / CONFIG) else None
        except (OSError, DataError):
            config = None
        return (isinstance(config, dict) and config.get("format") == FORMAT) or checksums.are_ours(self.path)

    def has_ended(self) -> bool:
        """Whether the training finished: its last record is the end event."""
        return any(record.get("event") == "end" for record in self.metrics()[-1:])

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lock the folder against other trainings."""
        refusal = f"another process is training into {self.path}: wait for it, or give --out another folder."
        with locked(self.path, refusal):
            yield

    def tidy(self) -> None:
        """Delete the temporary files of writes that were killed, by processes that have ended."""
        for entry in self.path.iterdir():
            if _is_leftover(entry) and entry.is_file() and not _is_running(entry.name.split(".")[-2]):
                entry.unlink(missing_ok=True)

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Everything needed to repeat the run; adds versions and the device name."""
        device = str(config.get("device", "cpu"))
        added = {"format": FORMAT, "versions": versions(), "device_name": device_name(device)}
        checksums.write(self.path / CONFIG, as_json({**config, **added}, indent=2) + "\n")

    def write_problems(self, problems: Sequence[Mapping[str, Any]]) -> None:
        """Problems found in the data, and the examples left out because of them."""
        self._write_json(PROBLEMS, list(problems))

    def write_suspects(self, summary: Mapping[str, Any]) -> None:
        """Estimates from the probes: threshold, precision, recall, and their curve over thresholds."""
        self._write_json(SUSPECTS, summary)

    def suspects(self) -> dict[str, Any] | None:
        """What ``write_suspects`` wrote; None without probes, or while the run has not finished."""
        return self._json_or_none(SUSPECTS)

    def write_audit(self, audit: Mapping[str, Any]) -> None:
        """The sample and the figures of an audit; ``suspects.json`` then has the audited figures."""
        self._write_json(AUDIT, audit)
        self.write_suspects(with_audit(self.suspects() or {}, audit))

    def audit(self) -> dict[str, Any] | None:
        """What ``write_audit`` wrote; None without an audit."""
        return self._json_or_none(AUDIT)

    def write_comparison(self, comparison: Mapping[str, Any]) -> None:
        """Accuracies of this run and its baselines on the same data."""
        self._write_json(COMPARISON, comparison)

    def comparison(self) -> dict[str, Any] | None:
        """What ``write_comparison`` wrote; None without a comparison."""
        return self._json_or_none(COMPARISON)

    def write_temperature(self, temperature: float, *, examples: int) -> None:
        """The calibration temperature of the model's outputs, and the number of held-out examples it was fitted on."""
        self._write_json(CALIBRATION, {"temperature": temperature, "examples": examples}, indent=None)

    def temperature(self) -> float:
        """What ``write_temperature`` wrote; 1 without calibration."""
        found = (self._json_or_none(CALIBRATION) or {}).get("temperature", 1.0)
        if not isinstance(found, int | float) or not 0 < found < math.inf:
            raise DataError(f"{self.path / CALIBRATION} holds no temperature above 0: delete the file.")
        return float(found)

    def write_source(self, source: Mapping[str, Any]) -> None:
        """Where the source came from, see manifest.py."""
        self._write_json(SOURCE, source)

    def source(self) -> dict[str, Any]:
        """What ``write_source`` wrote; empty where the source was not a file."""
        return self._json_or_none(SOURCE) or {}

    def config(self) -> dict[str, Any]:
        """What ``write_config`` wrote."""
        path = self._existing(CONFIG)
        return check_config(path, json_of(path))

    def log(self, record: Mapping[str, Any]) -> None:
        """Append one record to ``metrics.jsonl``."""
        json_lines.append(self.path / METRICS, record)

    def write_metrics(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Replace ``metrics.jsonl``."""
        with aside(self.path / METRICS) as part:
            part.write_bytes(b"".join(map(json_lines.line_of, records)))

    def end(self, record: Mapping[str, Any]) -> None:
        """Write the checksums of all files, and then the last record of ``metrics.jsonl``."""
        try:
            checksums.create(self.path, (CONFIG, *_FILES))
            content = complete_lines(self.path / METRICS) + json_lines.line_of(record)
            with checksums.changing(self.path / METRICS, checksums.digest_of(content)):
                self.log(record)
        except OSError:
            if checksums.are_ours(self.path) and self.has_ended():
                return  # only the last update failed: the checksums of before and after the last record are listed
            with contextlib.suppress(OSError):  # the run has not ended, and may still log why
                self.unseal()
            raise

    def unseal(self) -> None:
        """Delete the checksums of a run that was killed at its end, and will be written again."""
        checksums.remove(self.path)

    def kept_metrics(self) -> int:
        """Flush ``metrics.jsonl`` to disk and return its size in bytes."""
        path = self.path / METRICS
        if not path.exists():
            return 0
        sync(path)
        return path.stat().st_size

    def cut_metrics(self, size: int) -> bool:
        """Truncate ``metrics.jsonl`` to ``size`` bytes; False where it is shorter."""
        path = self.path / METRICS
        there = path.stat().st_size if path.exists() else 0
        if there > size:
            with writing(path):
                os.truncate(path, size)
        return there >= size

    def drop_checkpoints(self) -> None:
        """Delete the checkpoints of a finished run."""
        shutil.rmtree(self.path / CHECKPOINT, ignore_errors=True)

    def metrics(self) -> list[dict[str, Any]]:
        """Every complete record, in order."""
        fix = "restore the file, or train again"
        checksums.verified(self.path, METRICS)
        return json_lines.read(self.path / METRICS, dict, kind="a JSON object", fix=fix)

    def write_ranking(self, columns: Mapping[str, Sequence[Any] | np.ndarray | Tensor]) -> None:
        """Write ``ranking.parquet`` from columns of equal length, best example first."""
        pyarrow, parquet = (need(name, to="writing a ranking") for name in ("pyarrow", "pyarrow.parquet"))
        arrays = {name: pyarrow.array(_as_array(values)) for name, values in columns.items()}
        lengths = {name: len(array) for name, array in arrays.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"the columns of a ranking must have the same length, got {lengths}.")
        with checksums.replacing(self.path / RANKING) as part:
            parquet.write_table(pyarrow.table(arrays), part, compression="zstd")

    def ranking(self) -> dict[str, np.ndarray]:
        """The columns of ``ranking.parquet``, best example first."""
        path = self._existing(RANKING)
        table = table_of(path)
        with readable(self.path):
            columns = {name: _as_numpy(name, table.column(name)) for name in table.column_names}
            n_source = self.config().get("n_source") if (self.path / CONFIG).exists() else None
            check_ranking(path, columns, n_source)
        return columns

    def write_model(self, state_dict: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
        """Write ``model.safetensors``; a tensor with two names is stored once, and shared again on reading."""
        tensors, tied = untie(state_dict)
        notes = {_NOTES: as_json({**(metadata or {}), _TIED: tied})}  # the order of several entries would be random
        with checksums.replacing(self.path / MODEL) as part:
            need("safetensors.torch", to="saving a model").save_file(tensors, part, metadata=notes)
            if (self.path / CONFIG).exists():  # safetensors writes mode 600: use the mode of the other files
                shutil.copymode(self.path / CONFIG, part)

    def model_bytes(self) -> bytes:
        """The content of ``model.safetensors``."""
        return self._existing(MODEL).read_bytes()

    def keep_model(self, rival: bytes) -> None:
        """Keep a rival's model; it is the run's model once ``write_comparison`` has named the rival."""
        with checksums.replacing(self.path / KEPT) as part:
            part.write_bytes(rival)

    def write_final(self, tensors: Mapping[str, Tensor], recipe: Mapping[str, Any]) -> None:
        """The training data and the recipe of a final scikit-learn model, which ``load`` fits again."""
        with checksums.replacing(self.path / FINAL) as part:
            notes = {_NOTES: as_json(dict(recipe))}
            need("safetensors.torch", to="saving a model").save_file(dict(tensors), part, metadata=notes)
            if (self.path / CONFIG).exists():
                shutil.copymode(self.path / CONFIG, part)

    def final(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What ``write_final`` wrote; None without a final model."""
        path = checksums.verified(self.path, FINAL)
        if path is None:
            return None
        tensors, metadata = tensors_of(path)
        with readable(self.path):
            return tensors, dict(json.loads(metadata[_NOTES]))

    def write_pretrained(self, fields: Mapping[str, Any]) -> None:
        """Architecture and tokenizer of a pretrained text model, from which ``load`` builds it again."""
        self._write_json(PRETRAINED, fields, indent=None)

    def pretrained(self) -> dict[str, Any]:
        """What ``write_pretrained`` wrote."""
        path = self._existing(PRETRAINED)
        found = json_of(path, most=MOST_TOKENIZER)
        if not isinstance(found, dict):
            raise DataError(f"{path} is not a JSON object: restore it from a copy, or train again.")
        return found

    @property
    def kept(self) -> str:
        """The method whose model the run keeps."""
        return str((self.comparison() or {}).get("kept", "soseleto"))

    @property
    def _keeps_another(self) -> bool:
        """Whether the model that the run keeps is that of another training than the one that made the weights."""
        return self.kept != "soseleto" or bool((self.comparison() or {}).get("apart"))

    def model_state(self) -> dict[str, Tensor]:
        """The state dict of the model that the run keeps, on the CPU."""
        return self.model_and_metadata()[0]

    def model_metadata(self) -> dict[str, str]:
        """The metadata strings given to ``write_model``."""
        return self.model_and_metadata()[1]

    def model_and_metadata(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        path = self._existing(KEPT if self._keeps_another else MODEL)
        state, metadata = tensors_of(path)
        with readable(self.path):
            if _NOTES in metadata:
                metadata = json.loads(metadata[_NOTES])
            found: Any = metadata.pop(_TIED, {})
            tied = json.loads(found) if isinstance(found, str) else found  # text in earlier versions
            state |= {alias: state[name] for alias, name in tied.items()}
        check_tensors(path, state)
        return state, metadata

    def has(self, name: str) -> bool:
        """Whether the run has this file; raises where it is damaged or was lost."""
        return checksums.verified(self.path, name) is not None

    def _write_json(self, name: str, value: object, indent: int | None = 1) -> None:
        checksums.write(self.path / name, as_json(value, indent=indent) + "\n")

    def _json_or_none(self, name: str) -> dict[str, Any] | None:
        path = checksums.verified(self.path, name)
        if path is None:
            return None
        found = json_of(path, fix="restore the file, or delete it")
        if not isinstance(found, dict):
            raise DataError(f"{path} is not a JSON object: restore the file, or delete it.")
        return found

    def _existing(self, name: str) -> Path:
        path = checksums.verified(self.path, name)
        if path is None:
            raise DataError(f"{self.path} has no {name}: the run has not finished, or was interrupted.")
        return path


def _is_leftover(entry: Path) -> bool:
    return entry.name.startswith(".") and entry.suffix == ".part"


def _is_running(process: str) -> bool:
    """Whether there is a process of this number; True where that cannot be known."""
    try:
        os.kill(int(process), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except (ValueError, OSError):
        return True
    return True


def _siblings(path: Path) -> list[Path]:
    return [entry for entry in path.parent.iterdir() if entry.is_dir()] if path.parent.is_dir() else []


def _as_array(values: Any) -> Any:
    """A tensor as a NumPy array; anything else as it is."""
    return values.detach().cpu().numpy() if hasattr(values, "detach") else values


def _as_numpy(name: str, column: Any) -> np.ndarray:
    """A column of a ranking; equal words are one object, which matters for rankings of many examples."""
    types = need("pyarrow", to="reading a ranking").types
    if name == "id" or not types.is_string(column.type):
        return np.asarray(column.to_numpy())
    return np.array(values_of(column), dtype=object)
