"""An audit of a run: the sample in ``audit.json``, its answers from ``review.jsonl``, and the figures.

The sample is drawn once; an interrupted audit continues with the same order. An answer is a decision of the review:
``keep`` if the label is right, anything else if it is wrong.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from soseleto.errors import DataError, UsageError
from soseleto.review.decisions import Decision
from soseleto.run_folder.folder import AUDIT, RunFolder
from soseleto.run_folder.ranking import is_suspect
from soseleto.suspects import audit as statistics
from soseleto.suspects.audit import CHECKS, LONGEST, Checked, Decided, Figures, Stratum
from soseleto.suspects.estimate import AUDITED, Estimate

TITLES = {
    "precision": "Precision of the suspects",
    "recall": "Recall of the suspects",
    "wrong_share": "Share of wrong labels",
}


@dataclass(frozen=True)
class Part:
    """A stratum of the sample by the ids of its examples, in the order of checking."""

    suspects: bool
    size: int
    planned: int
    expected: float
    order: tuple[str, ...]


@dataclass(frozen=True)
class Audit:
    """The sample of one audit.

    checks: of the suspects, and as many of the others; None for as many as ``width`` needs
    before: ids decided before the audit began, among the suspects and among the others
    labels: the given label of every example, by id
    """

    seed: int
    checks: int | None
    width: float | None
    parts: tuple[Part, ...]
    before: tuple[tuple[str, ...], tuple[str, ...]]
    labels: Mapping[str, str]

    @classmethod
    def begin(
        cls,
        run: RunFolder,
        decisions: Mapping[str, Decision],
        *,
        checks: int | None = None,
        width: float | None = None,
        seed: int = 0,
    ) -> Audit:
        """Draw the sample; examples that have a decision already are not part of it."""
        ranking = run.ranking()
        ids = [str(name) for name in ranking["id"]]
        suspect, decided = is_suspect(ranking), np.array([name in decisions for name in ids])
        if decided.all():
            raise UsageError(f"every example of {run.path} has been decided: there is nothing left to audit.")
        strata = statistics.draw(
            ranking.get("mislabelled_probability"), suspect, decided, checks=checks or CHECKS, seed=seed
        )
        return cls(
            seed,
            CHECKS if checks is None and width is None else checks,
            width,
            tuple(_part(one, ids) for one in strata),
            tuple(  # type: ignore[arg-type]
                tuple(ids[row] for row in np.flatnonzero(decided & (suspect == kind))) for kind in (True, False)
            ),
            _labels(ranking),
        )

    @classmethod
    def load(cls, run: RunFolder) -> Audit | None:
        """The audit of a run; None where it has none."""
        found = run.read_json(AUDIT)
        if found is None:
            return None
        try:
            parts = tuple(Part(**{**one, "order": tuple(one["order"])}) for one in found["strata"])
            before = tuple(tuple(found["decided_before"][name]) for name in ("suspects", "others"))
            labels = _labels(run.ranking())
            return cls(found["seed"], found["checks"], found["width"], parts, before, labels)  # type: ignore[arg-type]
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{run.path / AUDIT} is not an audit: restore it, or delete it to begin again.") from error

    def progress(self, decisions: Mapping[str, Decision]) -> Progress:
        """The figures of the decisions so far."""
        strata = [self._checked(part, decisions) for part in self.parts]
        before = [self._decided(ids, decisions) for ids in self.before]
        found = statistics.figures(strata, (before[0], before[1]), fixed=self.width is None)
        checked = [sum(len(one.answers) for one in strata if one.suspects == kind) for kind in (True, False)]
        left = sum(name not in decisions for name in self.ids())
        return Progress(self, found, checked[0], checked[1], left)

    def ids(self) -> list[str]:
        """The examples to check, in order."""
        strata = [
            Stratum(one.suspects, one.size, np.array(one.order, dtype=object), one.planned, one.expected)
            for one in self.parts
        ]
        return [str(name) for name in statistics.schedule(strata, self._targets())]

    def _targets(self) -> list[int]:
        """Checks per stratum; those beyond the planned ones count at any time only."""
        if self.checks is None:
            return [LONGEST] * len(self.parts)
        targets: list[int] = []
        for kind in (True, False):
            parts = [part for part in self.parts if part.suspects == kind]
            targets += statistics.allocate([p.size for p in parts], [p.expected for p in parts], self.checks)
        return [max(number, part.planned) for number, part in zip(targets, self.parts, strict=True)]

    def _checked(self, part: Part, decisions: Mapping[str, Decision]) -> Checked:
        known = [self._is_wrong(decisions.get(name)) for name in part.order]
        answers = known[: known.index(None)] if None in known else known
        wrong = sum(one is True for one in known)
        right = sum(one is False for one in known)
        done = tuple(bool(one) for one in answers)
        return Checked(part.suspects, part.size, part.planned, part.expected, done, wrong, right)

    def _decided(self, ids: Sequence[str], decisions: Mapping[str, Decision]) -> Decided:
        known = [self._is_wrong(decisions.get(name)) for name in ids]
        return Decided(len(ids), sum(one is True for one in known), sum(one is None for one in known))

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
        return {name: one for name in TITLES if (one := getattr(self.figures, name)) is not None}

    @property
    def is_narrow(self) -> bool:
        """Whether precision and share of wrong labels are as narrow as was asked for."""
        return all(self._is_narrow(one) for name, one in self.shown.items() if name != "recall")

    def _is_narrow(self, figure: Estimate) -> bool:
        return self.audit.width is not None and figure.width <= self.audit.width

    def to_dict(self) -> dict[str, Any]:
        """The content of ``audit.json``."""
        audit = self.audit
        return {
            **{"seed": audit.seed, "checks": audit.checks, "width": audit.width, "complete": self.figures.complete},
            "checked": {"suspects": self.suspects, "others": self.others},
            "figures": {name: one.to_dict(AUDITED) for name, one in self.shown.items()},
            "decided_before": dict(zip(("suspects", "others"), audit.before, strict=True)),
            "strata": [asdict(part) for part in audit.parts],
        }

    def on_page(self) -> dict[str, Any]:
        """What the page shows."""
        rows = [
            {
                **{"name": TITLES[name], "low": one.low, "high": one.high, "narrow": self._is_narrow(one)},
                "value": one.value if one.known else None,
            }
            for name, one in self.shown.items()
        ]
        return {"figures": rows, "sentence": self.sentence(), "narrow": self.is_narrow}

    def summary(self) -> list[str]:
        """Lines to print."""
        before = sum(len(ids) for ids in self.audit.before)
        more = f"; {before:,} were decided before" if before else ""
        return [
            f"checked {self.suspects:,} suspects and {self.others:,} other examples{more}",
            *(f"{TITLES[name].lower()}: {one}{f', {AUDITED}' * one.known}" for name, one in self.shown.items()),
            self.sentence(),
        ]

    def sentence(self) -> str:
        """What is left to do."""
        certain = "Every interval contains the truth with a probability of at least 95 %."
        if self.is_narrow:
            return f"Narrow enough: you can stop. {certain}"
        if not self.left:
            return f"All checks are done. {certain}"
        if self.audit.width is not None:
            points = f"{100 * self.audit.width:.0f} points"
            return f"Until precision and share of wrong labels are known within {points}; you can stop at any time."
        if self.figures.complete:
            return f"{self.left:,} further checks left. You can stop at any time."
        return f"{self.left:,} checks left. You can stop at any time; after the last one the intervals become narrower."


def prepare(
    run: RunFolder,
    decisions: Mapping[str, Decision],
    *,
    checks: int | None = None,
    width: float | None = None,
    seed: int | None = None,
) -> Audit:
    """The audit of the run, begun where there is none; ``checks`` and ``width`` of one that exists can be changed."""
    require_auditable(run)
    _check(checks, width)
    there = Audit.load(run)
    if there is None:
        return Audit.begin(run, decisions, checks=checks, width=width, seed=seed or 0)
    if seed not in (None, there.seed):
        raise UsageError(
            f"the audit of {run.path} began with --seed {there.seed}: leave --seed out, or delete {run.path / AUDIT} "
            "to begin another."
        )
    if there.width is None and width is not None:  # both plans share one error rate, which has been divided already
        raise UsageError(
            f"the audit of {run.path} began with a fixed number of checks: leave --width out, or delete "
            f"{run.path / AUDIT} to begin another."
        )
    return replace(there, checks=checks or there.checks, width=width or there.width)


def require_auditable(run: RunFolder) -> None:
    if run.config().get("mode") == "transfer":
        raise UsageError(
            f"{run.path} was trained in transfer mode, where weights are about the target and not about wrong labels: "
            "there is nothing to audit."
        )


def _check(checks: int | None, width: float | None) -> None:
    if checks is not None and not 1 <= checks <= LONGEST:
        raise UsageError(f"--checks must be between 1 and {LONGEST}, got {checks}.")
    if width is not None and not 0.0 < width < 1.0:
        raise UsageError(f"--width must lie between 0 and 1, got {width}: for 10 points write 0.1.")


def _part(stratum: Stratum, ids: Sequence[str]) -> Part:
    order = tuple(ids[row] for row in stratum.order)
    return Part(stratum.suspects, stratum.size, stratum.planned, stratum.expected, order)


def _labels(ranking: Mapping[str, np.ndarray]) -> dict[str, str]:
    rows: Iterable[tuple[Any, Any]] = zip(ranking["id"], ranking["label"], strict=True)
    return {str(name): str(label) for name, label in rows}
