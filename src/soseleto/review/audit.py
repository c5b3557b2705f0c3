"""An audit of a run: the sample in ``audit.json``, its answers from ``review.jsonl``, and the figures.

The sample is drawn once; an interrupted audit continues with the same order. An answer is a decision of the review:
``keep`` if the label is right, anything else if it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from soseleto.errors import UsageError
from soseleto.review.queue import Decision
from soseleto.run_folder.files import readable
from soseleto.run_folder.folder import AUDIT, RunFolder
from soseleto.run_folder.ranking import Ranking, is_suspect
from soseleto.suspects import audit as statistics
from soseleto.suspects.audit import CHECKS, LONGEST, Checked, Stratum
from soseleto.suspects.rates import AUDITED, Estimate

TITLES = {
    "precision": "Precision of the suspects",
    "recall": "Recall of the suspects",
    "wrong_share": "Share of wrong labels",
}
Decisions = Mapping[str, Decision]  # by id


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

    def progress(self, decisions: Decisions) -> Progress:
        """The figures of the decisions so far."""
        strata = [self._checked(stratum, decisions) for stratum in self.strata]
        checked = [sum(len(stratum.answers) for stratum in strata if stratum.suspects == of) for of in (True, False)]
        left = sum(name not in decisions for name in self.ids())
        return Progress(self, statistics.figures(strata), checked[0], checked[1], left)

    def ids(self) -> list[str]:
        """The examples to check, in order."""
        return [str(name) for name in statistics.schedule(self.strata, self.checks)]

    def _checked(self, stratum: Stratum, decisions: Decisions) -> Checked:
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
