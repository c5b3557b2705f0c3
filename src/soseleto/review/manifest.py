"""Export a review: the source with all decisions applied, for the next training."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from soseleto.errors import UsageError
from soseleto.review.decisions import read_decisions
from soseleto.run_folder import manifest
from soseleto.run_folder.folder import RunFolder
from soseleto.run_folder.plausible import readable
from soseleto.run_folder.ranking import suspect_rows


@dataclass(frozen=True)
class Exported:
    """Counts of an exported manifest."""

    path: Path
    rows: int
    dropped: int
    relabelled: int
    copies: int  # of those: of target examples, given the target's label
    undecided: int  # suspects without a decision: exported unchanged


def export_manifest(run_path: str | os.PathLike[str], out: str | os.PathLike[str], *, force: bool = False) -> Exported:
    """Write the source with every decision of the review applied; ``force`` replaces an existing file.

    Copies of target examples, which the training left out and a review does not show, get the target's labels.
    """
    run = RunFolder.open(run_path)
    with readable(run.path):
        return _export(run, Path(out), force=force)


def _export(run: RunFolder, out: Path, *, force: bool) -> Exported:
    ranking, decisions = run.ranking(), read_decisions(run)  # an unfinished run has no ranking
    if not decisions:
        raise UsageError(f"{run.path} has no review decisions yet: type `soseleto review {run.path}` first.")
    drop = {name for name, one in decisions.items() if one.action == "drop"}
    chosen = {name: one.label for name, one in decisions.items() if one.label is not None}
    checked = {name: label for name, label in run.source().get("checked", {}).items() if name not in decisions}
    relabel = {**checked, **chosen}
    rows = manifest.write(run, out, drop=drop, relabel=relabel, force=force)
    undecided = sum(str(name) not in decisions for name in ranking["id"][suspect_rows(ranking)])
    return Exported(out, rows, len(drop), len(relabel), len(checked), undecided)
