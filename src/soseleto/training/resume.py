"""Checkpoints of a training: when they are written, what they hold, and how a run is resumed."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from soseleto.engines.model_state import reshard, sharded_modules
from soseleto.errors import CannotSave, DataError, Interrupted, UsageError, first_line
from soseleto.parallel.fsdp import gathered, in_parts
from soseleto.parallel.reducer import Reducer
from soseleto.run_folder import checkpoint
from soseleto.run_folder.files import as_json
from soseleto.run_folder.folder import RunFolder
from soseleto.task.task import Task, state_of
from soseleto.training.history import Records
from soseleto.training.options import Checkpoints

_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_CHANGED = {  # instead of two long values
    "model_fingerprint": "the model",
    "module_fingerprint": "the model",
    "data": "the data",
    **{f"{side}_fingerprint": f"the {side} data" for side in ("source", "target", "test")},
}
# Without effect on the result, or in another entry too, as a method's choice and the type of inputs:
_MAY_DIFFER = (
    *("format", "versions", "device_name", "ranks", "micro_batch_size"),
    *("input_dtype", "wrong_share", "alignments"),
)
_MOST_SHOWN = 100  # characters of two values
ECHO = 2.0  # seconds within which a second signal is the launcher's copy of the first: it forwards signals to its ranks


@dataclass
class Keeper:
    """Writes checkpoints at intervals and on a signal, and finds the last one of an unfinished run.

    Seconds are measured by the monotonic clock, which does not follow changes of the system time.
    """

    records: Records
    task: Task
    state: Any
    config: Mapping[str, Any]
    checkpoints: Checkpoints
    keeps: bool
    n_source: int

    def __post_init__(self) -> None:
        self._reducer = self.task.sharing.reducer
        self._saved_at = self._received_at = time.monotonic()
        self._received: signal.Signals | None = None

    def begin(self) -> int:
        """The number of steps done: 0 for a new run, more for a resumed one."""
        if not self.keeps:
            return 0
        last = self._reducer.first(self._find)
        done = 0 if last is None else self._resume(*last)
        try:
            state = self._gather()
            self._reducer.first(lambda: checkpoint.encode(state, {}) and None)  # before the first step, to fail early
        except CannotSave as error:
            raise CannotSave(f"this training cannot be saved, since {error}: train without out=.") from error
        return done

    def after(self, step: int) -> None:
        """Called after every step: save if it is time, and stop if a signal has come."""
        if not self.keeps or step == self.task.steps:  # after the last step the run itself is written
            self._reducer.largest(0)  # detects a lost rank, even while the device is busy
            return
        due = self.checkpoints.seconds is not None and time.monotonic() - self._saved_at >= self.checkpoints.seconds
        # Agreed by all ranks: 0 for nothing, 1 for a checkpoint, 1 + n for signal n.
        code = self._reducer.largest(int(due) if self._received is None else 1 + self._received)
        if code > 1:
            self._stop(step, signal.Signals(code - 1))
        if code or (self.checkpoints.steps is not None and step % self.checkpoints.steps == 0):
            self._save(step)

    @contextmanager
    def handling_signals(self) -> Iterator[None]:
        """Inside, SIGINT, SIGTERM and SIGHUP end the step and save the run; a second SIGINT stops at once.

        One that is ignored, as SIGHUP by nohup, stays so.
        """
        if not self.keeps or threading.current_thread() is not threading.main_thread():
            yield
            return
        heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, self._on_signal) for number in heeded}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        apart = time.monotonic() - self._received_at
        if number == signal.SIGINT and self._received is not None and apart > (self._reducer.ranks > 1) * ECHO:
            raise KeyboardInterrupt
        self._received, self._received_at = signal.Signals(number), time.monotonic()

    def _stop(self, step: int, received: signal.Signals) -> None:
        self._save(step)
        folder = "" if self.records.folder is None else f" with {self.records.folder.path}"
        raise Interrupted(
            f"stopped by {received.name} after step {step} of {self.task.steps}, which is saved: run the same "
            f"again{folder} to resume.",
            received,
        )

    def _find(self) -> tuple[int, dict[str, Any], list[str]] | None:
        """Step, state and damage messages of an unfinished run; None without a checkpoint, when it starts over."""
        folder = self.records.folder
        assert folder is not None
        if folder.is_run():
            require_same(folder.path, comparable(folder.config()), comparable(self.config))
            damage: list[str] = []
            last = checkpoint.load_last(folder.path, damage.append)
            if last is not None:
                step, saved = last
                return step, saved, damage
        folder.write_config(self.config)
        folder.cut_metrics(0)
        return None

    def _resume(self, step: int, saved: Mapping[str, Any], damage: list[str]) -> int:
        if type(step) is not int or not 0 <= step <= self.task.steps:
            raise DataError(f"there is no step {step!r} in this training of {self.task.steps}: give another folder.")
        try:
            self._restore(saved)
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise DataError(
                f"the checkpoint of step {step} does not fit this model, optimizer or method "
                f"({first_line(error)}): give the same ones again, or another folder."
            ) from error
        for text in [*damage, f"resumed after step {step}"]:
            self.records.message(text)
        return step

    def _save(self, step: int) -> None:
        self.task.guard.check()  # raises rather than save a state with a NaN in it
        state = self._gather()

        def write() -> None:
            folder = self.records.folder
            assert folder is not None
            state["records"]["metrics"] = folder.kept_metrics()
            checkpoint.save(folder.path, step, state)

        self._reducer.first(write)
        self._saved_at = time.monotonic()

    def _gather(self) -> dict[str, Any]:
        state, model = self.state, self.task.model
        reshard(model)
        method = dict(state_of(state))
        if self._reducer.ranks > 1:  # each rank has the entries of its own examples
            method = _per_example(method, lambda mine: self._reducer.gather(mine, self.n_source))
        kept = {
            "model": dict(model.state_dict()),
            "buffers": _unsaved_buffers(model),
            "optimizer": state.optimizer.state_dict(),
            "schedule": None if state.schedule is None else state.schedule.state_dict(),
            "method": method,
            "random": _random_state(self.task.device),
            "records": self.records.state(),
        }
        return gathered(kept) if sharded_modules(model) else kept

    def _restore(self, saved: Mapping[str, Any]) -> None:
        state, model = self.state, self.task.model
        if sharded_modules(model):
            saved = in_parts(saved, model, state.optimizer)
        model.load_state_dict(saved["model"])
        for name, buffer in _unsaved_buffers(model).items():
            buffer.copy_(saved["buffers"][name])
        state.optimizer.load_state_dict(saved["optimizer"])
        if state.schedule is not None:
            state.schedule.load_state_dict(saved["schedule"])
        method, mine = saved["method"], slice(self._reducer.rank, None, self._reducer.ranks)
        if self._reducer.ranks > 1:
            method = _per_example(method, lambda entries: entries[mine])
        state.load_state(method)
        torch.set_rng_state(saved["random"]["cpu"])
        if self.task.device.type == "cuda":
            torch.cuda.set_rng_state(saved["random"]["cuda"], self.task.device)
        self.records.load_state(saved["records"], self.task.device)


def _per_example(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A method's state with ``change`` made to all that has one entry per source example."""
    if isinstance(tree, Mapping):
        return {
            name: {k: change(v) for k, v in value.items()}
            if name in ("weights", "examples") and isinstance(value, Mapping)
            else _per_example(value, change)
            for name, value in tree.items()
        }
    return [_per_example(value, change) for value in tree] if isinstance(tree, list | tuple) else tree


def unfinished(out: str | Path | None) -> dict[str, Any]:
    """The configuration of an unfinished run in the folder ``out``; empty where there is none."""
    folder = None if out is None else RunFolder(out)
    return folder.config() if folder is not None and folder.is_run() and not folder.has_ended() else {}


def model_fingerprint(model: nn.Module) -> str:
    """sha256 of the model's layers with their settings, and of the names and shapes of its state, not the values."""
    shapes = {name: getattr(value, "shape", None) for name, value in model.state_dict().items()}
    return hashlib.sha256(_ADDRESS.sub("", f"{model!r}{shapes}").encode()).hexdigest()


def _random_state(device: torch.device) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def _unsaved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that are not part of the model's state dict (``persistent=False``)."""
    kept = model.state_dict()
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def comparable(config: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as ``config.json`` holds it, without memory addresses and what may differ on resuming."""
    text = _ADDRESS.sub("", as_json(config))
    return {name: value for name, value in json.loads(text).items() if name not in _MAY_DIFFER}


def require_same(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raise if the run in a folder was started with another configuration."""
    if changed := differences(old, new):
        raise UsageError(
            f"{path} holds an unfinished run that cannot be resumed, since {', '.join(changed)}: "
            "give the same as before, or another folder."
        )


def differences(
    old: Mapping[str, Any], new: Mapping[str, Any], form: str = "{name} was {old} and is {new}", prefix: str = ""
) -> list[str]:
    """The entries that differ between two configurations, each as a clause of this form."""
    clauses: list[str] = []
    for name, first, second in ((f"{prefix}{key}", old.get(key), new.get(key)) for key in {**old, **new}):
        if first == second:
            continue
        if name in _CHANGED:
            clauses.append(f"{_CHANGED[name]} changed")
        elif isinstance(first, dict) and isinstance(second, dict):
            if first.get("name") != second.get("name"):  # different methods, whose other settings say nothing more
                first, second = {"name": first.get("name")}, {"name": second.get("name")}
            clauses += differences(first, second, form, f"{name}.")
        else:
            values = {"old": json.dumps(first), "new": json.dumps(second)}
            is_short = sum(map(len, values.values())) < _MOST_SHOWN
            clauses.append(form.format(name=name, **values) if is_short else f"{name} changed")
    return list(dict.fromkeys(clauses))


def require_same_settings(reducer: Reducer, settings: Mapping[str, Any]) -> None:
    """Raise on every rank, with all differences, where one was started with other settings than rank 0."""
    every = reducer.every(comparable(settings))
    for rank, own in enumerate(every):
        form = f"{{name}} is {{old}} on rank 0 and {{new}} on rank {rank}"
        if changed := differences(every[0], own, form):
            raise UsageError(
                f"the ranks were started with different settings, since {', '.join(changed)}: give every rank the same."
            )
