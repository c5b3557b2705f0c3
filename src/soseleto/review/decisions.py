"""Decisions of a review: an append-only file of one JSON object a line, on the disk before anyone is told.

``{"id": "a.png", "action": "relabel", "label": "cat", "at": "2026-01-31T12:00:00+00:00"}``; ``keep`` and ``drop`` have
no label; ``{"action": "undo"}`` takes back the last decision that still stands.
"""

from __future__ import annotations

import datetime
import json
import os
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soseleto.errors import DataError, UsageError
from soseleto.run_folder.files import writing
from soseleto.run_folder.folder import REVIEW, RunFolder

ACTIONS = ("keep", "drop", "relabel")
UNDO = "undo"


@dataclass(frozen=True)
class Decision:
    """What somebody decided about one example; a label belongs to ``relabel`` alone."""

    id: str
    action: str
    label: str | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise UsageError(f"unknown action {self.action!r}: choose one of {', '.join(ACTIONS)}.")
        if (self.label is not None) != (self.action == "relabel"):
            raise UsageError(f"{self.action!r} and the label {self.label!r} do not go together: only relabel has one.")


class Decisions:
    """The decisions that stand, in order, and the file they are kept in; one process writes at a time."""

    def __init__(self, run: RunFolder) -> None:
        self.path = run.path / REVIEW
        self._stand = list(_standing(read_records(self.path)))
        self._lock = threading.Lock()
        with writing(self.path):
            self._file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        _hold(self._file, self.path)
        _cut_torn_line(self._file)

    def decide(self, decision: Decision) -> None:
        """Returns once the decision is on the disk."""
        with self._lock:
            self._append({name: value for name, value in asdict(decision).items() if value is not None})
            self._stand.append(decision)

    def undo(self) -> Decision | None:
        """Take back the last decision that stands; None where there is none."""
        with self._lock:
            if not self._stand:
                return None
            self._append({"action": UNDO})
            return self._stand.pop()

    def latest(self) -> dict[str, Decision]:
        """By id, the last decision on each example."""
        with self._lock:
            return latest(self._stand)

    def close(self) -> None:
        os.close(self._file)

    def _append(self, record: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        line = json.dumps({**record, "at": now}, ensure_ascii=False).encode() + b"\n"
        with writing(self.path):
            before = os.fstat(self._file).st_size
            try:
                if os.write(self._file, line) != len(line):
                    raise OSError("no space is left")
                os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, before)  # what was not acknowledged is not there
                raise


def read_decisions(run: RunFolder) -> dict[str, Decision]:
    """By id, the last decision on each example of a run; none where nobody has reviewed it."""
    return latest(list(_standing(read_records(run.path / REVIEW))))


def latest(decisions: list[Decision]) -> dict[str, Decision]:
    return {decision.id: decision for decision in decisions}


def read_records(path: Path) -> list[dict[str, Any]]:
    """Every whole line; what a kill tore off behind the last newline was never acknowledged."""
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    return [_record(line, number, path) for number, line in enumerate(lines, start=1) if line.strip()]


def _standing(records: list[dict[str, Any]]) -> list[Decision]:
    stand: list[Decision] = []
    for record in records:
        if record["action"] != UNDO:
            stand.append(Decision(record["id"], record["action"], record.get("label")))
        elif stand:
            stand.pop()
    return stand


def _record(line: bytes, number: int, path: Path) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads(line)
        if record["action"] != UNDO:
            Decision(record["id"], record["action"], record.get("label"))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"line {number} of {path} is no decision: take that line out, or restore the file.") from error
    return record


def _hold(handle: int, path: Path) -> None:
    """No second review of this run while this one is open; a killed one lets go by itself."""
    if os.name != "posix":
        return
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise UsageError(f"another review is writing to {path}: stop that one first.") from error
    except OSError:  # a file system without locks
        return


def _cut_torn_line(handle: int) -> None:
    os.lseek(handle, 0, os.SEEK_SET)
    content = os.read(handle, os.fstat(handle).st_size)
    if content and not content.endswith(b"\n"):
        os.ftruncate(handle, content.rfind(b"\n") + 1)
