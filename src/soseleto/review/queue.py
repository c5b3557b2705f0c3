"""What is reviewed and what was decided: the queue of examples, the decisions, and the source with them applied.

``review.jsonl`` is append-only, and each record is on disk before the page is answered:
``{"id": "a.png", "action": "relabel", "label": "cat", "at": "2026-01-31T12:00:00+00:00"}``; ``keep`` and ``drop`` have
no label; ``{"action": "undo"}`` reverts the last decision that has not been reverted.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.errors import UsageError, counted, did_you_mean
from soseleto.run_folder.files import append_line, changing, lines_of, locked, readable, verified
from soseleto.run_folder.folder import REVIEW, RunFolder
from soseleto.run_folder.ranking import feature_columns, suggested_labels, suspect_rows
from soseleto.run_folder.source import image_from_file, load_thumbnails, write_corrected

ACTIONS = ("keep", "drop", "relabel")
UNDO = "undo"
LARGEST = 1024  # longer side in pixels of an image read from the data


class Queue:
    """The examples to review: the suspects, most suspicious first, or the sample of an audit, in its order.

    The answers of an audit must not be led by the model, so its opinion is not shown.
    """

    def __init__(self, run: RunFolder, sample: Sequence[str] | None = None) -> None:
        with readable(run.path):
            run.require_noisy()
            self.run, self.ranking, self.is_audit = run, run.ranking(), sample is not None
            if self.ranking["label"].dtype.kind == "f":
                raise UsageError(f"the labels of {run.path} are real numbers: only classes can be reviewed.")
            self.ids = [str(name) for name in self.ranking["id"]]
            if sample is None:
                self.rows = suspect_rows(self.ranking).tolist()
            else:
                row_of = {name: row for row, name in enumerate(self.ids)}
                self.rows = [row_of[name] for name in sample]
            self.pictures, self.features = load_thumbnails(run), feature_columns(self.ranking, run.source())
            self.suggested = None if self.is_audit else suggested_labels(self.ranking)
            self.classes, self.basis = self._classes(), (run.suspects() or {}).get("basis", "")
        if not self.rows:
            raise UsageError(f"{run.path} has no suspects: there is nothing to review.")

    def to_json(self) -> dict[str, Any]:
        """Everything the page needs except the images."""
        return {
            "classes": self.classes,
            "items": [self._item(row) for row in self.rows],
            "pictures": bool(self.pictures) or "path" in self.ranking,
            "features": list(self.features.values()),
            "basis": self.basis,
        }

    def picture(self, row: int) -> bytes | None:
        """The image from its own file where it still exists, else the thumbnail in the run folder."""
        path = self.ranking.get("path")
        image = None if path is None else image_from_file(str(path[row]), LARGEST)
        return image or self.pictures.get(self.ids[row])

    def _item(self, row: int) -> dict[str, Any]:
        def value(column: str) -> Any:
            return self.ranking[column][row] if column in self.ranking and not self.is_audit else None

        return {
            "row": row,
            "id": self.ids[row],
            "label": str(self.ranking["label"][row]),
            "suggested": None if self.suggested is None else self.suggested[row],
            "wrong": value("mislabelled_probability"),
            "weight": value("weight"),
            "values": [self.ranking[name][row] for name in self.features],
        }

    def _classes(self) -> list[str]:
        """Class names in the run's order, followed by names that occur only in labels or suggestions."""
        known = self.run.config().get("classes") or []
        labels = np.unique(self.ranking["label"].astype(str)).tolist()
        suggested = () if self.suggested is None else sorted({*self.suggested} - {None})
        return list(dict.fromkeys([*map(str, known), *labels, *suggested]))


# Decisions


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

    @property
    def is_wrong(self) -> bool:
        """Whether the given label is."""
        return self.action != "keep"


class Decisions:
    """The decisions of one run in order, and the file they are stored in; only one process can write to it."""

    def __init__(self, run: RunFolder) -> None:
        self.path = run.path / REVIEW
        with contextlib.ExitStack() as stack:
            stack.enter_context(locked(self.path, f"another review is writing to {self.path}: stop that one first."))
            self._decisions = _read(self.path)
            self._file_lock = stack.pop_all()  # held until close()

    def decide(self, decision: Decision) -> None:
        """Return once the decision is on disk."""
        self._append({name: value for name, value in asdict(decision).items() if value is not None})
        self._decisions.append(decision)

    def undo(self) -> Decision | None:
        """Revert the last decision and return it; None where there is none."""
        if not self._decisions:
            return None
        self._append({"action": UNDO})
        return self._decisions.pop()

    def latest(self) -> dict[str, Decision]:
        """The last decision on each example, by id."""
        return {decision.id: decision for decision in self._decisions}

    def close(self) -> None:
        self._file_lock.close()

    def _append(self, record: dict[str, Any]) -> None:
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        with changing(self.path):
            append_line(self.path, {**record, "at": now}, durable=True)


def read_decisions(run: RunFolder) -> dict[str, Decision]:
    """The last decision on each example of a run, by id; empty where the run has not been reviewed."""
    return {decision.id: decision for decision in _read(run.path / REVIEW)}


def _read(path: Path) -> list[Decision]:
    """The decisions in order, without those that were undone."""
    decisions: list[Decision] = []
    if verified(path) is None:
        return decisions
    for decision in lines_of(path, _parse, what="a decision"):
        if decision is not None:
            decisions.append(decision)
        elif decisions:
            decisions.pop()
    return decisions


def _parse(record: dict[str, Any]) -> Decision | None:
    """None is an undo."""
    if record["action"] == UNDO:
        return None
    return Decision(record["id"], record["action"], record.get("label"))


# The source with the decisions applied


def export_source(
    run_path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    suspects: str = "keep",
    force: bool = False,
) -> str:
    """Write the source with every decision of the review applied, and say what was written.

    Copies of target examples, which the training left out and a review does not show, get the target's labels.

    suspects: what happens to suspects without a decision; ``"relabel"`` gives them their suggested label
    force: replace an existing file
    """
    if suspects not in ACTIONS:
        raise UsageError(f"unknown choice {suspects!r}{did_you_mean(suspects, ACTIONS)}: write keep, drop or relabel.")
    run, out = RunFolder.open(run_path), Path(out)
    ranking, decisions = run.ranking(), read_decisions(run)  # an unfinished run has no ranking
    if not decisions and suspects == "keep":
        raise UsageError(
            f"{run.path} has no review decisions yet: type `soseleto review {run.path}` or --suspects drop."
        )
    if suspects == "relabel" and "suggested_label" not in ranking:
        raise UsageError(f"{run.path} was trained without probes and has no suggested labels: use --suspects drop.")
    undecided = [row for row in suspect_rows(ranking) if str(ranking["id"][row]) not in decisions]
    drop = {key for key, decision in decisions.items() if decision.action == "drop"}
    checked = {key: label for key, label in run.source().get("checked", {}).items() if key not in decisions}
    relabel = checked | {key: decision.label for key, decision in decisions.items() if decision.label is not None}
    if suspects == "drop":
        drop |= {str(ranking["id"][row]) for row in undecided}
    elif suspects == "relabel":
        relabel |= {str(ranking["id"][row]): str(ranking["suggested_label"][row]) for row in undecided}
    rows = write_corrected(run, out, drop=drop, relabel=relabel, force=force)
    copies = f", {len(checked):,} of them because they are in the target" if checked else ""
    unchanged = f", {counted(len(undecided), 'suspect')} not decided and left unchanged" * (suspects == "keep")
    counts = f"{counted(rows, 'example')}, {len(drop):,} dropped, {len(relabel):,} relabelled"
    return f"wrote {out}: {counts}{copies}{unchanged}"
