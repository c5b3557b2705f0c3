"""What is reviewed and what was decided: the queue, the decisions, the source with them applied, and audits.

``review.jsonl`` is append-only, and each record is on disk before the page is answered:
``{"id": "a.png", "action": "relabel", "label": "cat", "at": "2026-01-31T12:00:00+00:00"}``; ``keep`` and ``drop`` have
no label; ``{"action": "undo"}`` reverts the last decision that has not been reverted.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from soseleto.errors import UsageError, counted, did_you_mean
from soseleto.run_folder.files import append_line, changing, lines_of, locked, readable, verified
from soseleto.run_folder.folder import AUDIT, REVIEW, RunFolder
from soseleto.run_folder.ranking import Ranking, feature_columns, is_suspect, suggested_labels, suspect_rows
from soseleto.run_folder.source import image_from_file, load_thumbnails, write_corrected
from soseleto.suspects import audit as statistics
from soseleto.suspects.audit import CHECKS, LONGEST, Checked, Stratum
from soseleto.suspects.rates import AUDITED, Estimate

ACTIONS = ("keep", "drop", "relabel")
UNDO = "undo"
LARGEST = 1024  # longer side in pixels of an image read from the data
TITLES = {
    "precision": "Precision of the suspects",
    "recall": "Recall of the suspects",
    "wrong_share": "Share of wrong labels",
}


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
    run_path: str | os.PathLike[str], out: str | os.PathLike[str], *, suspects: str = "keep", force: bool = False
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


# An audit: the sample in ``audit.json``, its answers from ``review.jsonl``, and the figures

# The sample is drawn once; an interrupted audit continues with the same order. An answer is a decision of the review:
# ``keep`` if the label is right, anything else if it is wrong.


@dataclass(frozen=True)
class Audit:
    """The sample of one audit.

    checks: of the suspects, and as many of the others
    strata: as drawn, with ids in the place of rows
    suspects: the ids of all suspects
    """

    checks: int
    strata: tuple[Stratum, ...]
    suspects: frozenset[str]

    @classmethod
    def begin(cls, run: RunFolder) -> Audit:
        """Draw the sample. Examples that have a decision already may be part of it and are not asked for again."""
        ranking = run.ranking()
        strata = statistics.draw(ranking.get("mislabelled_probability"), is_suspect(ranking), seed=0)
        drawn = tuple(replace(stratum, order=ranking["id"][stratum.order]) for stratum in strata)
        return cls(CHECKS, drawn, _suspects(ranking))

    @classmethod
    def load(cls, run: RunFolder) -> Audit | None:
        """The audit of a run; None where it has none."""
        saved = run.read_json(AUDIT)
        if saved is None:
            return None
        with readable(run.path / AUDIT):
            strata = (Stratum(**{**fields, "order": np.array(fields["order"], object)}) for fields in saved["strata"])
            return cls(saved["checks"], tuple(strata), _suspects(run.ranking()))

    def progress(self, decisions: Mapping[str, Decision]) -> Progress:
        """The figures of the decisions so far."""
        strata = [self._checked(stratum, decisions) for stratum in self.strata]
        checked = [sum(len(stratum.answers) for stratum in strata if stratum.suspects == of) for of in (True, False)]
        left = sum(name not in decisions for name in self.ids())
        return Progress(self, statistics.figures(strata), checked[0], checked[1], left)

    def ids(self) -> list[str]:
        """The examples to check, in order."""
        return [str(name) for name in statistics.schedule(self.strata, self.checks)]

    def _checked(self, stratum: Stratum, decisions: Mapping[str, Decision]) -> Checked:
        in_order = (decisions.get(name) for name in stratum.order)
        answers = [decision.is_wrong for decision in takewhile(bool, in_order) if decision]
        of_stratum = [decision for name, decision in decisions.items() if (name in self.suspects) == stratum.suspects]
        wrong = sum(decision.is_wrong for decision in of_stratum)
        return Checked(stratum.suspects, stratum.size, stratum.expected, tuple(answers), wrong, len(of_stratum) - wrong)


@dataclass(frozen=True)
class Progress:
    """The state of an audit: its figures, the answers that count so far, and the checks that are left."""

    audit: Audit
    figures: dict[str, Estimate]
    suspects: int
    others: int
    left: int

    def to_dict(self) -> dict[str, Any]:
        """The content of ``audit.json``."""
        return {
            "checks": self.audit.checks,
            "checked": {"suspects": self.suspects, "others": self.others},
            "figures": {name: figure.to_dict(AUDITED) for name, figure in self.figures.items()},
            "strata": [asdict(stratum) for stratum in self.audit.strata],
        }

    def on_page(self) -> dict[str, Any]:
        """What the page shows."""
        rows = [{"name": TITLES[name], **figure.to_dict(AUDITED)} for name, figure in self.figures.items()]
        return {"figures": rows, "sentence": self.sentence()}

    def summary(self) -> list[str]:
        """Lines to print."""
        return [
            f"checked {self.suspects:,} suspects and {self.others:,} other examples",
            *(
                f"{TITLES[name].lower()}: {figure}{f', {AUDITED}' * figure.known}"
                for name, figure in self.figures.items()
            ),
            self.sentence(),
        ]

    def sentence(self) -> str:
        """What is left to do."""
        if not self.left:
            return "All checks are done."
        return f"{self.left:,} checks left. You can stop at any time."


def prepare(run: RunFolder, checks: int | None = None) -> Audit:
    """The audit of the run, begun where there is none; the number of checks can be changed later."""
    run.require_noisy()
    if checks is not None and not 1 <= checks <= LONGEST:
        raise UsageError(f"--checks must be between 1 and {LONGEST}, got {checks}.")
    audit = Audit.load(run) or Audit.begin(run)
    return replace(audit, checks=checks or audit.checks)


def _suspects(ranking: Ranking) -> frozenset[str]:
    return frozenset(map(str, ranking["id"][is_suspect(ranking)]))
