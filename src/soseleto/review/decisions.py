"""Decisions of a review: ``review.jsonl``, append-only, each record on disk before the page is answered.

``{"id": "a.png", "action": "relabel", "label": "cat", "at": "2026-01-31T12:00:00+00:00"}``; ``keep`` and ``drop`` have
no label; ``{"action": "undo"}`` reverts the last decision that has not been reverted.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soseleto.errors import UsageError
from soseleto.run_folder.files import append_line, changing, lines_of, locked, verified
from soseleto.run_folder.folder import REVIEW, RunFolder

ACTIONS = ("keep", "drop", "relabel")
UNDO = "undo"


@dataclass(frozen=True)
class Decision:
    """The decision on one example; only ``relabel`` has a label."""

    id: str
    action: str
    label: str | None = None

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            raise UsageError(f"unknown action {self.action!r}: choose one of {', '.join(ACTIONS)}.")
        if (self.label is not None) != (self.action == "relabel"):
            raise UsageError(f"{self.action!r} with the label {self.label!r}: relabel, and only relabel, has a label.")


class Decisions:
    """The decisions of one run in order, and the file they are stored in; only one process can write to it."""

    def __init__(self, run: RunFolder) -> None:
        self.path = run.path / REVIEW
        self._thread_lock = threading.Lock()
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.path, f"another review is writing to {self.path}: stop that one first."))
            self._made = _read(self.path)
            self._file_lock = stack.pop_all()  # held until close()

    def decide(self, decision: Decision) -> None:
        """Return once the decision is on disk."""
        with self._thread_lock:
            self._append({name: value for name, value in asdict(decision).items() if value is not None})
            self._made.append(decision)

    def undo(self) -> Decision | None:
        """Revert the last decision and return it; None where there is none."""
        with self._thread_lock:
            if not self._made:
                return None
            self._append({"action": UNDO})
            return self._made.pop()

    def latest(self) -> dict[str, Decision]:
        """The last decision on each example, by id."""
        with self._thread_lock:
            return _by_id(self._made)

    def close(self) -> None:
        self._file_lock.close()

    def _append(self, record: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with changing(self.path):
            append_line(self.path, {**record, "at": now}, durable=True)


def read_decisions(run: RunFolder) -> dict[str, Decision]:
    """The last decision on each example of a run, by id; empty where the run has not been reviewed."""
    return _by_id(_read(run.path / REVIEW))


def _by_id(decisions: list[Decision]) -> dict[str, Decision]:
    return {decision.id: decision for decision in decisions}


def _read(path: Path) -> list[Decision]:
    """The decisions in order, without those that were undone."""
    made: list[Decision] = []
    if verified(path) is None:
        return made
    for decision in lines_of(path, _parse, what="a decision"):
        if decision is not None:
            made.append(decision)
        elif made:
            made.pop()
    return made


def _parse(record: dict[str, Any]) -> Decision | None:
    """None is an undo."""
    if record["action"] == UNDO:
        return None
    return Decision(record["id"], record["action"], record.get("label"))
