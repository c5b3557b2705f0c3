"""Export a review: the source with all decisions applied, for the next training."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from soseleto.errors import UsageError, did_you_mean
from soseleto.review.decisions import read_decisions
from soseleto.run_folder.files import readable
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.ranking import suspect_rows
from soseleto.run_folder.source import write_corrected

UNDECIDED = ("keep", "drop", "relabel")  # what can happen to suspects without a decision


@dataclass(frozen=True)
class Exported:
    """Counts of an exported source."""

    path: Path
    rows: int
    dropped: int
    relabelled: int
    copies: int  # of those: of target examples, given the target's label
    undecided: int  # suspects without a decision


def export_source(
    run_path: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    suspects: str = "keep",
    force: bool = False,
) -> Exported:
    """Write the source with every decision of the review applied; ``force`` replaces an existing file.

    Copies of target examples, which the training left out and a review does not show, get the target's labels.

    suspects: what happens to suspects without a decision; ``"relabel"`` gives them their suggested label
    """
    if suspects not in UNDECIDED:
        raise UsageError(
            f"unknown choice {suspects!r}{did_you_mean(suspects, UNDECIDED)}: write keep, drop or relabel."
        )
    run = RunFolder.open(run_path)
    with readable(run.path):
        return _export(run, Path(out), suspects, force=force)


def _export(run: RunFolder, out: Path, suspects: str, *, force: bool) -> Exported:
    ranking, decisions = run.ranking(), read_decisions(run)  # an unfinished run has no ranking
    if not decisions and suspects == "keep":
        raise UsageError(
            f"{run.path} has no review decisions yet: type `soseleto review {run.path}` first, or add --suspects drop."
        )
    if suspects == "relabel" and "suggested_label" not in ranking:
        raise UsageError(f"{run.path} was trained without probes and has no suggested labels: use --suspects drop.")
    undecided = [row for row in suspect_rows(ranking) if str(ranking["id"][row]) not in decisions]
    drop = {key for key, decision in decisions.items() if decision.action == "drop"}
    checked = {key: label for key, label in run.source().get("checked", {}).items() if key not in decisions}
    relabel = {**checked, **{key: one.label for key, one in decisions.items() if one.label is not None}}
    if suspects == "drop":
        drop |= {str(ranking["id"][row]) for row in undecided}
    elif suspects == "relabel":
        relabel |= {str(ranking["id"][row]): str(ranking["suggested_label"][row]) for row in undecided}
    rows = write_corrected(run, out, drop=drop, relabel=relabel, force=force)
    return Exported(out, rows, len(drop), len(relabel), len(checked), len(undecided))
