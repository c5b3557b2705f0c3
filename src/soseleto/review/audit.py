"""An audit of a run: the sample in ``audit.json``, its answers from ``review.jsonl``, and the figures.

The sample is drawn once; an interrupted audit continues with the same order. An answer is a decision of the review:
``keep`` if the label is right, anything else if it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from soseleto.errors import UsageError
from soseleto.review.queue import Decision
from soseleto.run_folder.files import readable
from soseleto.run_folder.folder import AUDIT, RunFolder
from soseleto.run_folder.ranking import is_suspect
from soseleto.suspects import audit as statistics
from soseleto.suspects.audit import CHECKS, LONGEST, Checked, Decided, Figures, Stratum
from soseleto.suspects.calibration import AUDITED, Estimate

TITLES = {
    "precision": "Precision of the suspects",
    "recall": "Recall of the suspects",
    "wrong_share": "Share of wrong labels",
}
Decisions = Mapping[str, Decision]  # by id


@dataclass(frozen=True)
class Audit:
    """The sample of one audit.

    checks: of the suspects, and as many of the others; None for as many as ``width`` needs
    strata: as drawn, with ids in the place of rows
    before: ids decided before the audit began, among the suspects and among the others
    labels: the given label of every example, by id
    """

    checks: int | None
    width: float | None
    strata: tuple[Stratum, ...]
    before: tuple[tuple[str, ...], tuple[str, ...]]
    labels: Mapping[str, str]

    @classmethod
    def begin(cls, run: RunFolder, decisions: Decisions, checks: int | None, width: float | None) -> Audit:
        """Draw the sample; examples that have a decision already are not part of it."""
        ranking, labels = run.ranking(), _labels(run)
        ids = np.array(list(labels), dtype=object)
        suspect, decided = is_suspect(ranking), np.array([name in decisions for name in ids])
        if decided.all():
            raise UsageError(f"every example of {run.path} has been decided: there is nothing left to audit.")
        probability = ranking.get("mislabelled_probability")
        strata = statistics.draw(probability, suspect, decided, seed=0)
        return cls(
            checks or (None if width else CHECKS),
            width,
            tuple(replace(stratum, order=ids[stratum.order]) for stratum in strata),
            (tuple(ids[decided & suspect]), tuple(ids[decided & ~suspect])),
            labels,
        )

    @classmethod
    def load(cls, run: RunFolder) -> Audit | None:
        """The audit of a run; None where it has none."""
        saved = run.read_json(AUDIT)
        if saved is None:
            return None
        with readable(run.path / AUDIT):
            strata = (Stratum(**{**fields, "order": np.array(fields["order"], object)}) for fields in saved["strata"])
            before = tuple(saved["decided_before"]["suspects"]), tuple(saved["decided_before"]["others"])
            return cls(saved["checks"], saved["width"], tuple(strata), before, _labels(run))

    def progress(self, decisions: Decisions) -> Progress:
        """The figures of the decisions so far."""
        strata = [self._checked(stratum, decisions) for stratum in self.strata]
        suspects, others = (self._decided(ids, decisions) for ids in self.before)
        checked = [sum(len(one.answers) for one in strata if one.suspects == of) for of in (True, False)]
        left = sum(name not in decisions for name in self.ids())
        return Progress(self, statistics.figures(strata, (suspects, others)), checked[0], checked[1], left)

    def ids(self) -> list[str]:
        """The examples to check, in order."""
        return [str(name) for name in statistics.schedule(self.strata, self.checks or LONGEST)]

    def _checked(self, stratum: Stratum, decisions: Decisions) -> Checked:
        known = [self._is_wrong(decisions.get(name)) for name in stratum.order]
        answers = known[: known.index(None)] if None in known else known
        counts = known.count(True), known.count(False)
        return Checked(stratum.suspects, stratum.size, stratum.expected, tuple(map(bool, answers)), *counts)

    def _decided(self, ids: Sequence[str], decisions: Decisions) -> Decided:
        known = [self._is_wrong(decisions.get(name)) for name in ids]
        return Decided(len(ids), known.count(True), known.count(None))

    def _is_wrong(self, decision: Decision | None) -> bool | None:
        """None without a decision; a relabelling to the given label is none."""
        if decision is None:
            return None
        return decision.action != "keep" and decision.label != self.labels.get(decision.id)


@dataclass(frozen=True)
class Progress:
    """The state of an audit: its figures, the answers that count so far, and the checks that are left."""

    audit: Audit
    figures: Figures
    suspects: int
    others: int
    left: int

    @property
    def shown(self) -> dict[str, Estimate]:
        """The figures by name; only the share of wrong labels without suspects."""
        return {name: figure for name in TITLES if (figure := getattr(self.figures, name)) is not None}

    @property
    def is_narrow(self) -> bool:
        """Whether precision and share of wrong labels are as narrow as was asked for."""
        return all(self._is_narrow(figure) for name, figure in self.shown.items() if name != "recall")

    def _is_narrow(self, figure: Estimate) -> bool:
        return self.audit.width is not None and figure.width <= self.audit.width

    def to_dict(self) -> dict[str, Any]:
        """The content of ``audit.json``."""
        return {
            "checks": self.audit.checks,
            "width": self.audit.width,
            "checked": {"suspects": self.suspects, "others": self.others},
            "figures": {name: figure.to_dict(AUDITED) for name, figure in self.shown.items()},
            "decided_before": dict(zip(("suspects", "others"), self.audit.before, strict=True)),
            "strata": [asdict(stratum) for stratum in self.audit.strata],
        }

    def on_page(self) -> dict[str, Any]:
        """What the page shows."""
        rows = [
            {
                "name": TITLES[name],
                "value": figure.value if figure.known else None,
                "low": figure.low,
                "high": figure.high,
                "narrow": self._is_narrow(figure),
            }
            for name, figure in self.shown.items()
        ]
        return {"figures": rows, "sentence": self.sentence(), "narrow": self.is_narrow}

    def summary(self) -> list[str]:
        """Lines to print."""
        before = sum(len(ids) for ids in self.audit.before)
        more = f"; {before:,} were decided before" if before else ""
        return [
            f"checked {self.suspects:,} suspects and {self.others:,} other examples{more}",
            *(
                f"{TITLES[name].lower()}: {figure}{f', {AUDITED}' * figure.known}"
                for name, figure in self.shown.items()
            ),
            self.sentence(),
        ]

    def sentence(self) -> str:
        """What is left to do."""
        if self.is_narrow:
            return "Narrow enough: you can stop."
        if not self.left:
            return "All checks are done."
        if self.audit.width is not None:
            points = f"{100 * self.audit.width:.0f} points"
            return f"Until precision and share of wrong labels are known within {points}; you can stop at any time."
        return f"{self.left:,} checks left. You can stop at any time."


def prepare(run: RunFolder, decisions: Decisions, *, checks: int | None = None, width: float | None = None) -> Audit:
    """The audit of the run, begun where there is none; ``checks`` and ``width`` of one that exists can be changed."""
    require_auditable(run)
    if checks is not None and not 1 <= checks <= LONGEST:
        raise UsageError(f"--checks must be between 1 and {LONGEST}, got {checks}.")
    if width is not None and not 0.0 < width < 1.0:
        raise UsageError(f"--width must lie between 0 and 1, got {width}: for 10 points write 0.1.")
    audit = Audit.load(run)
    if audit is None:
        return Audit.begin(run, decisions, checks, width)
    return replace(audit, checks=checks or (None if width else audit.checks), width=width or audit.width)


def require_auditable(run: RunFolder) -> None:
    if run.is_transfer:
        raise UsageError(
            f"{run.path} was trained in transfer mode, where weights are about the target and not about wrong labels: "
            "there is nothing to audit."
        )


def _labels(run: RunFolder) -> dict[str, str]:
    ranking = run.ranking()
    return {str(name): str(label) for name, label in zip(ranking["id"], ranking["label"], strict=True)}
