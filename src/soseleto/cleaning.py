"""The source of a run without its suspects, or with their suggested labels: a manifest that ``fit --source`` reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from soseleto import manifest
from soseleto.errors import UsageError
from soseleto.run import RunFolder
from soseleto.showing import suspects


class Cleaned(NamedTuple):
    rows: int
    dropped: int
    relabelled: int


def write_clean(run: str | os.PathLike[str], out: str | os.PathLike[str], *, relabel: bool = False) -> Cleaned:
    """Write the source without the suspects; with ``relabel`` they stay, under the labels suggested for them."""
    folder = RunFolder.open(run)
    ranking = folder.ranking()
    doubted = suspects(ranking)
    names = [str(name) for name in ranking["id"][doubted]]
    if not relabel:
        return Cleaned(manifest.write(folder, Path(out), drop=set(names), relabel={}), len(names), 0)
    if "suggested_label" not in ranking:
        raise UsageError(f"{folder.path} had no probes and so suggests no labels: leave --relabel out.")
    labels = [str(label) for label in ranking["suggested_label"][doubted]]
    corrected = dict(zip(names, labels, strict=True))
    return Cleaned(manifest.write(folder, Path(out), drop=set(), relabel=corrected), 0, len(names))
